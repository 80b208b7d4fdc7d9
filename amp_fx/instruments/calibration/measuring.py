"""Run captured graphs with real values, so that they can be differentiated twice, and observe every value.

A value has an alias for each call that reads it, so that the way into one call has a gradient of its own. What is added
up there, and why, is in ``meter.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from amp_fx._torch import HigherOrderOperator, OpOverload
from amp_fx.graphs.calls import short_source, where
from amp_fx.graphs.traits import LinearForm, linear_form, op_row
from amp_fx.graphs.values import (
    in_place_target,
    is_eligible,
    is_view,
    storage_of,
    storages_written_in,
    tensors,
)
from amp_fx.instruments.calibration.meter import Key, Meter, Rounding
from amp_fx.instruments.calibration.operands import attend, convolve, convolve_first, multiply, try_measured
from amp_fx.instruments.calibration.ranges import CallId, result_of, sampled
from amp_fx.instruments.calibration.recurrent import is_written_out, unroll
from amp_fx.instruments.calibration.smoothing import noise, smoothed
from amp_fx.instruments.calibration.writes import apart_from, writes_apart
from amp_fx.instruments.progress import progress
from amp_fx.passes.levels.matmuls import additions_of, convolution_added
from amp_fx.passes.levels.quantise_matmuls import is_convolved
from amp_fx.precision.plans.label import Label, label_of
from amp_fx.precision.plans.sensitivity import slots
from amp_fx.precision.policy import OpClass

aten = torch.ops.aten

#: calls that run their first argument, a graph, on the others; a checkpoint is not computed again here
_CALLS_BODY = frozenset({"tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint"})


def run_measured(gm: fx.GraphModule, meter: Meter, graph: int, args: Sequence[Any]) -> Any:
    """Runs a captured and classified graph on real inputs; the meter observes every value under the graph's number."""
    if not meter.of_outputs:
        return apart_from(args, _Measured(gm, meter, graph, noise(gm, meter.low, args)).run(*args))

    def followed(value: Any) -> Any:
        """The meter learns whether what a graph returns reaches what is judged."""
        if meter.ranges is not None and isinstance(value, Tensor) and value.is_floating_point():
            # as where it is observed: of an input that needs no gradient, Dynamo makes another graph
            value = value.detach().requires_grad_()
            with torch.set_grad_enabled(is_recorded):
                # code that follows may write to it
                return value.clone() if is_recorded else value
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        meter.returned.add(graph)
        value.register_hook(lambda _: meter.reached.add(graph))
        return value

    is_recorded = torch.is_grad_enabled()
    # outputs do not jump where derivatives do, so that no ReLU is smoothed
    with torch.set_grad_enabled(meter.ranges is None):
        return tree_map(followed, apart_from(args, _Measured(gm, meter, graph, {}).run(*args)))


