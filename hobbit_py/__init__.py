"""HOBBIT from Python: llama-cpp-python's `Llama` with an expert cache that can be seen and steered.

    from hobbit_py import Hobbit
    model = Hobbit("model-Q8_0.gguf", low="model-Q2_K.gguf", cache="8GiB")

`hobbit_py.hobbit` holds the class, `hobbit_py.stats` what it reports, `hobbit_py.cli` the command `hobbit`,
`hobbit_py._lib` all contact with the C library.
"""

from __future__ import annotations

from hobbit_py.hobbit import Candidates, ExpertReadError, Hobbit
from hobbit_py.stats import CacheStats, Counters, LayerStats, Placement, Pool

__all__ = ["CacheStats", "Candidates", "Counters", "ExpertReadError", "Hobbit", "LayerStats", "Placement", "Pool"]
