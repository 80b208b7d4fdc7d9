"""Casts in Inductor's graphs: which ones stay, how they are laid out, and where they are written."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx._torch import convert_op, lays_out_convolutions, write_as_it_is
from amp_fx.graphs.calls import CAST, behind, readers
from amp_fx.graphs.fake_runs import is_matmul, run_fake
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import LOW_DTYPES, is_eligible, storage_of
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.precision.placement.cost import is_relaid
from amp_fx.precision.policy.table import device_row

aten = torch.ops.aten


@dataclass(frozen=True)
class KeepStatistics(Pass):
    """Runs on Inductor's joint graph (forward and backward together).

    Torch's decompositions of ``native_layer_norm`` (for CPU) and ``native_group_norm`` compute mean and inverse
    deviation in fp32, and round them to the dtype of the input for the backward. All rows then have nearly the same
    error, and so has the whole gradient: of BERT under policy ``fast`` it was a fifth of the squared error. Kept in
    fp32 they take two bytes more per row. Only what a decomposition rounds is changed, never a cast of the program.

    Before, and after::

        rsqrt: f32[8, 32, 1]; grad: f32[8, 32, 64]
        low = torch.ops.prims.convert_element_type.default(rsqrt, torch.bfloat16)       # bf16[8, 32, 1]
        share = torch.ops.aten.div.Tensor(low, 64)                                      # bf16[8, 32, 1]
        product = torch.ops.aten.mul.Tensor(grad, share)                                # f32[8, 32, 64]
        # after; both calls are of the norm's backward
        share = torch.ops.aten.div.Tensor(rsqrt, 64)                                    # f32[8, 32, 1]
        product = torch.ops.aten.mul.Tensor(grad, share)                                # f32[8, 32, 64]
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        kept = 0
        for cast in gm.graph.find_nodes(op="call_function", target=CAST):
            if not _rounds_a_statistic(cast) or (low := _low_readers(cast)) is None:
                continue
            cast.replace_all_uses_with(cast.all_input_nodes[0])
            gm.graph.erase_node(cast)
            for node in (node for node in gm.graph.nodes if node in low):
                node.meta["val"] = run_fake(node)
            kept += 1
        return PassResult(f"{kept} statistics of norms stay in fp32", kept)


def _rounds_a_statistic(cast: fx.Node) -> bool:
    before, after = cast.all_input_nodes[0].meta.get("val"), cast.meta["val"]
    is_of_norm = has_trait(cast.meta.get("original_aten"), Trait.NORM)
    narrows = is_eligible(before) and before.dtype is torch.float32 and after.dtype in LOW_DTYPES
    return is_of_norm and narrows and any(map(_is_backward, cast.users))


def _low_readers(cast: fx.Node) -> set[fx.Node] | None:
    """The values that are low because the statistic is; None where not all of them belong to the backward of a norm."""
    found: set[fx.Node] = set()
    stack = [cast]
    while stack:
        for user in stack.pop().users:
            if not (_is_backward(user) or has_trait(user, Trait.RESHAPES)):
                return None
            if user.meta["val"].dtype in LOW_DTYPES and user not in found:
                found.add(user)
                stack.append(user)
    return found


def _is_backward(node: fx.Node) -> bool:
    if has_trait(node, Trait.RESHAPES):
        return any(map(_is_backward, node.users))
    return has_trait(node.meta.get("original_aten"), Trait.NORM_BACKWARD)


