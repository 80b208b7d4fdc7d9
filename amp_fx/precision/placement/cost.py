"""The cost of a placement: one model, one unit (picoseconds), for ``place`` and for reports.

The model's beliefs about Inductor, which ``tests/fake/placement/test_cost.py`` holds against the bytes Inductor counts:

* A matmul, convolution or attention is a kernel of its own (*external*): it reads its operands from memory
  and writes its result. Everything else *fuses* with what feeds it, unless an external kernel stands between
  the two.
* A value reaches memory only where its reader cannot fuse with it. A cast fused into a pointwise producer or
  consumer costs nothing, nor does its gradient's (on CUDA by ``passes/inductor/casts.py``); between two
  external kernels, or between a graph input and one, it is a kernel that reads and writes the whole value.
* Views move nothing, and fuse where what they look at does. A cast behind a view handles the view's elements,
  not its base's.
* Training doubles every byte, for gradients take the way back, and triples a matmul's arithmetic. On CUDA the gradient
  of an input of the graph is an exception: a matmul returns a weight's in fp32, a bias's is widened by the kernel that
  adds it up, several are widened where they are added. Only a convolution and attention leave one to be widened.

Sizes are in elements, traffic in bytes, time in picoseconds; symbolic sizes count with the hint they were
traced with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.utils._pytree import tree_map_only

from amp_fx._torch import OpOverload, size_hint
from amp_fx.graphs.calls import arguments, is_layout, is_parameter, values_read
from amp_fx.graphs.fake_runs import fake_arguments, matmul_flops
from amp_fx.graphs.traits import Trait, has_trait, op_row
from amp_fx.graphs.values import in_place_target, is_eligible, is_view, numel
from amp_fx.precision.placement.attention import PAYS, operands, refusal, single_query
from amp_fx.precision.placement.convolutions import convolution_times
from amp_fx.precision.placement.gpus import NOMINAL
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.label import label_of
from amp_fx.precision.plans.plan import dtype_name
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.table import device_row

#: elements of a weight below which a library call to lay it out costs as much as its copy saves
_WORTH_A_CALL = 2**15


@dataclass
class CostModel:
    """Costs of one captured and classified graph; without a profile, bytes alone are compared."""

    graph: fx.Graph
    profile: DeviceProfile | None
    training: bool
    #: names of inputs whose casts are made once and stored, and of what widens an input that is stored low
    folded: frozenset[str] = frozenset()
    #: attention may be written as products; False in a program that is stored, for any runtime
    writes_attention: bool = True
    #: calls may be timed: the graph runs on this machine
    times_calls: bool = False

    def __post_init__(self) -> None:
        self._stored: dict[fx.Node, bool] = {}
        self._level: dict[fx.Node, int] = {}
        self._reads_memory: dict[fx.Node, bool] = {}
        #: operations of a call, by op, shapes and settings
        self._flops: dict[str, int] = {}
        #: seconds in fp32 and low of what was timed, by the low dtype
        self._timed: dict[torch.dtype, dict[fx.Node, tuple[float, float]]] = {}
        # a write in place is computed like any other result, and is fused
        self._views = {node for node in self.graph.nodes if is_view(node) and in_place_target(node) is None}
        for node in self.graph.nodes:
            base = node.all_input_nodes[0] if node in self._views else None
            in_memory = self.is_external(node) or self.is_input(node)
            self._stored[node] = in_memory if base is None else self._stored[base]
            levels = [self._level[source] + self.is_external(source) for source in values_read(node)]
            # inputs, and views of them, lie before the first kernel
            floor = -1 if self.is_input(node) or self.is_view(node) else 0
            self._level[node] = max([floor, *levels])
        # backwards, so that a view knows its readers
        for node in reversed(self.graph.nodes):
            if self.is_view(node):
                self._reads_memory[node] = any(self.reads_memory(user, node) for user in node.users)

    def is_external(self, node: fx.Node) -> bool:
        """True for calls that Inductor does not fuse with their neighbours."""
        label = label_of(node)
        if self.is_input(node):
            return False
        if label is None or label.op_class is OpClass.LOW or is_layout(node):
            return True
        return label.op_class is OpClass.KEEP and not isinstance(node.target, OpOverload)

    def is_stored(self, node: fx.Node) -> bool:
        """True for what is in memory whoever reads it: inputs, external results, views of either."""
        return self._stored[node]

    def is_input(self, node: fx.Node) -> bool:
        """True for values that are in memory before the graph runs."""
        return node.op in ("placeholder", "get_attr") or node.name in self.folded

    def is_view(self, node: fx.Node) -> bool:
        """True where the value looks into the storage of its first argument, or is one of its results."""
        return node in self._views

    def reads_memory(self, reader: fx.Node, value: fx.Node) -> bool:
        """True where the reader finds the value in memory, False where the two are one kernel."""
        if self.is_view(reader):
            return self.is_stored(value) and self._reads_memory[reader]
        return self.is_external(reader) or self._level[reader] > self._level[value]

    def accumulates_backward(self, node: fx.Node) -> bool:
        """True where the gradient adds up repeated elements, or those of other processes, in the dtype of the value.

        Moving the cast in front of such a call would sum gradients in 16 bits, which autocast does not.
        """
        return self.training and (has_trait(node, Trait.LOOKUP) or is_layout(node))

    def saves_input(self, reader: fx.Node) -> bool:
        """True where the backward of ``reader`` needs the value it reads, so that it is kept in memory."""
        label = label_of(reader)
        computes = label is not None and label.op_class not in (OpClass.FOLLOW, OpClass.KEEP)
        return self.training and computes and not has_trait(reader, Trait.LINEAR)

    def traffic(self, node: fx.Node, itemsize: int) -> int:
        """Time to read or write the value once at ``itemsize`` bytes an element."""
        return self._time(numel(node.meta["val"]) * itemsize * (2 if self.training else 1))

    def cast_bytes(self, node: fx.Node, low: torch.dtype) -> int:
        """Bytes that a cast of the value between fp32 and the low dtype reads and writes."""
        return numel(node.meta["val"]) * (torch.float32.itemsize + low.itemsize)

    def read(self, reader: fx.Node, value: fx.Node, itemsize: int) -> int:
        """Time for ``reader`` to read the value: all of it, or what a lookup picks."""
        picks = has_trait(reader, Trait.LOOKUP) and is_eligible(reader.meta.get("val"))
        if self._has_wide_gradient(value):
            return self._time(numel(value.meta["val"]) * (itemsize + torch.float32.itemsize))
        return self.traffic(reader if picks else value, itemsize)

    def cast_kernel(self, node: fx.Node, low: torch.dtype) -> int:
        """Time of a stand-alone cast of the value between fp32 and the low dtype, either way, and of its gradient."""
        readers = self._readers(node)
        if _fuses_casts(node) and readers and all(_is_convolution(r) and _is_bias(r, v) for r, v in readers):
            # Inductor adds it to the result, and the cast is part of that kernel
            return 0
        launch = 0 if self.profile is None else round(self.profile.launch * 1e12)
        kernels = 2 if self.training and self._has_gradient_kernel(node) else 1
        return self._time(self.cast_bytes(node, low) * kernels) + launch * kernels

    def _has_gradient_kernel(self, value: fx.Node) -> bool:
        """True where the backward of a cast of the value is a kernel that only casts."""
        base = value
        while self.is_view(base):
            base = base.all_input_nodes[0]
        if not _fuses_casts(value) or not self.is_input(base):
            return True
        if len(self._readers(base)) != 1:
            # several gradients are added, and cast by the kernel that does it
            return False
        # a library kernel leaves 16 bits, but for products and sums
        [(reader, read)] = self._readers(base)
        adds_up_wide = has_trait(reader, Trait.WIDE_GRADIENT) or _is_bias(reader, read)
        return self.is_external(reader) and not adds_up_wide

    def _readers(self, value: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """The readers of a value, each with the view that it reads."""
        return [
            found
            for user in value.users
            for found in (self._readers(user) if self.is_view(user) else [(user, value)])
        ]

    def _has_wide_gradient(self, value: fx.Node) -> bool:
        """True for a weight whose gradient leaves a matmul in fp32, whatever the matmul multiplies.

        Where one matmul alone reads the weight: several gradients would be added up in the low dtype first.
        """
        if not self.training or len(value.users) != 1:
            return False
        (reader,), base, tensor = value.users, value, value.meta["val"]
        if _matrix(reader) is not value:
            return False
        while has_trait(base, Trait.RESHAPES) and len(base.users) == 1:
            base = base.all_input_nodes[0]
        is_weight = is_parameter(base) and len(base.users) == 1 and tensor.ndim == 2
        return is_weight and device_row(tensor.device.type).wide_results

    def arithmetic(self, node: fx.Node, low: torch.dtype) -> tuple[int, int] | None:
        """Time of a matmul-like op in (fp32, low); None without a profile or a formula for the op."""
        if self.profile is None or dtype_name(low) not in self.profile.peak:
            return None
        flops, peak = self._operations(node, low), self.profile.peak
        if not flops:
            return None
        if (timed := self.timed(low).get(node)) is not None:
            return round(1e12 * timed[0]), round(1e12 * timed[1])
        high, fast = (round(1e12 * (flops / peak[name])) for name in ("float32", dtype_name(low)))
        is_attention = node.target is torch.ops.aten.scaled_dot_product_attention.default
        # as in decoding
        is_single = is_attention and size_hint(operands(node)[0].shape[-2]) == 1
        times = single_query(self.profile) if is_single else None
        if times is not None:
            wide, products, kernel = (round(1e12 * numel(operands(node)[1]) * each) for each in times)
            written = self.writes_attention and not refusal(node, training=self.training)
            high, fast = wide, products if written and products < PAYS * kernel else kernel
        return high + self._packing(node), fast

    def timed(self, low: torch.dtype) -> dict[fx.Node, tuple[float, float]]:
        """Seconds in fp32 and in the low dtype of the calls that were timed on this machine."""
        if self.profile is None or self.profile.device_type != "cpu" or self.training or not self.times_calls:
            return {}
        if low not in self._timed:
            self._timed[low] = convolution_times(self.graph, self.profile, low, self.folded)
        return self._timed[low]

    def nominal_arithmetic(self, node: fx.Node, low: torch.dtype) -> tuple[int, int]:
        """The cost of a matmul-like op in (fp32, low) without a profile: bytes that a nominal GPU moves meanwhile."""
        flops = self._operations(node, low)
        high, fast = (round(flops / NOMINAL.flops_a_byte(name)) for name in ("float32", dtype_name(low)))
        return high, fast

    def _operations(self, node: fx.Node, low: torch.dtype) -> int:
        """Floating-point operations of a call and of its backward; 0 without a formula."""
        # repeated layers have the same shapes, and asking torch for a formula takes a millisecond
        args, kwargs, _ = fake_arguments(node)
        call = repr(
            (node.target, tree_map_only(torch.Tensor, lambda value: tuple(value.shape), (args, kwargs)))
        )
        if call not in self._flops:
            self._flops[call] = matmul_flops(node, low)
        return self._flops[call] * (3 if self.training else 1)

    def _packing(self, node: fx.Node) -> int:
        """Time in which an fp32 kernel copies its weight, and a low one does not.

        Matmuls: BLAS writes panels to memory and reads them again, from two rows on; oneDNN's low kernels keep their
        blocks in the cache. Measured with MKL, 2048 x 2048: 1 row takes 0.8 ms, 2 to 16 rows take 1.6 ms.
        Convolutions: weights are laid out channels last, by the casts for a low kernel
        (``amp_fx/_torch/layout.py``).
        """
        weight = node.args[1] if _is_convolution(node) else _matrix(node)
        packs = self.profile is not None and device_row(self.profile.device_type).packs_weights
        if not packs or not isinstance(weight, fx.Node):
            return 0
        if _is_convolution(node):
            is_copied = is_relaid(weight.meta["val"])
        else:
            value = node.meta["val"]
            rows = numel(value) // max(1, size_hint(value.shape[-1]))
            is_copied = weight.meta["val"].ndim == 2 and rows != 1
        return self.traffic(weight, 2 * torch.float32.itemsize) if is_copied else 0

    def _time(self, nbytes: int) -> int:
        # without a profile only bytes are compared: a byte is one unit
        return nbytes if self.profile is None else round(nbytes / self.profile.bandwidth * 1e12)


def _matrix(node: fx.Node) -> object:
    """The matrix that a call multiplies rows by; None for other calls."""
    form = op_row(node).linear
    return None if form is None or form.weight >= len(node.args) else node.args[form.weight]


def _fuses_casts(value: fx.Node) -> bool:
    return device_row(value.meta["val"].device.type).fuses_casts


def _is_bias(reader: fx.Node, value: fx.Node) -> bool:
    return any(name == "bias" and argument is value for name, argument in arguments(reader))


def _is_convolution(node: fx.Node) -> bool:
    """True for calls that Inductor lays out channels last; the second argument is the weight."""
    return has_trait(node, Trait.PLANAR_CONVOLUTION)


def is_relaid(weight: torch.Tensor) -> bool:
    """True for a convolution's weight on a CPU whose conversion to or from channels last is worth a library call."""
    return (
        weight.device.type == "cpu"
        and weight.ndim == 4
        and all(isinstance(size, int) for size in weight.shape)
        and weight.numel() >= _WORTH_A_CALL
        and weight.is_contiguous()
        # as with kernels of 1 x 1 and one channel per group
        and not weight.is_contiguous(memory_format=torch.channels_last)
    )
