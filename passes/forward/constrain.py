"""Take calls out of the low dtype where their surroundings make it wrong, and tie what shares a storage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx._torch import FakeTensor, OpOverload, kernel_rows, onednn_computes
from amp_fx.graphs.calls import argument_value, arguments, differentiated, is_cast, readers
from amp_fx.graphs.keys import LABEL, MAY_ROUND, TIED
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import is_eligible, storage_of, tensors, written_arguments, written_storages
from amp_fx.passes.base import Pass, PassContext
from amp_fx.plans.label import Kind, Label, Reason, Takes, label_of
from amp_fx.policy import OpClass

aten = torch.ops.aten

Hazards = Iterator[tuple[fx.Node, Reason]]


@dataclass(frozen=True)
class Constrain(Pass):
    """Takes nodes out of the low dtype where their surroundings make it wrong or unsafe.

    Patterns (:data:`HAZARDS`, each a function with its failing example) move single nodes to ``fp32``. Then tensors
    that share a storage with something written, or with another output, are tied together: none of them can be
    re-typed alone, and where an input or two outputs share it, or a call that is not ours writes to it, it keeps its
    traced dtype.

    Before, low dtype fp16, and after::

        scores = torch.ops.aten.matmul.default(q, k)                        # low
        masked = torch.ops.aten.masked_fill.Scalar(scores, mask, -3.4e38)   # promote: RuntimeError in fp16
        # after
        masked = torch.ops.aten.masked_fill.Scalar(scores, mask, -3.4e38)   # fp32: scalar-range
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> str:
        pinned = 0
        for hazard, rounds_like_eager in HAZARDS:
            if context.numerics == "eager" and not rounds_like_eager:
                continue
            for node, why in list(hazard(gm.graph)):
                pinned += _to_fp32(node, why)
        _forbid_rounding(gm.graph)
        _pin_differentiated(gm.graph)
        tied = _tie_storages(gm)
        return f"{pinned} nodes to fp32, {tied} tied to a shared storage"


def _to_fp32(node: fx.Node, why: Reason) -> int:
    plan = node.meta[LABEL]
    if plan.op_class is OpClass.FP32:
        return 0
    if node.meta.get(TIED):
        # a write runs in the dtype of what it writes to: the storage has to be fp32
        for _, target in written_arguments(node):
            key = storage_of(target)
            root = label_of(next(owner for owner in node.graph.nodes if storage_of(owner) == key))
            if root is not None:
                root.pinned, root.reasons = torch.float32, (why,)
    else:
        plan.op_class, plan.takes = OpClass.FP32, Takes.DTYPE
    plan.reasons = (why,)
    return 1


def _forbid_rounding(graph: fx.Graph) -> None:
    """Policy ``fast`` rounds nothing that holds a constant beyond the low range, or that feeds no matmul.

    ``scores + mask`` with a mask of ``finfo(float32).min`` would hold -inf, and fully masked rows give NaN.
    """
    huge: set[fx.Node] = set()
    feeds_low: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        plan = label_of(node)
        if (plan is not None and plan.op_class is OpClass.LOW) or node in feeds_low:
            feeds_low.update(node.all_input_nodes)
    for node in graph.nodes:
        plan = label_of(node)
        if plan is None:
            continue
        beyond = any(
            math.isfinite(c) and abs(c) > torch.finfo(plan.low or torch.float16).max for c in constants(node)
        )
        if beyond or (
            plan.op_class is not OpClass.LOW and any(source in huge for source in node.all_input_nodes)
        ):
            huge.add(node)
        if node in huge or node not in feeds_low:
            node.meta[MAY_ROUND] = False


def _pin_differentiated(graph: fx.Graph) -> None:
    """What the graph takes gradients by has its traced dtype for everybody, or the loss would not depend on it.

    ``h = x @ w; g = torch.autograd.grad(loss(h), h)``: were the product bf16 for the loss and cast to fp32 for the
    call, the call would raise.
    """
    for node in differentiated(graph):
        if (plan := label_of(node)) is not None:
            plan.pinned = plan.traced


