"""Plain data to JSON, and JSON into dataclasses by their annotations: an error names the place, ``nodes[3].dtype``."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

import torch

from amp_fx.errors import AmpFxError, did_you_mean
from amp_fx.state import cache_results

__all__ = ["SchemaError", "decode", "dtype_name", "named_dtypes", "parse_object"]

T = TypeVar("T")


class SchemaError(AmpFxError, ValueError):
    """A JSON document does not have the form it should have."""


def parse_object(text: str, what: str) -> dict[str, Any]:
    """The JSON object that a text holds.

    Args:
        text: of any length and content.
        what: it should be, for messages: ``"a plan"``.

    Raises:
        SchemaError: not JSON, or not an object.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{what} is not valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise SchemaError(f"{what} is a JSON object; got {type(data).__name__}.")
    return data


def decode(hint: type[T], value: object, where: str) -> T:
    """Builds a value of an annotated type.

    Args:
        hint: a dataclass; its fields are dataclasses, lists, tuples, mappings, dtypes, enums and plain values.
        value: what ``json.loads`` gave.
        where: name of the value in messages: ``"plan"``.

    Raises:
        SchemaError: a field is missing, unknown or of another type.
    """
    return _decode(hint, value, where)


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def named_dtypes(value: Any) -> Any:
    """Plain data in its JSON-like form: dtypes and members of enums by name."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: named_dtypes(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [named_dtypes(item) for item in value]
    return value


def _decode(hint: Any, value: Any, where: str) -> Any:
    if hint in (int, str, bool, float):
        # True is an int to Python, 1 a float to JSON
        right = type(value) is hint or (hint is float and type(value) is int)
        try:
            return hint(value) if right else _refuse(where, hint.__name__, value)
        except OverflowError:  # an int beyond any float
            return _refuse(where, hint.__name__, value)
    if hint is Any:
        return value
    if is_dataclass(hint):
        return _object(hint, value, where)
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
        return origin(_decode(inner[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            return _refuse(where, "object", value)
        return {str(key): _decode(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where}: no way to read {hint}")


def _object(cls: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        _refuse(where, "object", value)
    hints, required = _fields(cls)
    unknown = next((key for key in value if key not in hints), None)
    if unknown is not None:
        raise SchemaError(
            f"{where}.{unknown} is unknown; valid: {', '.join(hints)}." + did_you_mean(str(unknown), hints)
        )
    missing = next((name for name in required if name not in value), None)
    if missing is not None:
        raise SchemaError(f"{where}.{missing} is missing.")
    return cls(**{key: _decode(hints[key], item, f"{where}.{key}") for key, item in value.items()})


@cache_results()
def _fields(cls: type) -> tuple[dict[str, Any], list[str]]:
    """Annotations by field, and the fields without a default."""
    hints = typing.get_type_hints(cls)
    # pyright cannot know that the class is a dataclass
    known = {row.name: hints[row.name] for row in fields(cls)}  # pyright: ignore[reportArgumentType]
    required = [
        row.name
        for row in fields(cls)  # pyright: ignore[reportArgumentType]
        if row.default is MISSING and row.default_factory is MISSING
    ]
    return known, required


def _refuse(where: str, wanted: str, value: object) -> typing.NoReturn:
    text = repr(value)
    raise SchemaError(f"{where} should be {wanted}; got {text if len(text) <= 60 else f'{text[:57]}...'}.")
