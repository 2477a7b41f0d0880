"""Names of the metadata keys of a pair; docs/gguf-tools.md describes each."""

from __future__ import annotations

PREFIX = "hobbit.pair."
VERSION = 1

# In the base file and in every expert file.
K_VERSION = PREFIX + "version"
K_ID = PREFIX + "id"
K_ROUTER = PREFIX + "router_hash"
K_SHA = PREFIX + "sha256"

# In the base file.
K_HIGH = PREFIX + "high"
K_LOW = PREFIX + "low"
K_HIGH_SIZE = PREFIX + "high_size"
K_LOW_SIZES = PREFIX + "low_sizes"
K_TENSORS = PREFIX + "tensors"
K_LOW_SHA = PREFIX + "low_sha256"
K_SOURCE_SHA = PREFIX + "source_header_sha256"
K_SOURCE_SIZE = PREFIX + "source_size"
K_SOURCE_NOTES = PREFIX + "source_notes"

# In expert files.
K_ROLE = PREFIX + "role"
K_TYPE = PREFIX + "type"
K_KEPT = PREFIX + "kept"
K_IMATRIX = PREFIX + "imatrix"

NO_SHA = "0" * 64
