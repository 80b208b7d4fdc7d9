"""All that a graph computes from its weights alone becomes an input: cast, with norms folded in, packed by oneDNN.

Before, for a graph that :class:`amp_fx.passes.CacheWeights` has left::

    linear = torch.ops.aten.linear.default(x_16, w_bfloat16, b_bfloat16)            # inputs: copies of w and b

After::

    linear = torch.ops.mkldnn._linear_pointwise.default(x_16, w_packed, b_bfloat16, "none", [], "")

Inductor fuses with such a call what follows it, wherever it comes from. So nothing has to be frozen, and the graph is
one for Inductor's caches.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import (
    LINEAR,
    LINEAR_INT8,
    Packing,
    convolution_int8_op,
    convolution_op,
    is_faster_as_convolution,
    onednn_packs,
    packing,
)
from amp_fx.graphs.calls import (
    CONVOLUTIONS,
    add_input,
    args_of,
    argument_value,
    convolution_settings,
    convolves,
    is_cast,
    is_channels_last,
    is_returned,
)
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.traits import linear_form
from amp_fx.graphs.values import is_fixed, is_pure, is_view, numel, storage_of, tensors, writers_in
from amp_fx.weights.derived import DerivedInputs, derivation
from amp_fx.weights.products import as_convolution, dequantised, join_linears
from amp_fx.weights.recipes import Derived, with_norm

aten = torch.ops.aten

#: of all elements of a graph's weights, those that may be added by what is computed from them: embeddings that are
#: expanded to a batch are others for each batch size
_EXPANDED = 1 / 32


def pack(
    gm: fx.GraphModule, weights: Sequence[fx.Node], copies: Sequence[fx.Node], *, wide: bool
) -> tuple[list[fx.Node], list[int], DerivedInputs]:
    """Makes inputs of what a graph computes from its weights alone; changes the graph.

    Returns the new inputs, which stand after the program's own, the positions of the weights among those, and what
    derives the new inputs from the weights.

    Args:
        gm: a rewritten graph.
        weights: inputs that nobody writes to.
        copies: what computes low copies, perhaps of other weights.
        wide: linears in fp32 are packed, too.
    """
    work = _Packer(gm, {*weights, *copies}, wide=wide)
    for node in list(gm.graph.nodes):
        if node not in work.derived:
            work.fold_norm(node)
    join_linears(gm.graph, work.derived, work.packs)
    for node in list(gm.graph.nodes):
        if node in work.derived:
            continue
        work.pack_int8(node)
        work.pack_linear(node)
        work.pack_convolution(node)
    work.take_the_rest()
    return work.finish()


class _Packer:
    """Works on one graph; ``derived`` is what is computed from weights alone, weights included."""

    def __init__(self, gm: fx.GraphModule, derived: set[fx.Node], *, wide: bool) -> None:
        self._gm, self._graph, self._wide = gm, gm.graph, wide
        self._work = Rewriter(gm.graph)
        self._programs = gm.graph.find_nodes(op="placeholder")
        self._last = self._programs[-1]
        self._taken: dict[Derived, fx.Node] = {}
        self._read_instead: list[tuple[fx.Node, fx.Node, fx.Node]] = []
        self._writers: Mapping[int | None, list[fx.Node]] = {**writers_in(self._graph)}
        self.derived = derived
        self._find()

    def _find(self) -> None:
        left = _EXPANDED * sum(numel(node.meta["val"]) for node in self._programs if node in self.derived)
        fixed = set[fx.Node]()
        sources: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self._graph.nodes:
            inputs = node.all_input_nodes
            if node.op == "get_attr":
                fixed.add(node)
            elif node.op == "placeholder":
                sources[node] = frozenset((node,))
            else:
                sources[node] = frozenset[fx.Node]().union(*(sources.get(arg, ()) for arg in inputs))
            is_computed = any(arg in self.derived for arg in inputs) and all(
                arg in self.derived or arg in fixed for arg in inputs
            )
            is_settled = node in self.derived or storage_of(node) in self._writers
            if is_settled or not is_computed or not is_pure(node):
                continue
            if not is_view(node):
                elements = sum(numel(weight.meta["val"]) for weight in sources[node])
                more = sum(map(numel, tensors(node.meta["val"]))) - elements
                if more > left:
                    continue
                left -= max(more, 0)
            self.derived.add(node)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        """A step that is derived."""
        self.derived.add(step := self._work.call(target, *args))
        return step

    # ---- norms

    def fold_norm(self, norm: fx.Node) -> None:
        """Folds a norm by given statistics into the weight and bias of the convolution or product before it.

        The weight is rounded once, after it was scaled.
        """
        if norm.target is not aten.batch_norm.default or argument_value(norm, "training"):
            return
        x, scale, shift, mean, variance, _, _, eps, *_ = args_of(norm)
        given = [value for value in (scale, shift, mean, variance) if value is not None]
        if None in (mean, variance) or not self.derived.issuperset(given):
            return
        call, cast = x, None
        if is_cast(call) and len(call.users) == 1:
            call, cast = call.all_input_nodes[0], call
        position = self._channels(call)
        if position is None or len(call.users) > 1 or not self._is_from_weights(call):
            return
        if any(call < writer < norm for writer in self._writers.get(storage_of(args_of(call)[0]), ())):
            # the call is made where the norm stands, and would read what was written
            return
        weight, bias = args_of(call)[1], args_of(call)[2] if len(args_of(call)) > 2 else None
        dtype, sizes = weight.meta["val"].dtype, [1] * weight.meta["val"].ndim
        sizes[position] = -1
        with self._graph.inserting_before(norm):
            wide = None if bias is None else self._wide_source(bias)
            given = scale, shift, mean, variance, eps
            both = with_norm(self._wide_source(weight), wide, given, sizes, self._call)
            low = [self._call(aten.to.dtype, value, dtype) for value in both]
            folded = self._graph.node_copy(call)
            folded.args = (args_of(call)[0], *low, *args_of(call)[3:])
            result = self._work.cast(folded, norm.meta["val"].dtype)
        norm.replace_all_uses_with(result)
        for node in filter(None, (norm, cast, call)):
            self._graph.erase_node(node)

    def _channels(self, call: fx.Node) -> int | None:
        """Of the weight of a convolution, or of a linear that gives a matrix, the dimension of the result's columns."""
        if call.target is aten.linear.default:
            return 0 if call.meta["val"].ndim == 2 else None
        if (
            call.target not in CONVOLUTIONS
            or call.kwargs
            or args_of(call)[0].meta["val"].ndim != args_of(call)[1].meta["val"].ndim
        ):
            return None
        given = convolution_settings(call)
        if "output_padding" not in given:
            return 0
        return 1 if given["groups"] == 1 else None

    def _is_from_weights(self, call: fx.Node) -> bool:
        dtype = args_of(call)[1].meta["val"].dtype
        return all(
            arg is None or (arg in self.derived and arg.meta["val"].dtype is dtype)
            for arg in args_of(call)[1:3]
        )

    def _wide_source(self, node: fx.Node) -> fx.Node:
        """A value in fp32: before it was rounded, where it was."""
        if is_cast(node) and node.all_input_nodes[0].meta["val"].dtype is torch.float32:
            return node.all_input_nodes[0]
        return self._call(aten.to.dtype, node, torch.float32)

    # ---- what oneDNN packs

    def pack_linear(self, node: fx.Node) -> None:
        """A product of values by a matrix of weights."""
        form = linear_form(node)
        if form is None:
            return
        args: dict[int | None, Any] = dict(enumerate(args_of(node)))
        x, weight, bias = args[form.input], args[form.weight], args.get(form.bias)
        value, matrix = x.meta["val"], weight.meta["val"]
        if weight not in self.derived or not self.packs(value, matrix) or not matrix.numel():
            return
        columns, contracted = matrix.shape if form.by_rows else reversed(matrix.shape)
        if bias is not None and (
            not isinstance(bias, fx.Node)
            or bias.meta["val"].shape != (columns,)
            or bias.meta["val"].dtype is not matrix.dtype
        ):
            return
        if not form.by_rows:
            with self._graph.inserting_before(node):
                weight = self._call(aten.t.default, weight)
        sizes = numel(value) // contracted, columns, contracted
        if is_fixed(x) and is_faster_as_convolution(sizes, matrix.dtype, torch.get_num_threads()):
            with self._graph.inserting_before(node):
                kernel = self._call(aten.view.default, weight, [columns, contracted, 1, 1])
            self.pack_convolution(as_convolution(node, x, kernel, bias))
            return
        # in bf16 oneDNN lays out otherwise for one row with AMX, which gains nothing: decoding and prefill share a copy
        how = packing("linear", torch.Size((columns, contracted)), matrix.dtype, max(2, sizes[0]))
        node.target = LINEAR
        bias = self._in_one_piece(bias, node)
        node.args, node.kwargs = (x, self._input(weight, matrix, how), bias, "none", [], ""), {}

    def pack_int8(self, node: fx.Node) -> None:
        """A product or a convolution of a value in uint8 and a weight in int8, as ``amp_fx.policy.scaled`` has them."""
        is_convolution = node.target is aten.conv2d.default
        if not (is_convolution or node.target is aten.linear.default) or not onednn_packs(torch.float32):
            return
        first, second, bias, *_ = (*args_of(node), None)
        value, weight = dequantised(first, "tensor"), dequantised(second, "channel")
        if value is None or weight is None:
            return
        x, scale, zero, *_ = args_of(value)
        data, scales, zeros, *_ = args_of(weight)
        if not self.derived.issuperset((data, scales, zeros)):
            return
        dtype, kernel = node.meta["val"].dtype, weight.meta["val"].shape
        with self._graph.inserting_before(node):
            # as oneDNN reads them: Inductor converts constants of a package, and warns
            zeros = self._call(aten.to.dtype, zeros, torch.int32)
        if bias in self.derived:
            # oneDNN wants it in fp32, and would convert it in each call
            with self._graph.inserting_before(node):
                bias = self._wide_source(bias)
        bias = self._in_one_piece(bias, node)
        if is_convolution:
            given = convolution_settings(node)
            window = [given[name] for name in ("stride", "padding", "dilation", "groups")]
            # where sizes are not known, oneDNN packs for any
            sizes = tuple(x.meta["val"].shape) if is_fixed(x) else None
            how = packing("convolution_int8", kernel, torch.int8, scale, zero, *window, sizes)
            node.target, after = convolution_int8_op(), (*window, dtype, is_channels_last(node))
        else:
            rows = max(1, numel(value.meta["val"]) // kernel[1])
            how = packing("linear_int8", kernel, torch.int8, (rows, kernel[1]))
            node.target, after = LINEAR_INT8, (1.0, 0, dtype, "none", [], "")
        packed = self._input(data, data.meta["val"], how)
        factors = (self._input(each, each.meta["val"]) for each in (scales, zeros))
        node.args = (x, scale, zero, packed, *factors, bias, *after)

    def pack_convolution(self, node: fx.Node) -> None:
        """A convolution over two or three dimensions."""
        if not convolves(node) or node.kwargs or not self._is_from_weights(node):
            return
        x, weight, bias, *_ = (*args_of(node), None)
        value, kernel = x.meta["val"], weight.meta["val"]
        if value.ndim != kernel.ndim or not self.packs(value, kernel):
            return
        given = convolution_settings(node)
        transposed, how = "output_padding" in given, None
        padding, stride, dilation, groups = (given[k] for k in ("padding", "stride", "dilation", "groups"))
        more = (given["output_padding"],) if transposed else ()
        if transposed and (groups > 1 or not is_fixed(x) or any(map(operator.ge, *more, stride))):
            return
        if is_fixed(x):
            kind, sizes = "transposed_convolution" if transposed else "convolution", tuple(value.shape)
            how = packing(kind, kernel.shape, kernel.dtype, padding, *more, stride, dilation, groups, sizes)
        packed, bias = self._input(weight, kernel, how), self._in_one_piece(bias, node)
        node.target = convolution_op()
        padded, last = given.get("output_padding", (0,) * len(stride)), is_channels_last(node)
        node.args = (x, packed, bias, stride, padding, dilation, transposed, padded, groups, last)

    def _in_one_piece(self, bias: fx.Node | None, reader: fx.Node) -> fx.Node | None:
        """A bias as oneDNN reads it, whatever its strides."""
        if bias is None or bias.meta["val"].is_contiguous():
            return bias
        add = self._call if bias in self.derived else self._work
        with self._graph.inserting_before(reader):
            return add(aten.clone.default, bias)

    def packs(self, value: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether oneDNN packs a weight that multiplies a value."""
        if weight.dtype is torch.float32 and weight.ndim == 2:
            # with one thread it takes less time for one row
            by_mkl = numel(value) == value.shape[-1] and torch.get_num_threads() == 1
            if not self._wide or (by_mkl and torch.backends.mkl.is_available()):
                return False
        return (
            value.device.type == "cpu"
            and value.dtype is weight.dtype
            and onednn_packs(weight.dtype)
            and numel(value) > 0
        )

    # ---- inputs

    def take_the_rest(self) -> None:
        """What the graph reads of derived values; views are left to it, and what it returns."""
        stays = set[fx.Node]()
        for node in reversed(list(self._graph.nodes)):
            if node not in self.derived or node.op == "placeholder":
                continue
            readers = [user for user in node.users if user not in self.derived or user in stays]
            if not readers:
                continue
            if is_view(node) or is_returned(node) or not isinstance(node.meta["val"], torch.Tensor):
                stays.add(node)
                continue
            given = self._input(node, node.meta["val"])
            self._read_instead += [(reader, node, given) for reader in readers]

    def _input(self, node: fx.Node, like: torch.Tensor, how: Packing | None = None) -> fx.Node:
        """A derived value as an input; a weight as it is stays one."""
        if how is None and (node.op == "placeholder" or is_view(node)):
            return node
        if (node, how) not in self._taken:
            kind, value = ("made", like.detach()) if how is None else ("packed", like.new_empty(how.shape))
            self._last = self._taken[node, how] = add_input(
                self._last, f"{node.name}_{kind}", value, stays=True
            )
        return self._taken[node, how]

    def finish(self) -> tuple[list[fx.Node], list[int], DerivedInputs]:
        """See :func:`pack`."""
        # first: what is derived may be computed through a view that stays
        weights, inputs = derivation(self._gm, list(self._taken))
        for reader, node, given in self._read_instead:
            reader.replace_input_with(node, given)
        for node in reversed(list(self._graph.nodes)):
            is_ours = node.op == "get_attr" or (node.op == "call_function" and node in self.derived)
            if is_ours and not node.users:
                self._graph.erase_node(node)
        self._gm.recompile()
        return [*self._taken.values()], [*map(self._programs.index, weights)], inputs
