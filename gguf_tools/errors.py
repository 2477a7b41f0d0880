"""The one exception of this package and the exit codes of its command.

Everything that can go wrong with a user's file, disk or option ends as a `ToolError`: one line that says which file,
which tensor and which number, and an exit code that a script can act on. Anything else that escapes is a bug.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path


class ExitCode(enum.IntEnum):
    """Exit status of `gguf-tools`; docs/gguf-tools.md lists them for users."""

    OK = 0
    INTERNAL = 1  # a bug in this package
    USAGE = 2  # an option or argument that cannot be used
    MALFORMED = 3  # a file that is damaged, truncated or not a GGUF
    UNSUPPORTED = 4  # a sound file that this tool does not handle (dense model, big-endian, ...)
    CONFLICT = 5  # an output exists, or is an input
    IO = 6  # disk full, permission, read or write error
    MISMATCH = 7  # `verify` or a pair's own checks found a difference
    LIBRARY = 8  # the ggml library is missing or too old
    INTERRUPTED = 130


class ToolError(Exception):
    """A failure that the user can act on; `str()` is a single printable line."""

    def __init__(
        self,
        message: str,
        *,
        file: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        code: ExitCode = ExitCode.MALFORMED,
    ) -> None:
        self.file = None if file is None else Path(file)
        self.tensor = tensor
        self.code = code
        parts = []
        if self.file is not None:
            parts.append(show_path(self.file))
        if tensor is not None:
            parts.append(f"tensor '{show(tensor)}'")
        parts.append(message)
        super().__init__(show(": ".join(parts)))


def show(text: str, limit: int = 2000) -> str:
    """`text` as one line that is safe on a terminal: control characters and lone surrogates are escaped."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return safe if len(safe) <= limit else safe[: limit - 3] + "..."


def show_path(path: str | os.PathLike[str]) -> str:
    """A path for a message, whatever bytes its name holds."""
    return show(os.fspath(path))


def io_error(error: OSError, what: str, file: str | os.PathLike[str] | None = None) -> ToolError:
    """Translate an OSError met while doing `what`."""
    reason = error.strerror or str(error)
    target = file if file is not None else error.filename
    return ToolError(f"{what}: {reason}", file=target, code=ExitCode.IO)