@dataclass(frozen=True)
class LayOutGradients(Pass):
    """Runs on Inductor's joint graph (forward and backward together), on CPU.

    A convolution's backward returns the gradient of its weight channels last. Widened as it lies, it has another
    layout than the parameter, and autograd copies it once more, element by element: 8 bytes moved per weight
    that this pass saves (``AccumulateGrad``, "Gradient Layout Contract").

    Before, and after::

        grad: bf16[1, 64, 8, 8]; x: bf16[1, 64, 8, 8]; w: f32[64, 64, 3, 3]
        w_16 = torch.ops.prims.convert_element_type.default(w, torch.bfloat16)
        both = torch.ops.aten.convolution_backward.default(
            grad, x, w_16, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
        grad_w = getitem(both, 1)                                                       # bf16[64, 64, 3, 3]
        wide = torch.ops.prims.convert_element_type.default(grad_w, torch.float32)
        # after
        w_16 = torch.ops.prims.convert_element_type.default(w, torch.bfloat16)
        both = torch.ops.aten.convolution_backward.default(
            grad, x, w_16, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
        grad_w = getitem(both, 1)
        wide = torch.ops.amp_fx.convert.default(grad_w, torch.float32, [576, 9, 3, 1])
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        if not lays_out_convolutions():
            return PassResult("Inductor keeps the layout of convolutions", 0)
        changed = 0
        for backward in gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
            if (weight := _relaid_weight(backward.args[2])) is None:
                continue
            items = [user for user in backward.users if user.target is operator.getitem]
            users = [user for item in items if item.args[1] == 1 for user in item.users]
            casts = [user for user in users if user.target is CAST]
            for cast in casts:
                if cast.meta["val"].dtype is torch.float32:
                    _lay_out(cast, weight.meta["val"].stride())
                    changed += 1
        return PassResult(f"{changed} gradients are laid out as their weights", changed)


@dataclass(frozen=True)
class SeparateOutputs(Pass):
    """Runs on Inductor's joint graph (forward and backward together).

    A value that is returned in fp32 has to be written in fp32. Whoever reads it in the graph would then read 4 bytes
    per element, and the backward keeps them: logits, which the program returns and its loss reads. Read from the low
    value, they are 2, and the cast is part of the reader's kernel. The values are the same. A matmul takes its operands
    from memory: it reads what is returned.

    Before, and after::

        logits: bf16[8, 32]; amax: f32[8, 1]
        wide = torch.ops.prims.convert_element_type.default(logits, torch.float32)
        sub = torch.ops.aten.sub.Tensor(wide, amax)
        return [wide, sub]
        # after, the first cast is within sub's kernel
        wide = torch.ops.prims.convert_element_type.default(logits, torch.float32)
        returned = torch.ops.prims.convert_element_type.default(logits, torch.float32)
        sub = torch.ops.aten.sub.Tensor(wide, amax)
        return [returned, sub]
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        count = 0
        for cast in gm.graph.find_nodes(op="call_function", target=CAST):
            value, before = cast.meta["val"], cast.all_input_nodes[0].meta["val"]
            widens = value.dtype is torch.float32 and before.dtype in LOW_DTYPES
            if not widens or all(user.op != "output" for user in cast.users):
                continue
            from_memory = {user for user in cast.users if user.op == "output" or is_matmul(user)}
            others = {*gm.graph.output_node().all_input_nodes} - {cast}
            # it needs a memory that nothing else that is returned shares
            if len(from_memory) == len(cast.users) or storage_of(cast) in map(storage_of, others):
                continue
            with gm.graph.inserting_after(cast):
                returned = gm.graph.node_copy(cast)
            # a memory of its own, by which AOTAutograd tells it from the other
            returned.meta["val"] = run_fake(returned)
            cast.replace_all_uses_with(returned, delete_user_cb=from_memory.__contains__)
            count += 1
        return PassResult(f"{count} returned values have casts of their own", count)


# ---- after partitioning: forward, backward and inference graphs, each by itself


