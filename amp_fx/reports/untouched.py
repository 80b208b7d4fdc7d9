"""Runs of a user's model that leave no trace: buffers, attributes, gradients and random states are restored."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

__all__ = ["plain", "untouched"]


@contextlib.contextmanager
def untouched(
    program: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields copies of the arguments; afterwards the model and the random generators are as they were."""
    modules = list(program.modules()) if isinstance(program, nn.Module) else []
    attributes = [
        (module, dict(vars(module)), dict(module._buffers), dict(module._parameters)) for module in modules
    ]
    held = [value for _, _, *tables in attributes for table in tables for value in table.values()]
    # parameters too: spectral norm and the like write to them
    values = [(value, value.detach().clone()) for value in dict.fromkeys(v for v in held if v is not None)]
    gradients = [(value, value.grad) for value, _ in values]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    for module in modules:
        # what Module.compile() made runs elsewhere: here every module is as it was before
        vars(module).pop("_compiled_call_impl", None)
    # a reducer that waits for gradients would refuse the next step
    alone = program.no_sync() if isinstance(program, DistributedDataParallel) else contextlib.nullcontext()
    try:
        with torch.random.fork_rng(devices), _other_generators(), alone:
            yield tree_map(_copy, (args, dict(kwargs)))
    finally:
        for module, attributes_before, buffers, parameters in attributes:
            vars(module).clear()
            vars(module).update(attributes_before)
            module._buffers.clear()
            module._buffers.update(buffers)
            module._parameters.clear()
            module._parameters.update(parameters)
        with torch.no_grad():
            for value, before in values:
                # a value that is not equal to itself is not a number: written back, it is what it was
                if not torch.equal(value, before):
                    value.copy_(before)
        for value, gradient in gradients:
            value.grad = gradient


@contextlib.contextmanager
def _other_generators() -> Iterator[None]:
    """Python's and NumPy's random numbers go on afterwards where they were."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def plain(value: Any) -> Any:
    """Model outputs of transformers and data classes are mappings that pytree does not know."""
    return dict(value) if isinstance(value, Mapping) else value


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    # caches of transformers and other objects that a call may write to
    return copy.deepcopy(value)
