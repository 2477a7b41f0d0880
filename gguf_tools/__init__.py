"""Tools for pairs of high- and low-precision expert files of GGUF models.

`gguf_tools.pair`, `merge`, `verify`, `inspect` and `plan` each hold one operation as plain functions;
`gguf_tools.cli` is the command `gguf-tools`. All failures are `ToolError`.
"""

from __future__ import annotations

from gguf_tools.errors import ExitCode, ToolError

__all__ = ["ExitCode", "ToolError"]
