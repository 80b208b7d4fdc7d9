"""Measure harm: a forward, a backward and a double backward of the captured graphs, with real values.

With gradients G of all parameters and s = <u, G> / |G| for one vector u of random signs, the gradient of s with
respect to a value is a, and with respect to the gradient of that value it is b. Rounding errors d of the value and c of
its gradient then add a^2 d^2 + b^2 c^2 to the squared relative error of G, summed over elements: errors of different
elements and different values have no sign in common. One double backward gives a and b of all values at once.

A value has an alias for each call that reads it, so that the way into one call has a gradient of its own. Tensors with
many elements are sampled at equal strides.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from amp_fx._torch import HigherOrderOperator, OpOverload
from amp_fx.errors import AmpFxError
from amp_fx.graphs.facts import is_eligible, is_view, storage_of, written_storages
from amp_fx.plans.harm import CallHarm, ReadHarm, slots
from amp_fx.plans.plan import node_plan
from amp_fx.policy import OpClass

__all__ = ["Meter", "differentiate", "run_measured"]

#: elements of a tensor that are looked at
SAMPLES = 65536

#: calls that run their first argument, a graph, on the others; a checkpoint is not computed again here
_CALLS_BODY = frozenset({"tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint"})


#: graph, call, slot; the slot is empty for the call's result
_Key = tuple[int, str, str]


@dataclass
class Meter:
    """Adds up what the hooks of one step see.

    Attributes:
        low: the low dtype.
        scale: loss scale at which gradients are rounded.
        phase: 0 in the forward, 1 in the backward, 2 in the double backward.
        weight: of what one double backward finds.
        values: harm of rounding a value.
        gradients: the same, of rounding its gradient.
        leaves: values that need no gradient, made to have one so that their harm is known.
    """

    low: torch.dtype
    scale: float
    phase: int = 0
    weight: float = 1.0
    values: dict[_Key, float] = field(default_factory=dict)
    gradients: dict[_Key, float] = field(default_factory=dict)
    leaves: list[torch.Tensor] = field(default_factory=list)

    def watch(self, value: torch.Tensor, key: _Key) -> None:
        """Measures what rounding costs here; ``value`` has to be an alias of its own."""
        self.values.setdefault(key, 0.0)
        self.gradients.setdefault(key, 0.0)
        stride = _stride(value)
        error = self._rounding(_sample(value.detach(), stride), 1.0)

        def hook(gradient: torch.Tensor) -> torch.Tensor | None:
            if self.phase == 2:
                self._add(self.values, key, gradient.detach(), error, stride)
                return None
            if not gradient.requires_grad:
                return None
            rounding = self._rounding(_sample(gradient.detach(), stride), self.scale)
            alias = gradient.view_as(gradient)
            alias.register_hook(
                lambda second: self._add(self.gradients, key, second.detach(), rounding, stride)
            )
            return alias

        value.register_hook(hook)

    def _rounding(self, sample: torch.Tensor, scale: float) -> torch.Tensor:
        """Error of each element; infinite where a finite one becomes infinite."""
        return (sample * scale).to(self.low).to(sample.dtype) / scale - sample

    def _add(
        self,
        table: dict[_Key, float],
        key: _Key,
        sensitivity: torch.Tensor,
        error: torch.Tensor,
        stride: int,
    ) -> None:
        if not bool(error.isfinite().all()):
            table[key] = math.inf
            return
        change = sensitivity.reshape(-1)[::stride] * error
        table[key] = table.get(key, 0.0) + torch.dot(change, change).item() * stride * self.weight

    def rows(self, graph: int) -> list[CallHarm]:
        """What was found in one graph."""
        found: dict[str, CallHarm] = {}
        for key, value in self.values.items():
            number, name, slot = key
            if number != graph:
                continue
            row = found.setdefault(name, CallHarm(name))
            harms = _finite(value), _finite(self.gradients[key])
            if slot:
                row.reads[slot] = ReadHarm(*harms)
            else:
                row.value, row.gradient = harms
        return list(found.values())


def _finite(harm: float) -> float | None:
    return harm if math.isfinite(harm) else None


def _stride(value: torch.Tensor) -> int:
    """Steps between sampled elements, with no factor in common with a size: no row or column is left out."""
    if value.numel() <= SAMPLES:
        return 1
    stride = value.numel() // SAMPLES + 1
    while any(math.gcd(stride, size) > 1 for size in value.shape if size > 1):
        stride += 1
    return stride


def _sample(value: torch.Tensor, stride: int) -> torch.Tensor:
    # a copy: a view would keep the whole tensor
    return value.reshape(-1)[::stride].clone()


class _Measured(fx.Interpreter):
    """Runs a captured and classified graph with real values, watched by a meter."""

    def __init__(self, gm: fx.GraphModule, meter: Meter, graph: int) -> None:
        super().__init__(gm)
        self._meter = meter
        self._graph = graph
        self._written = frozenset[int]().union(*map(written_storages, gm.graph.nodes))
        #: values whose gradient the program itself asks for
        self._differentiable: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return fx.map_arg(n.args[0], self._returned)
        if n.op == "placeholder":
            return self._leaf(n, super().run_node(n))
        if isinstance(n.target, HigherOrderOperator) and n.target.name() in _CALLS_BODY:
            return self._body(n)
        if not isinstance(n.target, OpOverload):
            return self._note(n, super().run_node(n))
        plan = node_plan(n)
        read = self._aliases(n) if plan is not None and plan.op_class is not OpClass.KEEP else {}
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda source: read.get(source, self.env[source]))
        result = self._leaf(n, self._call(n, args, kwargs))
        if plan is not None and self._is_watched(n, result):
            result = result.view_as(result)
            self._meter.watch(result, (self._graph, plan.name, ""))
        return result

    def _call(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        """Runs a call so that it can be differentiated twice: of attention, only the math kernel can."""
        if "scaled_dot_product" not in str(n.target):
            return n.target(*args, **kwargs)  # type: ignore[operator]  # an OpOverload
        with sdpa_kernel([SDPBackend.MATH]):
            return _laid_out(n.target(*args, **kwargs), n.meta["val"])  # type: ignore[operator]

    def _aliases(self, n: fx.Node) -> dict[fx.Node, torch.Tensor]:
        """What the call reads, each value under a name of its own."""
        plan = n.meta["amp_fx"]
        found: dict[fx.Node, torch.Tensor] = {}
        for slot, _, source in slots(n):
            value = self.env[source]
            if not self._is_watched(source, value):
                continue
            found[source] = value.view_as(value)
            self._meter.watch(found[source], (self._graph, plan.name, slot))
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
        """Gives a gradient to what needs none: rotary angles and masks do harm, too."""
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
        if isinstance(value, torch.Tensor) and value.requires_grad and source not in self._differentiable:
            return value.detach()
        return value

    def _body(self, n: fx.Node) -> Any:
        """Case: ``checkpoint(body, x)`` runs the body, whose calls are watched like others."""
        body, *operands = n.args
        inner = getattr(self.module, str(body.target))  # type: ignore[union-attr]  # a get_attr node
        result = _Measured(inner, self._meter, self._graph).run(*fx.map_arg(operands, self.env.__getitem__))
        return self._note(n, result)


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
    return _Measured(gm, meter, graph).run(*args)


def differentiate(
    meter: Meter,
    run: Callable[[], torch.Tensor],
    parameters: Sequence[torch.Tensor],
    seed: int,
    probes: int = 1,
) -> None:
    """One step: the loss, its gradient, and the gradient of what rounding does to that.

    Args:
        meter: of the step; :func:`run_measured` was given the same one.
        run: computes the loss.
        parameters: whose gradients count.
        seed: of the random signs.
        probes: vectors of random signs, each a double backward; what they find is averaged.

    Raises:
        AmpFxError: the loss or its gradient is not finite, or the model cannot be differentiated twice.
    """
    with _twice():
        meter.phase = 0
        loss = run()
        meter.phase = 1
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        used = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
        norm = math.sqrt(sum(gradient.detach().double().square().sum().item() for gradient in used))
        if not used or not 0 < norm < math.inf:
            raise AmpFxError(
                f"the gradient of the loss has norm {norm}: calibrate on a step whose gradient is finite and not zero."
            )
        generator = torch.Generator().manual_seed(seed)
        meter.phase = 2
        meter.weight = 1 / probes
        for probe in range(probes):
            total = torch.zeros((), device=used[0].device)
            for gradient in used:
                signs = torch.empty(gradient.shape).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
                total = total + (gradient * signs.to(gradient.device)).sum().to(total.device) / norm
            torch.autograd.grad(
                total, [*parameters, *meter.leaves], allow_unused=True, retain_graph=probe + 1 < probes
            )


@contextlib.contextmanager
def _twice() -> Iterator[None]:
    """Names the cause where an op has no second derivative."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
            yield
    except RuntimeError as error:
        if "not implemented" in str(error) or "does not support" in str(error):
            raise AmpFxError(
                f"the model cannot be differentiated twice, which calibrate needs: {error}"
            ) from error
        raise