@dataclass(frozen=True)
class LayOutWeights(Pass):
    """Runs on Inductor's graphs after partitioning, on CPU, backward graphs included: they may recompute convolutions.

    Inductor runs convolutions channels last and lays out their weights for that in every call. What it compiles for
    a cast that also changes the layout takes longer than the library's copies. It has to run after Inductor has
    noted the strides of what the graph returns, as a convolution whose weight is laid out returns channels last.
    Inputs of the graph only; what the graph computes is written in any layout as it is computed.

    Before, and after::

        x: bf16[1, 64, 8, 8]; w: f32[64, 64, 3, 3]
        w_16 = torch.ops.prims.convert_element_type.default(w, torch.bfloat16)
        conv = torch.ops.aten.convolution.default(x, w_16, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        # after
        w_16 = torch.ops.amp_fx.convert.default(w, torch.bfloat16, [576, 1, 192, 64])
        conv = torch.ops.aten.convolution.default(x, w_16, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        if not lays_out_convolutions():
            return PassResult("Inductor keeps the layout of convolutions", 0)
        convolutions = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
        read = {node.args[1] for node in convolutions}
        # casts to 16 bits of inputs
        casts = [node for node in gm.graph.nodes if node in read and _relaid_weight(node) is not None]
        for cast in casts:
            _lay_out(cast, cast.meta["val"].contiguous(memory_format=torch.channels_last).stride())
        return PassResult(f"{len(casts)} weights of convolutions are laid out by the library", len(casts))


@dataclass(frozen=True)
class WriteCasts(Pass):
    """Runs on Inductor's graphs after partitioning; what is found is written to memory where it is made.

    Inductor computes a view inside of what it reads: the cast below has loops over [8192, 768], and what it reads over
    [8, 1024, 768]. Its last round of fusion compares such loops merged, but not for a kernel that reduces rows and
    columns at once, as the backward of a norm does on a GPU (``FusedMixOrderReductions``; torch 2.11 to 2.14). The cast
    is then a kernel of its own, and reads 4 bytes per element that were in a register one kernel before. Written before
    it is viewed, it is part of that kernel. Graph and values stay; the node is marked. Cases:

    1. on CUDA, a matmul reads the cast through views, and something else reads its source, which is written anyway: the
       gradient on a residual stream.
    2. on CUDA, each element is copied several times, as heads of keys are: loops over the copies fuse with nothing
       before them, so that the source would be written in fp32, and read and converted once per copy.
    3. on a CPU, the inverse deviation of a norm: in the loop over a row it is a root and a division for each vector, as
       a compiler cannot know that stores leave the row's statistics alone. Norm and rounding take 0.78 of that time.

    Before, and after::

        residual: f32[8, 1024, 768]; grad: f32[8, 1024, 768]; w: bf16[768, 64]
        add = torch.ops.aten.add.Tensor(residual, grad)
        low = torch.ops.prims.convert_element_type.default(add, torch.bfloat16)
        rows = torch.ops.aten.view.default(low, [8192, 768])
        mm = torch.ops.aten.mm.default(rows, w)
        return [add, mm]
        # after, on CUDA; before, Inductor writes the rows
        add = torch.ops.aten.add.Tensor(residual, grad)
        low = torch.ops.prims.convert_element_type.default(add, torch.bfloat16)   # bf16[8, 1024, 768]; written as it is
        rows = torch.ops.aten.view.default(low, [8192, 768])
        mm = torch.ops.aten.mm.default(rows, w)
        return [add, mm]
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        casts = [
            cast
            for cast in gm.graph.find_nodes(op="call_function", target=CAST)
            if _narrows(cast) and (_is_multiplied_through_views(cast) or _is_repeated(cast))
        ]
        roots = gm.graph.find_nodes(op="call_function", target=aten.rsqrt.default)
        found = [*casts, *filter(_is_of_rows_on_cpu, roots)]
        for node in found:
            write_as_it_is(node)
        return PassResult(f"{len(found)} values are written where they are made", len(found))


def _narrows(cast: fx.Node) -> bool:
    """True for a cast to 16 bits of what the graph computes, on a device whose other such casts are fused."""
    value, is_computed = cast.meta["val"], behind(cast.all_input_nodes[0]).op == "call_function"
    return is_computed and value.dtype in LOW_DTYPES and device_row(value.device.type).fuses_casts


def _is_multiplied_through_views(cast: fx.Node) -> bool:
    """Case 1."""
    source = cast.all_input_nodes[0]
    if has_trait(source, Trait.RESHAPES) or len(source.users) == 1 or not cast.meta["val"].is_contiguous():
        return False
    if not all(has_trait(user, Trait.RESHAPES) for user in cast.users):
        return False
    return any(map(is_matmul, readers(cast)))


def _is_of_rows_on_cpu(root: fx.Node) -> bool:
    """Case 3, by the size that a norm keeps: others need not be known."""
    value = root.meta["val"]
    return value.device.type == "cpu" and [n for n in value.shape[-1:] if isinstance(n, int)] == [1]


def _is_repeated(cast: fx.Node) -> bool:
    """Case 2."""
    return all(
        user.target is aten.expand.default and all(copy.target is aten.clone.default for copy in user.users)
        for user in cast.users
    )


def _lay_out(cast: fx.Node, stride: Sequence[int]) -> None:
    """Puts a call that also changes the layout in the place of a cast."""
    work = Rewriter(cast.graph, captured=False)
    with work.before(cast):
        laid_out = work.call(convert_op(), cast.all_input_nodes[0], cast.meta["val"].dtype, list(stride))
    work.replace(cast, laid_out)


def _relaid_weight(node: object) -> fx.Node | None:
    """The input of a graph of AOTAutograd's that a 16-bit value is cast from, if it is worth laying out."""
    if not isinstance(node, fx.Node) or node.target is not CAST or node.meta["val"].dtype not in LOW_DTYPES:
        return None
    (source,) = node.all_input_nodes
    return source if source.op == "placeholder" and is_relaid(source.meta["val"]) else None