class _Measured(fx.Interpreter):
    """Runs a captured and classified graph with real values, observed by a meter."""

    def __init__(
        self, gm: fx.GraphModule, meter: Meter, graph: int, noise_of: Mapping[fx.Node, float]
    ) -> None:
        super().__init__(gm)
        self._meter = meter
        self._graph = graph
        self._noise_of = noise_of
        self._calls = sum(node.op == "call_function" for node in gm.graph.nodes)
        #: writes in place that make a new value -> the nodes that name it before
        self._apart = writes_apart(gm.graph)
        #: inputs that are written to, as they are given, and what they become
        self._given: dict[fx.Node, Tensor] = {}
        self._final: dict[fx.Node, Tensor] = {}
        self._written = storages_written_in(gm.graph) - {storage_of(node) for node in self._apart}
        #: where the sensitivity of a value, for all who read it, is added up
        self._keys: dict[fx.Node, Key] = {}
        self._roundings: dict[fx.Node, Rounding] = {}
        #: values whose gradient the program itself asks for
        self._differentiable: set[fx.Node] = set()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with progress("forward", self._calls, "calls") as self._say:
            return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        self._say("", n.op == "call_function")
        if self._meter.of_outputs and n.target is torch._C._set_grad_enabled:
            # what a program does not differentiate is rounded all the same
            return None
        if n.op == "output":
            self._write_to_inputs()
            return fx.map_arg(n.args[0], self._returned)
        if n.op == "placeholder":
            value = super().run_node(n)
            if any(names[0] is n for names in self._apart.values()):
                self._given[n] = value
            return self._leaf(n, value)
        if isinstance(n.target, HigherOrderOperator) and n.target.name() in _CALLS_BODY:
            # a checkpoint runs its body, whose calls are observed like others
            body, *operands = n.args
            inner = getattr(self.module, str(body.target))  # type: ignore[union-attr]  # a get_attr node
            given = fx.map_arg(operands, self.env.__getitem__)
            return self._note(n, run_measured(inner, self._meter, self._graph, given))
        if not isinstance(n.target, OpOverload):
            return self._note(n, super().run_node(n))
        label = label_of(n)
        placed = None if label is None or label.op_class is OpClass.KEEP else label
        read = {} if placed is None else self._aliases(n, placed)
        args: Any
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda source: read.get(source, self.env[source]))
        before = self._apart.get(n)
        if before is not None:
            args = (args[0].clone(), *args[1:])
        result = self._leaf(n, self._call(n, placed, args, kwargs))
        if (
            before is None
            and in_place_target(n) is not None
            and isinstance(result, Tensor)
            and result.requires_grad
        ):
            self._meter.writes[short_source(where(n))] = None
        result = self._observed(n, label, placed, result)
        for name in before or ():
            # who reads the value by an older name reads it as it is now
            self.env[name] = result
            self._roundings.pop(name, None)
            if name in self._given:
                self._final[name] = result
        return result

    def _write_to_inputs(self) -> None:
        """Inputs become what was written to them, for those who see them outside of the graph."""
        for writer, (first, *_) in self._apart.items():
            if first.op == "placeholder":
                given = self._given[first]
                if first in self._final:
                    # autograd writes to no parameter, and a buffer that is a view could not be detached afterwards
                    is_fixed = given.is_leaf and (given.requires_grad or given._is_view())
                    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_fixed):
                        given.copy_(self._final.pop(first))
                    if given.requires_grad and not given.is_leaf:
                        # an output may depend on the graph by what it has written alone
                        given.register_hook(lambda _: self._meter.reached.add(self._graph))
                self.env[first] = self.env[writer] = given

    def _observed(self, n: fx.Node, label: Label | None, placed: Label | None, result: Any) -> Any:
        """A result by an alias that is observed, or as it is."""
        if label is None or not self._is_observed(n, result):
            return result
        key = self._graph, label.name, ""
        if placed is not None and (known := self._known_of_view(n, placed, result)) is not None:
            self._keys[n] = self._meter.share(key, known)
            return result
        result = result.view_as(result)
        self._keys[n] = key
        self._observe(result, key, n)
        first = next((self.env[source] for _, _, source in slots(n)), None)
        is_new = in_place_target(n) is None or n in self._apart
        if first is not None and first.shape == result.shape and is_new:
            error, stride, _ = self._roundings[n]
            kept = torch.eq(*(sampled(each.detach(), stride) for each in (result, first)))
            if bool(kept.any()):
                self._meter.weigh(result, self._meter.kept, key, error * kept, stride)
        return result

    def _observe(self, alias: Tensor, key: Key, n: fx.Node) -> None:
        """Observes a value by an alias."""
        self._roundings[n] = self._meter.observe(alias, key, self._roundings.get(n))

    def _known_of_view(self, n: fx.Node, label: Label, result: Tensor) -> Key | None:
        """Where the sensitivity of a view's base is known: a view that repeats no element has the same."""
        is_same = is_view(n) and in_place_target(n) is None
        found = [(slot, self.env[source]) for slot, _, source in slots(n)] if is_same else []
        if len(found) != 1 or result.numel() > found[0][1].numel():
            return None
        return self._meter.known((self._graph, label.name, found[0][0]))

    def _call(self, n: fx.Node, label: Label | None, args: Any, kwargs: Any) -> Any:
        """Runs a call so that it can be differentiated twice; fused kernels of attention cannot."""
        if (ranges := self._meter.ranges) is not None:
            if label is not None and (linear := self._may_run_below(n, label)):
                call_id, (x, weight) = (self._graph, label.name), (args[linear.input], args[linear.weight])
                ranges.observe(call_id, x)
                if (products := self._meter.products) is not None:
                    source = str(n.args[linear.input])
                    products.observe(call_id, source, x, weight if linear.by_rows else weight.mT)
            elif label is not None and self._convolves_below(n, label):
                ranges.observe((self._graph, label.name), args[0])
            for call_id, value in self._added(n, args):
                if call_id in ranges.samples:
                    ranges.observe(result_of(call_id), value)
            return n.target(*args, **kwargs)  # type: ignore[operator]  # an OpOverload
        if label is not None and n.target is aten.scaled_dot_product_attention.default:
            return _laid_out(attend(self._meter, (self._graph, label.name), *args, **kwargs), n.meta["val"])
        if label is not None and n.target is aten.lstm.input and is_written_out(*args):
            found = unroll(self._meter, (self._graph, label.name), *args)
            return tuple(map(_laid_out, found, n.meta["val"]))
        if sigma := self._noise_of.get(n):
            return smoothed(n, args[0], sigma)
        if label is not None and (linear := self._may_run_below(n, label)):
            operands = args[linear.input], args[linear.weight]
            result = multiply(self._meter, (self._graph, label.name), *operands, by_rows=linear.by_rows)
            bias = args[linear.bias] if linear.bias is not None and linear.bias < len(args) else None
            return result if bias is None else result + bias
        if label is not None and self._convolves_below(n, label):
            source = n.all_input_nodes[0]
            # where others add the value, they read it in uint8, too
            alike = self.env[source] if is_convolved(source) and additions_of(source) else None
            args = (*convolve(self._meter, (self._graph, label.name), args[0], args[1], alike), *args[2:])
        for call_id, value in self._added(n, args):
            if (found := result_of(call_id)) in self._meter.ways:
                try_measured(self._meter, found, value, 0, self._meter.ways[found][0])
        if isinstance(n.target, OpOverload) and (constants := op_row(n).constants):
            # running statistics, weights of classes: no policy rounds these
            names = [argument.name for argument in n.target._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            fixed = {name: value.detach() for name in constants if (value := given.get(name)) is not None}
            args = (*(fixed.get(name, value) for name, value in zip(names, args, strict=False)),)
            kwargs = {name: fixed.get(name, value) for name, value in kwargs.items()}
        if not any(value.is_floating_point() or value.is_complex() for value in tensors(n.meta.get("val"))):
            # autograd refuses some whose arguments have gradients: a sum of values in integers
            with torch.no_grad():
                return n.target(*args, **kwargs)  # type: ignore[operator]  # an OpOverload
        if n.target is aten.conv2d.default:
            return _laid_out(convolve_first(*args, **kwargs), n.meta["val"])
        if "scaled_dot_product" not in str(n.target):
            return n.target(*args, **kwargs)  # type: ignore[operator]  # an OpOverload
        with sdpa_kernel([SDPBackend.MATH]):
            return _laid_out(n.target(*args, **kwargs), n.meta["val"])  # type: ignore[operator]  # an OpOverload

    def _may_run_below(self, n: fx.Node, label: Label) -> LinearForm | None:
        """How a call multiplies whose three matmuls are measured below 16 bits, each by itself."""
        linear = linear_form(n) if self._meter.level is not None and label.op_class is OpClass.LOW else None
        if linear is None:
            return None
        return linear if all(map(self._is_read, (n.args[linear.input], n.args[linear.weight]))) else None

    def _convolves_below(self, n: fx.Node, label: Label) -> bool:
        """True for a convolution whose scale is being measured, or was."""
        if n.target is not aten.conv2d.default or label.op_class is not OpClass.LOW or n.kwargs:
            return False
        known = self._meter.ranges is not None or (self._graph, label.name) in self._meter.ways
        return known and all(map(self._is_read, n.args[:2]))

    def _added(self, n: fx.Node, args: Any) -> list[tuple[CallId, Any]]:
        """The convolutions whose results the call alone reads, to add them, and these results."""
        found = []
        for source, value in zip(n.args, args, strict=True):
            if isinstance(source, fx.Node) and n in additions_of(source):
                conv = convolution_added(source)
                if conv is not None and (label := label_of(conv)) is not None:
                    found.append(((self._graph, label.name), value))
        return found

    def _is_read(self, operand: Any) -> bool:
        """True where an operand is observed. Of outputs, one that is written to before and after is, as it is then."""
        value = self.env[operand] if isinstance(operand, fx.Node) else None
        if value is not None and self._meter.of_outputs:
            is_wide = isinstance(value, Tensor) and value.dtype is torch.float32
            # nothing is differentiated where ranges are looked for
            return is_wide and (value.requires_grad or self._meter.ranges is not None)
        return value is not None and self._is_observed(operand, value)

    def _aliases(self, n: fx.Node, label: Label) -> dict[fx.Node, Tensor]:
        """The values that the call reads, each under a name of its own; a value's only reader needs none."""
        found: dict[fx.Node, Tensor] = {}
        for slot, _, source in slots(n):
            value = self.env[source]
            if not self._is_observed(source, value):
                continue
            key = self._graph, label.name, slot
            if len(source.users) == 1 and source in self._keys:
                self._meter.share(key, self._keys[source])
                continue
            found[source] = value.view_as(value)
            self._observe(found[source], key, source)
        return found

    def _may_be_rounded(self, n: fx.Node, value: Any) -> bool:
        is_wide = isinstance(value, Tensor) and value.dtype is torch.float32 and torch.is_grad_enabled()
        return is_wide and is_eligible(n.meta.get("val")) and storage_of(n) not in self._written

    def _is_observed(self, n: fx.Node, value: Any) -> bool:
        return self._may_be_rounded(n, value) and value.requires_grad

    def _leaf(self, n: fx.Node, value: Any) -> Any:
        """Gives a gradient to what needs none: rounding of rotary angles and masks counts, too."""
        self._note(n, value)
        is_own = n.op == "placeholder" or not is_view(n)
        if is_own and self._may_be_rounded(n, value) and not value.requires_grad:
            value = value.detach().requires_grad_()
            self._meter.leaves.append(value)
        return value

    def _note(self, n: fx.Node, value: Any) -> Any:
        asked = n.op == "placeholder" or not self._differentiable.isdisjoint(n.all_input_nodes)
        if asked and any(leaf.requires_grad for leaf in tensors(value)):
            self._differentiable.add(n)
        return value

    def _returned(self, source: fx.Node) -> Any:
        value = self.env[source]
        if self._meter.of_outputs or source in self._differentiable or not isinstance(value, Tensor):
            return value
        return value.detach() if value.requires_grad else value


def _laid_out(result: Any, like: Any) -> Any:
    """The result laid out in memory as that of the kernel that was traced, whose views come next."""
    if not isinstance(result, Tensor) or not isinstance(like, Tensor) or result.stride() == like.stride():
        return result
    empty = torch.empty_strided(result.shape, like.stride(), dtype=result.dtype, device=result.device)
    return empty.copy_(result)
