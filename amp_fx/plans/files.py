"""Files that others may read at the same time: written all or not at all, and read up to a limit."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from amp_fx.errors import AmpFxError
from amp_fx.plans.schema import parse_object

__all__ = ["in_words", "read_object", "write_bytes", "write_text"]

Read = TypeVar("Read")


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


def read_object(
    path: str | os.PathLike[str],
    what: str,
    read: Callable[[dict[str, Any]], Read],
    most: int,
    error: type[AmpFxError],
    how: str = "",
) -> Read:
    """What a JSON file holds.

    Args:
        path: of the file.
        what: it should be, for messages: ``"a plan"``.
        read: makes it of the file's object.
        most: bytes that the file may have.
        error: the class of what is raised.
        how: to write such a file, a sentence.

    Raises:
        AmpFxError: of that class; the file cannot be read, is longer, or holds something else.
    """
    name = f"{what.removeprefix('a ')} {os.fspath(path)!r}"
    try:
        return read(parse_object(_text(path, most), what))
    except OSError as caught:
        raise error(f"{in_words(caught)} {how}".rstrip()) from caught
    except UnicodeDecodeError as caught:
        raise error(f"{name} is not valid JSON: {caught}.") from caught
    except AmpFxError as caught:
        raise error(f"{name}: {caught}") from caught


def in_words(error: Exception) -> str:
    """What went wrong, with the file first where the operating system says it."""
    if not isinstance(error, OSError) or error.filename is None or isinstance(error, AmpFxError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        folder = Path(error.filename).parent
        what = f"file {str(error.filename)!r}" if folder.is_dir() else f"folder '{folder}'"
        return f"there is no {what}."
    return f"{str(error.filename)!r}: {error.strerror}."


def _text(path: str | os.PathLike[str], most: int) -> str:
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise AmpFxError(f"has more than {most} bytes.")
    return data.decode()
