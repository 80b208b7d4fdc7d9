"""Mistakes in ``dynamic_shapes=``, by the names of inputs; torch.export tells them by its own structures."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from amp_fx.errors import ExportError


def check_shapes(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> None:
    """Raises ExportError for a dimension that an input has not, and a dynamic one of size 0 or 1 in the example.

    Structures that do not fit the inputs are left to torch.export, whose message names what they should be.
    """
    if isinstance(dynamic_shapes, torch.export.ShapesCollection):
        dynamic_shapes = dynamic_shapes.dynamic_shapes(model, args, kwargs)
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    values = dict(bound) if isinstance(dynamic_shapes, Mapping) else tuple(bound.values())
    names = [*bound]
    for path, value, dimension, size in _dimensions(values, dynamic_shapes, ()):
        first, *inner = path
        where = repr(first if isinstance(first, str) else names[first])
        where += "".join(f"[{part!r}]" for part in inner)
        shape = tuple(value.shape)
        if not -value.ndim <= dimension < value.ndim:
            raise ExportError(
                f"dynamic_shapes has dimension {dimension} of input {where}, which has {value.ndim} dimensions: "
                f"{shape}. Valid: 0 to {value.ndim - 1}."
            )
        if _is_dynamic(size) and value.shape[dimension] < 2:
            raise ExportError(
                f"dimension {dimension} of input {where} is to be dynamic, and the example has shape {shape}: "
                "torch.export takes a size of 0 or 1 for a constant. Give an example of at least 2 there."
            )


def _dimensions(
    value: Any, sizes: Any, path: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], torch.Tensor, int, Any]]:
    """Path of an input, the input, the number of a dimension, and what is said of its size."""
    if isinstance(value, torch.Tensor):
        named = sizes.items() if isinstance(sizes, Mapping) else enumerate(sizes or ())
        for dimension, size in named:
            if isinstance(dimension, int):
                yield path, value, dimension, size
    elif isinstance(value, Mapping) and isinstance(sizes, Mapping):
        for key in value.keys() & sizes.keys():
            yield from _dimensions(value[key], sizes[key], (*path, key))
    elif isinstance(value, (list, tuple)) and isinstance(sizes, (list, tuple)):
        for index, (inner, each) in enumerate(zip(value, sizes, strict=False)):
            yield from _dimensions(inner, each, (*path, index))


def _is_dynamic(size: Any) -> bool:
    """True for a dimension that must not become a constant: a ``Dim``, a name, or ``Dim.DYNAMIC``."""
    if size is None or isinstance(size, int):
        return False
    kind = getattr(getattr(size, "type", None), "name", "DYNAMIC")
    return kind == "DYNAMIC"