def _tie_storages(gm: fx.GraphModule) -> int:
    """Ties every node whose storage is written to, or visible twice from outside."""
    members: dict[int, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if (key := storage_of(node)) is not None:
            members.setdefault(key, []).append(node)
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    written = {storage_of(source) for call in calls for _, source in written_arguments(call)}
    # what is not ours writes to the value itself, in the traced dtype
    others = [node for node in gm.graph.nodes if (plan := label_of(node)) and plan.op_class is OpClass.KEEP]
    kept = frozenset[int]().union(*map(written_storages, others))
    outputs = set(gm.graph.output_node().all_input_nodes)
    tied = 0
    for key, nodes in members.items():
        shared_outside = sum(node in outputs or node.op == "placeholder" for node in nodes) > 1
        exact = key in kept or any(has_trait(node, Trait.EXACT_LAYOUT) for node in nodes)
        if not (key in written or shared_outside or exact):
            continue
        _tie(nodes, pin=shared_outside or exact)
        tied += sum(label_of(node) is not None for node in nodes)
    return tied


def _tie(nodes: list[fx.Node], pin: bool) -> None:
    root, views = nodes[0], nodes[1:]
    for node in views:
        plan = label_of(node)
        if plan is None:
            continue
        node.meta[TIED] = True
        writes = bool(written_arguments(node))
        if plan.op_class is OpClass.KEEP:
            pin = True
        elif not writes:
            plan.op_class, plan.takes = OpClass.FOLLOW, Takes.ANY
            plan.reasons = (Reason(Kind.SHARED_STORAGE),)
    plan = label_of(root)
    if plan is None or not is_eligible(root.meta.get("val")):
        return
    root.meta[TIED] = True
    if pin and plan.pinned is None:
        plan.pinned = plan.traced


# ---- hazards that op lists cannot see


def scalar_range(graph: fx.Graph) -> Hazards:
    """A finite constant that is infinite in the low dtype.

    ``scores.masked_fill(mask, torch.finfo(torch.float32).min)`` raises in both 16-bit dtypes; ``where``
    silently writes -inf, and a fully masked row then gives NaN in softmax.
    """
    lows = _possible_lows(graph)
    for node, _ in _ours(graph):
        beyond = (
            (constant, low)
            for constant in constants(node)
            for low in lows[node]
            if math.isfinite(constant) and abs(constant) > torch.finfo(low).max
        )
        for constant, low in itertools.islice(beyond, 1):
            yield node, Reason.of(Kind.SCALAR_RANGE, constant=constant, low=low)


def tiny_eps(graph: fx.Graph) -> Hazards:
    """An eps that the low dtype flushes to zero on its way to a division.

    ``x / (x.norm() + 1e-8)`` is 0/0 in fp16, whose smallest normal number is 6.1e-5.
    """
    lows = _possible_lows(graph)
    for node, _ in _ours(graph):
        if not has_trait(node, Trait.ADDS_EPS) or not lows[node]:
            continue
        low = max(lows[node], key=lambda dtype: torch.finfo(dtype).smallest_normal)
        smallest = torch.finfo(low).smallest_normal
        eps = next((c for c in constants(node) if 0 < abs(c) < smallest), None)
        if eps is not None and any(has_trait(user, Trait.DIVIDES) for user in readers(node, _moves)):
            yield node, Reason.of(Kind.TINY_EPS, eps=eps, low=low)


def exp_sum(graph: fx.Graph) -> Hazards:
    """Exponentials that are summed: a hand-written softmax or logsumexp.

    ``x.exp().sum()`` over 4,096 low values has lost the small ones before the sum begins.
    """
    for node, _ in _ours(graph):
        if _base(node) != "exp":
            continue
        if sums := [user for user in readers(node, _moves) if has_trait(user, Trait.SUMS)]:
            for reached in (node, *sums):
                yield reached, Reason(Kind.EXP_SUM)


def positions(graph: fx.Graph) -> Hazards:
    """Integer positions in a matmul: RoPE angles as ``inv_freq @ positions``.

    bf16 holds integers exactly up to 256, so every later token gets a wrong angle.
    """
    chain: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        plan, moves = label_of(node), _moves(node)
        # an op that picks or moves floating values by integer positions returns the values, not the positions
        from_chain = any(
            source in chain and not (moves and _is_floating(node) and not _is_floating(source))
            for source in node.all_input_nodes
        )
        if _base(node) == "arange":
            chain.add(node)
        elif not from_chain or plan is None:
            continue
        elif is_cast(node) or moves or has_trait(node, Trait.POSITIONS):
            chain.add(node)
        elif plan.op_class is OpClass.LOW:
            yield node, Reason(Kind.POSITIONS)


def no_kernel(graph: fx.Graph) -> Hazards:
    """A call in a 16-bit dtype that its kernel refuses.

    ``nn.LSTM`` under ``torch.autocast("cpu")`` raises "could not create a primitive descriptor" on CPUs for which
    oneDNN has none; ``torch.linalg.matrix_norm(x, 2)``, "Low precision dtypes not supported". ``F.grouped_mm`` with 12
    columns runs in fp32, and raises "strides should be multiple of 16 bytes" in bf16; its gradient reads rows as long
    as the result's.
    """
    for node, plan in _ours(graph):
        if plan.low is not None and (why := _refusal(node, plan)):
            yield node, Reason.of(Kind.NO_KERNEL, low=plan.low, why=why)


def _refusal(node: fx.Node, plan: Label) -> str:
    """Why the kernel of a call refuses the low dtype; empty where the kernel takes it."""
    name, results = _base(node), tensors(node.meta.get("val"))
    if name in ("lstm", "mkldnn_rnn_layer"):
        on_cpu = any(value.device.type == "cpu" for value in results)
        return "oneDNN has no LSTM for this CPU" if on_cpu and not onednn_computes(plan.low) else ""
    if name == "_grouped_mm" and plan.op_class is OpClass.LOW:
        factors = [value for n in node.all_input_nodes if is_eligible(value := n.meta["val"])]
        fits = kernel_rows(*factors, *results, itemsize=plan.low.itemsize)
        return "" if fits else "its rows are not whole 16 bytes"
    return "it factorises a matrix" if _factorises(node) else ""


def _factorises(node: fx.Node) -> bool:
    """True for a norm by singular values, and for a power that inverts: no device has half kernels for those."""
    base, order, power = _base(node), argument_value(node, "ord"), argument_value(node, "n")
    if base in ("linalg_matrix_norm", "linalg_norm"):
        dims = argument_value(node, "dim") or range(node.all_input_nodes[0].meta["val"].ndim)
        return order in (2, -2, "nuc") and len(dims) == 2
    return base in ("linalg_matrix_power", "matrix_power") and power < 0


def adds_low(graph: fx.Graph) -> Hazards:
    """Numbers that a kernel counts or adds up in the dtype that it is given.

    ``(x @ w).histc()`` in bf16 stops at 256, where adding 1 changes nothing.
    """
    for node, plan in _ours(graph):
        picks = argument_value(node, "reduce") in ("amax", "amin", "max", "min")
        adds = has_trait(node, Trait.ADDS_LOW) and not picks
        adds |= has_trait(node, Trait.MAY_ADD_LOW) and argument_value(node, "accumulate") is True
        # of what the program has in a low dtype, the storage stays
        if adds and plan.low is not None and (plan.traced is torch.float32 or TIED not in node.meta):
            yield node, Reason.of(Kind.ADDS_LOW, low=plan.low, limit=round(2 / torch.finfo(plan.low).eps))


def bits(graph: fx.Graph) -> Hazards:
    """A value whose bits are read, computed in the low dtype: the lower half of fp32's bits would be zeros.

    Hashes of ``(x @ w).view(torch.int32)`` would fall together, and the mean of its bytes would be half as large.
    """
    for node in graph.nodes:
        stack = list(node.all_input_nodes) if has_trait(node, Trait.READS_BITS) else []
        while stack:
            plan = label_of(source := stack.pop())
            if _moves(source):
                stack += source.all_input_nodes
            elif plan is not None and plan.op_class is not OpClass.KEEP and plan.traced is torch.float32:
                yield source, Reason.of(Kind.BITS, low=plan.low)


#: (pattern, True where eager autocast would raise rather than round, so that it holds under numerics="eager" too)
HAZARDS: tuple[tuple[Callable[[fx.Graph], Hazards], bool], ...] = (
    (scalar_range, True),
    (no_kernel, True),
    (tiny_eps, False),
    (adds_low, False),
    (bits, False),
    (exp_sum, False),
    (positions, False),
)


def _ours(graph: fx.Graph) -> Iterator[tuple[fx.Node, Label]]:
    for node in graph.nodes:
        plan = label_of(node)
        if plan is not None and plan.op_class not in (OpClass.KEEP, OpClass.FP32):
            yield node, plan


def _possible_lows(graph: fx.Graph) -> dict[fx.Node, list[torch.dtype]]:
    """The low dtypes that each call may run in: its region's, and those in which what it promotes or moves may come.

    In a region of ``torch.autocast("cpu", torch.bfloat16)``, what was computed in fp16 outside stays fp16.
    """
    lows: dict[fx.Node, list[torch.dtype]] = {}
    for node, plan in _ours(graph):
        sources = [] if plan.op_class is OpClass.LOW else node.all_input_nodes
        own = [] if plan.low is None else [plan.low]
        lows[node] = list(dict.fromkeys(itertools.chain(own, *(lows.get(n, []) for n in sources))))
    return lows


def _is_floating(node: fx.Node) -> bool:
    return any(value.is_floating_point() for value in tensors(node.meta.get("val")))


def _base(node: fx.Node) -> str:
    """``"add"`` for ``aten.add.Tensor`` and ``aten.add_.Tensor``."""
    if not isinstance(node.target, OpOverload):
        return ""
    return node.target._schema.name.removeprefix("aten::").removesuffix("_")


def constants(node: fx.Node) -> Iterator[float]:
    """Numbers that the op computes with: Python scalars and 0-d constants, no sizes and indices."""
    if not isinstance(node.target, OpOverload):
        return
    sizes = {a.name for a in node.target._schema.arguments if str(a.type) in ("int", "Optional[int]")}
    for name, value in arguments(node):
        constant = _constant(value) if isinstance(value, fx.Node) else value
        if name not in sizes and isinstance(constant, (int, float)) and not isinstance(constant, bool):
            yield float(constant)


def _constant(node: fx.Node) -> object:
    """The number in a 0-d constant tensor: ``torch.full((), -1e9)``, ``torch.tensor(-1e9)``; else None."""
    if not isinstance(node.meta.get("val"), torch.Tensor) or node.meta["val"].ndim > 0:
        return None
    while has_trait(node, Trait.UNCHANGED, Trait.CAST):
        node = node.all_input_nodes[0]
    if node.target in (aten.full.default, aten.scalar_tensor.default):
        return node.args[-1]
    value = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return value.item() if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) else None


def _moves(node: fx.Node) -> bool:
    """True for an op that only moves values."""
    plan = label_of(node)
    return plan is not None and plan.op_class is OpClass.FOLLOW
