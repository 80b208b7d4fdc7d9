"""The way out for what fails: torch.autocast's semantics, and one warning.

Never silently fp32, never a crash: where nothing better works, the graph runs as ``torch.compile`` + ``torch.autocast``
would run it, with the outputs cast back to the dtypes that Dynamo traced.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import (
    FakeTensor,
    copy_of,
    enable_autocast,
    is_hooks_switch,
    nesting_change,
    raised_by_backend,
    size_hint,
    speaks_to_dynamo,
    symbolic_kernels,
)
from amp_fx.errors import AmpFxError, CaptureError, FallbackWarning, PassError
from amp_fx.graphs.regions import ENTER, EXIT, Region, enclose
from amp_fx.graphs.values import tensors


def is_for_the_caller(error: Exception) -> bool:
    """True for errors that are about the program or its options, and for warnings that are to be errors."""
    cause = raised_by_backend(error)
    is_about_options = isinstance(cause, AmpFxError) and not isinstance(cause, (CaptureError, PassError))
    return is_about_options or isinstance(cause, Warning) or speaks_to_dynamo(error)


def reason_of(error: Exception) -> str:
    """An error in a line: our own as they are, of others what and where."""
    cause = raised_by_backend(error)
    if isinstance(cause, AmpFxError):
        return str(cause)
    text, frames = str(cause).strip(), traceback.extract_tb(cause.__traceback__)
    where = [f"[{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}]" for frame in frames[-1:]]
    return " ".join([f"{type(cause).__name__}:", *text.splitlines()[:1], *where])


def warn_fallback(what: str, reason: str) -> None:
    """One warning per graph: what happens, why, and how to make it an error."""
    warnings.warn(
        f"amp_fx {what}, because a better way failed: {reason}. options={{'strict': True}} makes this an error.",
        FallbackWarning,
        stacklevel=3,
    )


def under_autocast(gm: fx.GraphModule, ambient: Mapping[str, Region]) -> fx.GraphModule:
    """A copy of a Dynamo graph that enters autocast itself and returns the traced dtypes.

    The graph is checked on its fake tensors first; where autocast itself fails on it (a scalar out of range,
    a dtype mismatch that the fp32 program does not have), or makes another program of it (bits that are read,
    half complex numbers), it is returned unchanged, which is fp32.
    """
    wrapped = copy_of(gm)
    graph, output = wrapped.graph, wrapped.graph.output_node()
    enclose(graph, ambient)
    by_user = all(region.by_user for region in ambient.values())

    def traced(node: fx.Node) -> fx.Node:
        value = node.meta.get("example_value")
        # under the user's own autocast nothing else was traced, but for custom ops with a rule that Dynamo misses
        # tensors of any kind: autocast also lowers nested ones
        if by_user or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return node
        return graph.call_method("to", (node, value.dtype))

    with graph.inserting_before(output):
        output.args = (fx.map_arg(output.args[0], traced),)
    wrapped.recompile()
    return wrapped if runs(wrapped) else gm


def runs(gm: fx.GraphModule) -> bool:
    """True if the graph runs on its own fake inputs, and computes values of the kinds that Dynamo traced."""
    fakes = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), contextlib.nullcontext())
    trial = fx.Interpreter(gm, garbage_collect_values=False)
    # a write to a leaf is refused with gradients; without them, transforms have no tangents
    transforms = any(nesting_change(node.target) for node in gm.graph.nodes)
    gradients = contextlib.nullcontext() if transforms else torch.no_grad()
    try:
        with mode, symbolic_kernels(), gradients, enable_autocast("cpu", False, torch.bfloat16):
            trial.run(*fakes)
    except RuntimeError:
        # this is the question asked, not an error of ours: autocast does not work on this graph
        return False
    finally:
        _close(node for node in gm.graph.nodes if node not in trial.env)
        # within a region that a failure left open, eager autocast would keep old casts of weights
        ran = [node for node in gm.graph.nodes if node in trial.env]
        left = {node.args[0] for node in ran if node.target is EXIT}
        for node in reversed(ran):
            if node.target is ENTER and node not in left:
                EXIT(trial.env[node])
    return all(map(_is_alike, ran, (trial.env[node] for node in ran)))


def _is_alike(node: fx.Node, got: Any) -> bool:
    """True where a value has the sizes that Dynamo traced, and its dtypes but for floats."""
    traced = tensors(node.meta.get("example_value"))
    return all(
        (value.dtype is now.dtype or (value.is_floating_point() and now.is_floating_point()))
        # ragged sizes have no hints
        and (value.is_nested or [*map(size_hint, value.shape)] == [*map(size_hint, now.shape)])
        for value, now in zip(traced, tensors(got), strict=False)
    )


def _close(left_out: Iterable[fx.Node]) -> None:
    """Closes transforms of ``torch.func`` that are open, by the calls that the graph has for it."""
    inner = 0
    for node in left_out:
        step = nesting_change(node.target)
        is_allowed_again = is_hooks_switch(node.target) and not node.args
        if is_allowed_again or (step < 0 and not inner):
            node.target(*node.args, **node.kwargs)  # type: ignore[operator]  # these have no tensors
        else:
            inner += step
