"""Insert the casts that the placement implies, each once per value and dtype."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from amp_fx._torch import OpOverload
from amp_fx.graphs.calls import (
    PROGRAM_CAST,
    argument_value,
    arguments,
    grad_modes,
    is_data,
    is_layout,
    tensor_arguments,
)
from amp_fx.graphs.fake_runs import fake_values, run_fake
from amp_fx.graphs.keys import CAST_META, RAN_META, STEP_META
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import (
    LOW_DTYPES,
    in_place_target,
    is_eligible,
    storage_of,
    tensors,
    written_arguments,
    written_storages,
)
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.precision.plans.label import Label, Takes, label_of
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.table import device_row

#: where type promotion decides, the plan records what the kernel really returns
_PROMOTING = (OpClass.PROMOTE, OpClass.FOLLOW)


@dataclass(frozen=True)
class InsertCasts(Pass):
    """Casts arguments to what their node takes, and outputs back to their traced dtypes.

    A cast is shared by all readers of the same value and dtype, as long as nobody wrote to the storage in
    between and gradients are on for all of them or for none. Fake tensors are propagated on the way, so each
    decision is made on the real dtype of a value. ``aten.to.dtype`` is used because it has an autograd
    formula: the backward mirrors the casts.

    A norm that is planned low keeps its weights in fp32, and no device but a CPU has a kernel for that. Elsewhere its
    input is widened and its result is rounded, which compiled code does in the norm's kernel. So it is in a program
    that is stored, whatever the device: ONNX has no norm with two dtypes, and its optimizer would fold fp32 weights of
    a batch norm into a low convolution.

    Before, and after::

        x: f32[2, 4]; wq: f32[4, 4]; wk: f32[4, 4]
        q = torch.ops.aten.linear.default(x, wq)                            # low in bf16
        k = torch.ops.aten.linear.default(x, wk)                            # low in bf16
        return [q, k]
        # after
        x_low = torch.ops.aten.to.dtype(x, torch.bfloat16)                  # bf16[2, 4]; inserted
        wq_low = torch.ops.aten.to.dtype(wq, torch.bfloat16)                # bf16[4, 4]; inserted
        q = torch.ops.aten.linear.default(x_low, wq_low)                    # bf16[2, 4]
        wk_low = torch.ops.aten.to.dtype(wk, torch.bfloat16)
        k = torch.ops.aten.linear.default(x_low, wk_low)
        q_wide = torch.ops.aten.to.dtype(q, torch.float32)                  # f32[2, 4]; inserted
        k_wide = torch.ops.aten.to.dtype(k, torch.float32)
        return [q_wide, k_wide]
    """

    stored: bool = False  # the program is stored, for any runtime

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        # a kernel that takes both rounds as eager PyTorch does
        casts = _Casts(gm.graph, is_stored=self.stored and context.numerics != "eager")
        for node in list(gm.graph.nodes):
            if (label := label_of(node)) is not None:
                casts.rewrite(node, label)
        casts.restore_outputs()
        return PassResult(f"{casts.count} casts inserted", casts.count)


@dataclass
class _Casts:
    """The rewriting in progress."""

    graph: fx.Graph
    is_stored: bool = False
    count: int = 0
    #: dtype of every value in the program as traced
    traced: dict[fx.Node, torch.dtype] = field(default_factory=dict)
    _shared: dict[tuple[fx.Node, torch.dtype, int, bool], fx.Node] = field(default_factory=dict)
    #: storage behind a value, as traced: rewriting must not change who shares what
    _storage: dict[fx.Node, int] = field(default_factory=dict)
    #: storage -> number of writes so far
    _writes: dict[int, int] = field(default_factory=dict)
    #: nodes that copied as traced and now return a view of their argument
    _no_ops: list[fx.Node] = field(default_factory=list)
    #: results that are rounded as soon as they are there
    _rounded: dict[fx.Node, torch.dtype | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if is_eligible(value):
                self.traced[node] = value.dtype
            if (key := storage_of(node)) is not None:
                self._storage[node] = key
        self._grad_modes = grad_modes(self.graph)
        self._written_by = {node: written_storages(node) for node in self.graph.nodes}
        self._written = frozenset[int]().union(*self._written_by.values())

    def get(self, value: fx.Node, dtype: torch.dtype | None, before: fx.Node) -> fx.Node:
        """``value`` in ``dtype``: itself, a shared cast, or a new one in front of ``before``."""
        current = value.meta.get("val")
        if dtype is None or not is_eligible(current) or current.dtype is dtype:
            return value
        key = (value, dtype, self._writes.get(self._storage.get(value, 0), 0), self._grad_modes[before])
        if key not in self._shared:
            work = Rewriter(self.graph, meta={CAST_META: True})
            with work.before(before):
                self._shared[key] = work.call(PROGRAM_CAST, value, dtype, like=(value, before))
            self.count += 1
        return self._shared[key]

    def restore_outputs(self) -> None:
        """Returns every value in the dtype it was traced with."""
        output = self.graph.output_node()
        output.args = fx.map_arg(output.args, lambda n: self.get(n, self.traced.get(n), before=output))
        for node in self._no_ops:
            key = storage_of(node)
            shared = {self._storage.get(each) for each in output.all_input_nodes if storage_of(each) == key}
            if len(shared) > 1:
                self._copy(node)

    def rewrite(self, node: fx.Node, label: Label) -> None:
        """Casts the arguments of one node and brings its fake value up to date."""
        wanted, widened = self._wanted(node, label), self._is_widened(node, label)
        if widened:
            wanted = dict.fromkeys(tensor_arguments(node), torch.float32)
            self._rounded.update(dict.fromkeys(_first_results(node), label.dtype))
        cast = {
            name: fx.map_arg(value, lambda n, name=name: self.get(n, wanted.get((name, n)), before=node))
            for name, value in arguments(node)
        }
        node.args = tuple(cast.values())[: len(node.args)]
        node.kwargs = {name: cast[name] for name in node.kwargs}
        if self._retyped(node, label):
            node.meta["val"] = run_fake(node)
            node.meta[RAN_META] = fake_values(node)
            node.meta.pop("tensor_meta", None)
            if not widened and node not in self._rounded and label.op_class in _PROMOTING:
                results = (value.dtype for value in tensors(node.meta["val"]) if is_eligible(value))
                label.dtype = next(results, label.dtype)
            self._keep_copy(node)
        for key in self._written_by[node]:
            self._writes[key] = self._writes.get(key, 0) + 1
        pinned = label.pinned or self._rounded.get(node)
        if pinned is not None:
            self._pin(node, pinned, is_step=label.result_dtype is not None)

    def _is_widened(self, node: fx.Node, label: Label) -> bool:
        """True for a norm that is planned low, whose weights are not, where there may be no kernel for two dtypes."""
        if not has_trait(node, Trait.NORM, *((Trait.BATCH_NORM,) if self.is_stored else ())):
            return False
        if not self.is_stored and device_row(tensors(node.meta["val"])[0].device.type).mixes_norms:
            return False
        own = [argument_value(node, name) for name in label.own_dtype_slots]
        dtypes = {weight.meta["val"].dtype for weight in own if isinstance(weight, fx.Node)}
        return label.dtype in LOW_DTYPES and bool(dtypes - {label.dtype})

    def _wanted(self, node: fx.Node, label: Label) -> dict[tuple[str, fx.Node], torch.dtype]:
        """Dtype demanded per (argument name, node); absent where the argument is taken as it is."""
        if label.takes == Takes.ANY:
            return {}
        slots = retyped_arguments(node, label)
        if label.takes == Takes.TRACED:
            return {(name, source): self.traced[source] for name, source in slots if source in self.traced}
        target = in_place_target(node)
        if label.takes == Takes.SELF:
            into = target.meta["val"] if target is not None else None
            return dict.fromkeys(slots, into.dtype) if is_eligible(into) else {}
        if label.dtype is None or not slots:
            return {}
        if label.takes == Takes.MIXED:
            # 0-d inputs promote nothing where there are others
            slots = [slot for slot in slots if slot[1].meta["val"].ndim > 0] or slots
            dtypes = [source.meta["val"].dtype for _, source in slots]
            if target is not None or functools.reduce(torch.promote_types, dtypes) is label.dtype:
                return {}
        return dict.fromkeys(slots, label.dtype)

    def _retyped(self, node: fx.Node, label: Label) -> bool:
        """True if the result may have another dtype than traced; others keep their value (and unbacked sizes).

        An input has another dtype, or the traced one is that of the user's torch.autocast, which was on in the trace
        and is off when the graph runs.
        """
        if _element_of_call(node):
            return True
        if not isinstance(node.target, OpOverload) and not is_layout(node) and not is_data(node):
            return False
        given = [source for source in node.all_input_nodes if is_eligible(source.meta.get("val"))]
        # a view of what was cast to its traced dtype is a view of the cast
        return (label.traced is not None and label.dtype is not label.traced) or any(
            source.meta["val"].dtype is not self.traced.get(source)
            or (
                self._storage.get(source) == self._storage.get(node)
                and storage_of(source) != storage_of(node)
            )
            for source in given
        )

    def _keep_copy(self, node: fx.Node) -> None:
        """A call that copied as traced copies still, where a write or two results would tell.

        ``y.to(torch.bfloat16)`` copies an fp32 ``y``, and is ``y`` itself once that is bf16. ``y.mT.contiguous()``
        copies, and does not once the cast of ``y.mT`` is contiguous.
        """
        before = {self._storage.get(source) for source in node.all_input_nodes}
        after = {storage_of(source) for source in node.all_input_nodes}
        traced = self._storage.get(node)
        if traced is None or traced in before or storage_of(node) not in after:
            return
        if ({traced} | before) & self._written:
            self._copy(node)
        else:
            self._no_ops.append(node)

    def _copy(self, node: fx.Node) -> None:
        """Makes every reader read a copy."""
        work = Rewriter(self.graph)
        with work.after(node):
            copy = work.call(torch.ops.aten.clone.default, node)
        node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
        self._storage[copy] = self._storage[node]
        if node in self.traced:
            self.traced[copy] = self.traced[node]

    def _pin(self, node: fx.Node, dtype: torch.dtype, *, is_step: bool = False) -> None:
        """Casts a result at once and makes every reader read the cast: its storage is the shared one.

        A step is no cast in the end, as the call returns this dtype itself.
        """
        if not is_eligible(node.meta["val"]) or node.meta["val"].dtype is dtype:
            return
        cast = self.get(node, dtype, before=node.next)
        if is_step:
            cast.meta[STEP_META] = True
        node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
        if node in self._storage:
            self._storage[cast] = self._storage[node]
        self.traced[cast] = self.traced[node]


def retyped_arguments(node: fx.Node, label: Label) -> list[tuple[str, fx.Node]]:
    """The values that a node reads in the dtype that its label says, with the argument's name."""
    excepted = {*label.own_dtype_slots, *(name for name, _ in written_arguments(node))}
    return [
        (name, source)
        for name, source in tensor_arguments(node)
        if name not in excepted and is_eligible(source.meta.get("val"))
    ]


def _first_results(node: fx.Node) -> list[fx.Node]:
    """The nodes of a call's first result: the call itself if it has one only."""
    if isinstance(node.meta["val"], torch.Tensor):
        return [node]
    return [user for user in node.users if _element_of_call(user) and user.args[1] == 0]


def _element_of_call(node: fx.Node) -> bool:
    """True for ``getitem`` of a call: its value is whatever the call now returns."""
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(
        getattr(node.args[0], "target", None), OpOverload
    )
