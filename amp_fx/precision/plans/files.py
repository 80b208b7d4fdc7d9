"""JSON files: written whole or not at all, and read into dataclasses by their annotations.

An error of form names the place: ``nodes[3].dtype``.
"""

from __future__ import annotations

import json
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch

from amp_fx.errors import AmpFxError, did_you_mean
from amp_fx.runtime.state import cache_results

T = TypeVar("T")
#: field that only one kind of file has -> the kind, and what reads it
_KINDS = {
    "nodes": "a plan: options={'plan': path} follows it, amp_fx.Plan.load reads it",
    "plans": "a report: options={'plan': path} follows its plans, amp_fx.Report.load reads it",
    "graphs": "a sensitivity file: policy={'sensitivity': path} follows it, amp_fx.explain(sensitivity=path) shows it",
    "peak": "a device profile: options={'profile': path} takes it",
}
#: bytes that a file may have; plans and reports have about 600 a call, sensitivity files a kilobyte
MAX_FILE = 256 * 1024 * 1024


class SchemaError(AmpFxError, ValueError):
    """A JSON document does not have the form it should have."""


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a UTF-8 file as ``write_bytes`` does."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file: all of it, or nothing and the old file stays. Raises OSError with its name."""
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
    read: Callable[[dict[str, Any]], T],
    error: type[AmpFxError],
    how: str = "",
    most: int | None = None,
) -> T:
    """The result of ``read`` for the object in a JSON file of at most ``most`` bytes; ``error`` where that fails.

    Messages say ``what`` it should be, ``"a plan"``, and ``how`` to write such a file, in a sentence.
    """
    name, most = f"{what.removeprefix('a ')} {os.fspath(path)!r}", most or MAX_FILE
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise AmpFxError(f"has more than {most} bytes.")
        return read(parse_object(data.decode(), what))
    except OSError as caught:
        raise error(f"{in_words(caught)} {how}".rstrip()) from caught
    except UnicodeDecodeError as caught:
        raise error(f"{name} is not valid JSON: {caught}.") from caught
    except AmpFxError as caught:
        raise error(f"{name}: {caught}") from caught


def in_words(error: Exception) -> str:
    """The text of an error, with the file first where the operating system says it."""
    if not isinstance(error, OSError) or error.filename is None or isinstance(error, AmpFxError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        folder = Path(error.filename).parent
        what = f"file {str(error.filename)!r}" if folder.is_dir() else f"folder '{folder}'"
        return f"there is no {what}."
    return f"{str(error.filename)!r}: {error.strerror}."


def parse_object(text: str, what: str) -> dict[str, Any]:
    """The JSON object that a text holds; ``what`` it should be is for messages. Raises SchemaError."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{what} is not valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise SchemaError(f"{what} is a JSON object; got {type(data).__name__}.")
    return data


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def as_data(value: Any) -> Any:
    """Dataclasses and plain data in JSON-like form: dtypes and enums by name, ``to_dict`` where a class has it."""
    if is_dataclass(value) and not isinstance(value, type):
        own: Callable[[], Any] | None = getattr(value, "to_dict", None)
        return as_data(vars(value)) if own is None else own()
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: as_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_data(item) for item in value]
    return value


def decode_file(
    cls: type[T], data: Mapping[str, Any], error: type[AmpFxError], header: Mapping[str, Any], *needed: str
) -> T:
    """A dataclass of the object in a file, which has a header and these fields; ``error`` where that is not so."""
    what, values = cls.__name__.lower(), dict(data)
    check_kind(cls, data, error)
    found = {key: values.pop(key, None) for key in header}
    if found != header:
        raise error(f"not a {what} of this amp_fx: it has {found}, not {header}. Make a new {what}.")
    missing = next((name for name in needed if name not in values), None)
    if missing is not None:
        raise error(f"not a {what}: {what}.{missing} is missing.")
    try:
        return decode(cls, values, what)
    except SchemaError as caught:
        raise error(f"not a {what}: {caught}") from caught


def check_kind(cls: Any, data: Mapping[str, Any], error: type[AmpFxError]) -> None:
    """Raises ``error`` for the object in a file of another kind than a dataclass, and says which kind it is."""
    own = {row.name for row in fields(cls)}
    if other := next((kind for name, kind in _KINDS.items() if name in data and name not in own), None):
        raise error(f"not a {cls.__name__.lower()}, but {other}.")


def decode(hint: type[T], value: object, where: str) -> T:
    """Builds a value of an annotated type from what ``json.loads`` gave; messages call it ``where``: ``"plan"``.

    The type is a dataclass of dataclasses, lists, tuples, mappings, dtypes, enums and plain values; a class inside that
    has ``from_dict`` is read by it. SchemaError: a field is missing, unknown or of another type.
    """
    return _object(hint, value, where) if is_dataclass(hint) else _decode(hint, value, where)


def _decode(hint: Any, value: Any, where: str) -> Any:
    if hint in (int, str, bool, float):
        # True is an int to Python, 1 a float to JSON, unless it is beyond any float
        if type(value) is hint:
            return value
        is_whole = hint is float and type(value) is int and abs(value) <= sys.float_info.max
        return float(value) if is_whole else _refuse(where, hint.__name__, value)
    if hint is Any:
        return value
    if is_dataclass(hint):
        own: Callable[[Any], Any] | None = getattr(hint, "from_dict", None)
        if own is None or not isinstance(value, Mapping):
            return _object(hint, value, where)
        return own(value)
    if hint is torch.dtype:
        found = getattr(torch, value, None) if isinstance(value, str) else None
        return found if isinstance(found, torch.dtype) else _refuse(where, "name of a dtype", value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        valid = [member.value for member in hint]
        return hint(value) if value in valid else _refuse(where, f"one of {', '.join(valid)}", value)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        # X | None is the only union in use
        return None if value is None else _decode(inner[0], value, where)
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            return _refuse(where, "list", value)
        is_record = origin is tuple and ... not in inner
        if is_record and len(value) != len(inner):
            return _refuse(where, f"list of {len(inner)}", value)
        hints = inner if is_record else inner[:1] * len(value)
        pairs = enumerate(zip(hints, value, strict=True))
        return origin(_decode(each, item, f"{where}[{index}]") for index, (each, item) in pairs)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            return _refuse(where, "object", value)
        return {str(key): _decode(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where}: no way to read {hint}")


def _object(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        _refuse(where, "object", value)
    known = _fields(cls)
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        hint = did_you_mean(str(unknown), known)
        raise SchemaError(f"{where}.{unknown} is unknown; valid: {', '.join(known)}.{hint}")
    missing = next((name for name, (_, required) in known.items() if required and name not in value), None)
    if missing is not None:
        raise SchemaError(f"{where}.{missing} is missing.")
    return cls(**{key: _decode(known[key][0], item, f"{where}.{key}") for key, item in value.items()})


@cache_results()
def _fields(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Annotation by field, and True where the field has no default."""
    hints = typing.get_type_hints(cls)
    return {
        row.name: (hints[row.name], row.default is MISSING and row.default_factory is MISSING)
        for row in fields(cls)
    }


def _refuse(where: str, wanted: str, value: object) -> typing.NoReturn:
    text = repr(value)
    raise SchemaError(f"{where} should be {wanted}; got {text if len(text) <= 60 else f'{text[:57]}...'}.")
