"""Calls on fake values: what they would return, and in which dtype."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    autocast_disabled,
    enable_autocast,
    ignore_fresh_symbols,
    symbolic_kernels,
)
from amp_fx.errors import VerifyError
from amp_fx.graphs.source_lines import where
from amp_fx.graphs.values import tensors

__all__ = ["dtype_under_autocast", "fake_arguments", "fake_values", "run_fake"]


def fake_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any], FakeTensorMode]:
    """The fake values of the node's arguments, and the mode they belong to.

    A call may run on them without sensitivity to the graph: what changes a shape in place (``y.t_()``) changes that
    of an alias.
    """
    reshapes = (
        isinstance(node.target, OpOverload)
        and torch.Tag.inplace_view in node.target.tags
        # changes no shape, and refuses views
        and node.target is not torch.ops.aten.detach_.default
    )
    args, kwargs = fx.map_arg(
        (node.args, node.kwargs),  # type: ignore[arg-type]  # a tuple of arguments is one
        lambda n: _aliased(n.meta["val"]) if reshapes else n.meta["val"],
    )
    modes = [t.fake_mode for t in tensors((args, kwargs)) if isinstance(t, FakeTensor)]
    return args, kwargs, modes[0] if modes else FakeTensorMode()  # type: ignore[return-value]  # of map_arg


def _aliased(value: Any) -> Any:
    with torch.no_grad():
        return torch.ops.aten.alias.default(value) if isinstance(value, torch.Tensor) else value


def run_fake(node: fx.Node) -> Any:
    """Runs a call on the fake values of its arguments, autocast and gradients off.

    With gradients, a write to a leaf that requires one would be refused, though the program makes it without.

    Raises:
        VerifyError: the op does not take these dtypes; names node and source line.
    """
    args, kwargs, mode = fake_arguments(node)
    try:
        with (
            mode,
            torch.no_grad(),
            ignore_fresh_symbols(mode),
            symbolic_kernels(),
            autocast_disabled(),
            _without_warning(node),
        ):
            return node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function node
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        dtypes = ", ".join(
            f"{n.name}: {n.meta['val'].dtype}" for n in node.all_input_nodes if tensors(n.meta["val"])
        )
        call = f"{node.name} = {node.target}({dtypes})"
        raise VerifyError(f"{call} does not run: {error} [{where(node)}]") from error


def fake_values(node: fx.Node) -> list[Any]:
    """What :func:`run_fake` would run on, and what it gave: the same objects as long as nobody changes either."""
    return [node.target, *(source.meta.get("val") for source in node.all_input_nodes), node.meta.get("val")]


def dtype_under_autocast(node: fx.Node, device_type: str, low: torch.dtype | None) -> torch.dtype:
    """The dtype in which torch.autocast itself returns the result of a call on its fake values.

    Args:
        node: a call that returns one tensor.
        device_type: of that tensor.
        low: autocast's dtype; None: autocast is off.
    """
    args, kwargs, mode = fake_arguments(node)
    # with gradients, a write to a leaf that requires one would be refused, as a buffer does after a first write
    with (
        mode,
        torch.no_grad(),
        ignore_fresh_symbols(mode),
        symbolic_kernels(),
        enable_autocast(device_type, low is not None, low or torch.bfloat16),
    ):
        return node.target(*args, **kwargs).dtype  # type: ignore[operator]  # a call_function node


@contextlib.contextmanager
def _without_warning(node: fx.Node) -> Iterator[None]:
    """Torch warns that its fused RMSNorm does not take a low input with an fp32 weight; Inductor's does."""
    if node.target is not torch.ops.aten.rms_norm.default:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        yield
