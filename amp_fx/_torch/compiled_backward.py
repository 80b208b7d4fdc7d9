"""The backward that AOTAutograd made of a graph, run in another way."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._guards import TracingContext, detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from amp_fx._torch.autocast import autocast_disabled

__all__ = ["CompiledBackward"]


class CompiledBackward:
    """The backward of one graph of AOTAutograd's, which may be run in another way.

    Args:
        function: the ``torch.autograd.Function`` that AOTAutograd made of the graph.
    """

    def __init__(self, function: Any) -> None:
        self._function = function

    @classmethod
    def of(cls, outputs: Sequence[Any]) -> CompiledBackward | None:
        """That of the graph which returned some values; None where they have no gradient, or this torch hides it."""
        for value in outputs:
            function = getattr(getattr(value, "grad_fn", None), "_forward_cls", None)
            if hasattr(function, "_backward_impl") and hasattr(function, "_lazy_backward_info"):
                return cls(function)
        return None

    def replace(self, run: Callable[[Any, list[Any]], Sequence[Any] | None]) -> None:
        """From now on ``run`` is asked first, with the node of autograd and the arguments of the compiled backward.

        Args:
            run: returns what the compiled backward would return, or None to have it run.
        """
        original = self._function._backward_impl

        def backward(ctx: Any, args: list[Any]) -> Any:
            result = run(ctx, args)
            return original(ctx, args) if result is None else result

        self._function._backward_impl = staticmethod(backward)

    def graph(self, args: Sequence[Any]) -> fx.GraphModule | None:
        """A copy of the graph, with fake values for these arguments; None where it needs more than its nodes say.

        AOTAutograd takes the facts off the nodes when it stores the graph in its cache, and stores source code: the
        graph is traced again. What depends on more than on values cannot be had back so, such as the strides that a
        custom op asks for, or bodies of their own.
        """
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        forward = self._forward()
        if forward is None or not all(map(_is_dense, args)):
            return None
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode, torch.no_grad():
            values = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device) for a in args]
            # without a mode of its own, as the values have one
            gm = make_fx(lambda *inputs: forward(*inputs))(*values)
        return gm if all(map(_is_plain_call, gm.graph.nodes)) else None

    def _forward(self) -> Callable[..., Any] | None:
        """What the backward computes, as a function of plain calls; None where it needs a module."""
        info = self._function._lazy_backward_info
        if hasattr(info, "bw_module"):
            gm: fx.GraphModule = info.bw_module
            return gm.forward if all(map(_is_plain_call, gm.graph.nodes)) else None
        stored = getattr(getattr(info, "bw_module_fn", None), "__self__", None)
        if stored is None:
            return None
        # to read the graph would run what makes constants, and random numbers too, once and for all
        body, imports = stored.args
        names: dict[str, Any] = {}
        exec(imports + body["_code"], names)
        return None if "self." in body["_code"] else functools.partial(names["forward"], None)

    def compile(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> Callable[[list[Any]], Sequence[Any]]:
        """Compiles a backward graph with fake values; the result takes its arguments in one list, and clears it."""
        from torch._guards import tracing
        from torch._inductor import compile_fx, config

        values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        output = gm.graph.output_node()
        returned: Sequence[Any] = output.args[0]  # type: ignore[assignment]  # a tuple
        visible = [place for place, node in enumerate(returned) if isinstance(node, fx.Node)]
        output.meta["user_visible_output_idxs"] = visible if config.bw_outputs_user_visible else []
        context = TracingContext(detect_fake_mode(values))
        # says which saved values may be overwritten
        context.fw_metadata = self._function.metadata
        with (
            config.patch(dict(options)),
            tracing(context),
            torch.no_grad(),
            autocast_disabled(),
        ):
            # no input counts as static: alignment is then checked in each call; typed as for AOTInductor, too
            return compile_fx.compile_fx_inner(gm, values, is_backward=True)  # type: ignore[return-value]


def _is_dense(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not is_traceable_wrapper_subclass(value)
    )


def _is_plain_call(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if isinstance(node.target, OpOverload):
        return node.target.namespace in ("aten", "prims", "amp_fx")
    return node.target is operator.getitem
