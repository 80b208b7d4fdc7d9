"""Files that others may read at the same time: written all or not at all, and read up to a limit."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["TooLongError", "read_text", "write_bytes", "write_text"]


class TooLongError(ValueError):
    """A file is longer than its reader allows."""


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a UTF-8 file as :func:`write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file: all of it, or nothing and the old file stays.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path)
    # beside the target, because a rename is atomic only within a file system
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except OSError as error:
        # the caller knows nothing of the draft
        raise type(error)(error.errno, error.strerror, str(target)) from error
    finally:
        draft.unlink(missing_ok=True)


def read_text(path: str | os.PathLike[str], most: int) -> str:
    """Reads a UTF-8 file of at most ``most`` bytes.

    Raises:
        TooLongError: the file is longer.
        OSError: the file cannot be read.
        UnicodeDecodeError: it is not UTF-8 text.
    """
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise TooLongError(f"has more than {most} bytes")
    return data.decode()
