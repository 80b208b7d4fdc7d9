"""Run captured graphs with real values, so that they can be differentiated twice, and watch every value.

A value has an alias for each call that reads it, so that the way into one call has a gradient of its own. What is added
up there, and why, is in ``meter.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from amp_fx._torch import HigherOrderOperator, OpOverload
from amp_fx.calibration.attention import attend, is_attention
from amp_fx.calibration.kinks import noise, smoothed
from amp_fx.calibration.meter import Key, Meter
from amp_fx.calibration.roles import multiply, read_below
from amp_fx.graphs.keys import LABEL
from amp_fx.graphs.traits import LinearForm, linear_form
from amp_fx.graphs.values import is_eligible, is_view, storage_of, written_storages
from amp_fx.plans.label import Label, label_of
from amp_fx.plans.sensitivity import slots
from amp_fx.policy import OpClass

__all__ = ["run_measured"]

#: calls that run their first argument, a graph, on the others; a checkpoint is not computed again here
_CALLS_BODY = frozenset({"tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint"})


class _Measured(fx.Interpreter):
    """Runs a captured and classified graph with real values, watched by a meter."""

    def __init__(
        self, gm: fx.GraphModule, meter: Meter, graph: int, noise_of: Mapping[fx.Node, float]
    ) -> None:
        super().__init__(gm)
        self._meter = meter
        self._graph = graph
        self._noise_of = noise_of
        self._written = frozenset[int]().union(*map(written_storages, gm.graph.nodes))
        #: where the sensitivity of a value, for all who read it, is added up
        self._keys: dict[fx.Node, Key] = {}
        #: values whose gradient the program itself asks for
        self._differentiable: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        if self._meter.of_outputs and n.target is torch._C._set_grad_enabled:
            # what a program does not differentiate is rounded all the same
            return None
        if n.op == "output":
            return fx.map_arg(n.args[0], self._returned)
        if n.op == "placeholder":
            return self._leaf(n, super().run_node(n))
        if isinstance(n.target, HigherOrderOperator) and n.target.name() in _CALLS_BODY:
            return self._body(n)
        if not isinstance(n.target, OpOverload):
            return self._note(n, super().run_node(n))
        plan = label_of(n)
        read = self._aliases(n) if plan is not None and plan.op_class is not OpClass.KEEP else {}
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda source: read.get(source, self.env[source]))
        result = self._leaf(n, self._call(n, args, kwargs))
        if plan is None or not self._is_watched(n, result):
            return result
        key = self._graph, plan.name, ""
        if (known := self._known_of_view(n, result)) is not None:
            self._keys[n] = self._meter.share(key, known)
            return result
        result = result.view_as(result)
        self._keys[n] = key
        self._meter.watch(result, key)
        return result

    def _known_of_view(self, n: fx.Node, result: torch.Tensor) -> Key | None:
        """Where the sensitivity of what a view looks at is known: a view that repeats no element has the same."""
        plan = n.meta[LABEL]
        if not is_view(n) or plan.op_class is OpClass.KEEP:
            return None
        found = [(slot, self.env[source]) for slot, _, source in slots(n)]
        if len(found) != 1 or result.numel() > found[0][1].numel():
            return None
        return self._meter.known((self._graph, plan.name, found[0][0]))

    def _call(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Runs a call so that it can be differentiated twice; fused kernels of attention cannot."""
        plan = label_of(n)
        if is_attention(n) and plan is not None and plan.op_class is not OpClass.KEEP:
            result = attend(self._meter, (self._graph, plan.name), *args, **kwargs)
            return _laid_out(result, n.meta["val"])
        if sigma := self._noise_of.get(n):
            return smoothed(n, args[0], sigma)
        if plan is not None and (linear := self._may_run_below(n, plan)):
            operands = args[linear.input], args[linear.weight]
            call = self._graph, plan.name
            if self._meter.of_outputs:
                left, right = read_below(self._meter, call, *operands, by_rows=linear.by_rows)
                result = left @ (right.mT if linear.by_rows else right)
            else:
                result = multiply(self._meter, call, *operands, by_rows=linear.by_rows)
            bias = args[linear.bias] if linear.bias is not None and linear.bias < len(args) else None
            return result if bias is None else result + bias
        if n.target is torch.ops.aten.batch_norm.default:
            # kernels give running statistics, which stay fp32, no gradient
            args = (*args[:3], *map(_detached, args[3:5]), *args[5:])
        if "scaled_dot_product" not in str(n.target):
            return n.target(*args, **kwargs)  # type: ignore[operator]  # an OpOverload
        with sdpa_kernel([SDPBackend.MATH]):
            return _laid_out(n.target(*args, **kwargs), n.meta["val"])  # type: ignore[operator]  # an OpOverload

    def _may_run_below(self, n: fx.Node, plan: Label) -> LinearForm | None:
        """How a call multiplies whose three matmuls are measured below 16 bits, each by itself."""
        linear = linear_form(n) if self._meter.level is not None and plan.op_class is OpClass.LOW else None
        if linear is None:
            return None
        operands = n.args[linear.input], n.args[linear.weight]
        watched = all(isinstance(a, fx.Node) and self._is_watched(a, self.env[a]) for a in operands)
        return linear if watched else None

    def _aliases(self, n: fx.Node) -> dict[fx.Node, torch.Tensor]:
        """What the call reads, each value under a name of its own; a value's only reader needs none."""
        plan = n.meta[LABEL]
        found: dict[fx.Node, torch.Tensor] = {}
        for slot, _, source in slots(n):
            value = self.env[source]
            if not self._is_watched(source, value):
                continue
            key = self._graph, plan.name, slot
            if len(source.users) == 1 and source in self._keys:
                self._meter.share(key, self._keys[source])
                continue
            found[source] = value.view_as(value)
            self._meter.watch(found[source], key)
        return found

    def _is_watched(self, n: fx.Node, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.dtype is torch.float32
            and value.requires_grad
            and torch.is_grad_enabled()
            and is_eligible(n.meta.get("val"))
            and storage_of(n) not in self._written
        )

    def _leaf(self, n: fx.Node, value: Any) -> Any:
        """Gives a gradient to what needs none: rounding of rotary angles and masks counts, too."""
        self._note(n, value)
        if (
            isinstance(value, torch.Tensor)
            and value.dtype is torch.float32
            and not value.requires_grad
            and torch.is_grad_enabled()
            and is_eligible(n.meta.get("val"))
            and storage_of(n) not in self._written
            and (n.op == "placeholder" or not is_view(n))
        ):
            value = value.detach().requires_grad_()
            self._meter.leaves.append(value)
        return value

    def _note(self, n: fx.Node, value: Any) -> Any:
        asked = n.op == "placeholder" or not self._differentiable.isdisjoint(n.all_input_nodes)
        if asked and any(leaf.requires_grad for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)):
            self._differentiable.add(n)
        return value

    def _returned(self, source: fx.Node) -> Any:
        value = self.env[source]
        if self._meter.of_outputs:
            return value
        if isinstance(value, torch.Tensor) and value.requires_grad and source not in self._differentiable:
            return value.detach()
        return value

    def _body(self, n: fx.Node) -> Any:
        """Case: ``checkpoint(body, x)`` runs the body, whose calls are watched like others."""
        body, *operands = n.args
        inner = getattr(self.module, str(body.target))  # type: ignore[union-attr]  # a get_attr node
        given = fx.map_arg(operands, self.env.__getitem__)
        return self._note(n, run_measured(inner, self._meter, self._graph, given))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _laid_out(result: Any, like: Any) -> Any:
    """The result with its dimensions in memory in the order of the kernel's that was traced, whose views come next."""
    if not isinstance(result, torch.Tensor) or not isinstance(like, torch.Tensor):
        return result
    order = sorted(range(like.ndim), key=lambda dim: -int(like.stride(dim)))
    back = [order.index(dim) for dim in range(like.ndim)]
    return result.permute(order).contiguous().permute(back)


def run_measured(gm: fx.GraphModule, meter: Meter, graph: int, args: Sequence[Any]) -> Any:
    """Runs a captured and classified graph on real inputs, with an eye on every value.

    Args:
        gm: not changed.
        meter: of the step.
        graph: number of the graph in the meter's keys.
        args: one per placeholder.
    """
    if not meter.of_outputs:
        return _Measured(gm, meter, graph, noise(gm, meter.low, args)).run(*args)
    # where a derivative jumps, outputs do not
    with torch.enable_grad():
        returned = _Measured(gm, meter, graph, {}).run(*args)
        return tree_map(lambda value: _followed(value, meter, graph), returned)


def _followed(value: Any, meter: Meter, graph: int) -> Any:
    """What a graph returns; the meter learns whether it reaches what is judged."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    value = value.view_as(value)
    meter.returned.add(graph)
    value.register_hook(lambda _: meter.reached.add(graph))
    return value
