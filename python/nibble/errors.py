"""What nibble raises: an exception for each status code of the library, which is also the built-in exception people would catch.

The text is the library's own: one line with the values, and the remedy. Objects that are no arrays at all raise TypeError.
"""

from __future__ import annotations


class Error(Exception):
    """A call of nibble failed."""

    code: str = "internal"

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # KeyError would show it quoted


class InvalidArgument(Error, ValueError):
    """Values that contradict each other or the documented range."""

    code = "invalid_argument"


class Unsupported(Error, NotImplementedError):
    """Well-formed, but nibble has no implementation for it: or not on this machine, or not in this build."""

    code = "unsupported"


class NotFound(Error, KeyError, FileNotFoundError):
    """No file, tensor, module or kernel of that name."""

    code = "not_found"


class AlreadyExists(Error, FileExistsError):
    """An output that would be overwritten."""

    code = "already_exists"


class IoError(Error, OSError):
    """The operating system refused: permissions, a full disk, no memory, ..."""

    code = "io_error"


class CorruptData(Error, ValueError):
    """A file, or the tensors of a layer, break the rules of their format."""

    code = "corrupt_data"


class Internal(Error, RuntimeError):
    """A bug in nibble, or a CUDA launch that failed; please report it."""

    code = "internal"


BY_CODE: dict[str, type[Error]] = {
    error.code: error for error in (InvalidArgument, Unsupported, NotFound, AlreadyExists, IoError, CorruptData, Internal)
}
