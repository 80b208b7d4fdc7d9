"""Inductor's freezing: what it folds, and constants that become inputs again."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from unittest import mock

import torch
import torch.fx as fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["Lifting", "observe_freezing", "packed_memory"]

_freezing = threading.RLock()


#: marks inputs that were packed constants
_LIFTED = "amp_fx_lifted"


#: of all elements of a frozen graph's constants, those that folding may add
_EXPANDED = 1 / 32


class Lifting(Protocol):
    """Which constants of a frozen graph are inputs of the compiled one instead, and what they are in each call."""

    def choose(self, gm: fx.GraphModule) -> Sequence[Sequence[fx.Node]]:
        """The ``get_attr`` nodes of each of these constants."""
        ...

    @property
    def values(self) -> Callable[[], Sequence[torch.Tensor]]:
        """Returns the constants of the call that is going on in this thread. Kept as long as the compiled graph."""
        ...


@contextlib.contextmanager
def observe_freezing(
    folded: Callable[[fx.GraphModule, fx.Node, torch.Tensor], None], lifting: Lifting
) -> Iterator[None]:
    """Tells what Inductor's freezing computes inside the block, in whichever thread, and lifts constants.

    What has more elements than what it is computed from, as embeddings that are expanded to a batch, is folded up to
    :data:`_EXPANDED` of all elements: each batch size has constants of its own.

    Args:
        folded: called before a node of a graph is replaced by a constant, with the graph, the node and the constant.
        lifting: is asked once for each frozen graph.
    """
    from torch._inductor import compile_fx, constant_folding, freezing

    # what is replaced is put back at the end, so blocks of two threads must not overlap
    with _freezing:
        replace = constant_folding.replace_node_with_constant
        fold = freezing.constant_fold
        compile_frozen = compile_fx.fw_compiler_freezing

        def replace_node_with_constant(
            gm: fx.GraphModule, node: fx.Node, constant: torch.Tensor | None = None, name: str | None = None
        ) -> None:
            if constant is not None:
                folded(gm, node, constant)
            replace(gm, node, constant, name)

        def constant_fold(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> None:
            _pack_by_onednn(gm)
            fold(gm, *args, **kwargs)

        def fw_compiler_freezing(*args: Any, inner_compile: Callable[..., Any], **kwargs: Any) -> Any:
            return compile_frozen(*args, inner_compile=_lifted(inner_compile, lifting), **kwargs)

        class Folder(constant_folding.ConstantFolder):
            def __init__(self, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> None:
                super().__init__(gm, *args, **kwargs)
                self._at: fx.Node | None = None
                self._sources: dict[fx.Node, frozenset[fx.Node]] = {}
                self._left = sum(map(self._elements, gm.graph.find_nodes(op="get_attr"))) * _EXPANDED

            def run_node(self, node: fx.Node) -> Any:
                inputs = [self._sources.get(arg, frozenset()) for arg in node.all_input_nodes]
                self._sources[node] = frozenset({node} if node.op == "get_attr" else ()).union(*inputs)
                self._at = node
                return super().run_node(node)

            def insertable_tensor_check(self, tensor: torch.Tensor) -> bool:
                if self._at is None:
                    raise AssertionError("asked between two nodes")
                if tensor.is_mkldnn:
                    # a graph cannot pack in a call: these ops do not run on fake values
                    return True
                more = tensor.numel() - sum(map(self._elements, self._sources[self._at]))
                if more > self._left:
                    return False
                self._left -= max(more, 0)
                return True

            def _elements(self, node: fx.Node) -> int:
                value = self.fetch_attr(str(node.target))
                return value.numel() if isinstance(value, torch.Tensor) else 0

        with (
            mock.patch.object(constant_folding, "ConstantFolder", Folder),
            mock.patch.object(constant_folding, "replace_node_with_constant", replace_node_with_constant),
            mock.patch.object(freezing, "replace_node_with_constant", replace_node_with_constant),
            mock.patch.object(freezing, "constant_fold", constant_fold),
            mock.patch.object(compile_fx, "fw_compiler_freezing", fw_compiler_freezing),
        ):
            yield


def _pack_by_onednn(gm: fx.GraphModule) -> None:
    """Has oneDNN pack the fp32 weights of linears that Inductor would have MKL pack.

    MKL takes eight megabytes for each, however small, and packs anew for each batch size. Where the batch size is not
    known Inductor packs by oneDNN, too.
    """
    mkldnn = torch.ops.mkldnn
    for node in gm.graph.nodes:
        # not there if torch is built without MKL
        if str(node.target) == "mkl._mkl_reorder_linear_weight":
            node.target = mkldnn._reorder_linear_weight.default
        elif str(node.target) == "mkl._mkl_linear":
            x, packed, _, bias, _ = node.args
            node.target, node.args = mkldnn._linear_pointwise.default, (x, packed, bias, "none", [], "")


def _lifted(inner_compile: Callable[..., Any], lifting: Lifting) -> Callable[..., Any]:
    """An ``inner_compile`` whose result gets the chosen constants as inputs, after all others."""
    from torch._inductor import config

    def compile_lifted(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        chosen = lifting.choose(gm)
        if not chosen:
            return inner_compile(gm, example_inputs, **kwargs)
        with detect_fake_mode(example_inputs) or FakeTensorMode():
            examples = [*example_inputs, *(_lift(gm, nodes) for nodes in chosen)]
        static = [*kwargs.pop("static_input_idxs", ()), *range(len(example_inputs), len(examples))]
        # tensors that oneDNN has packed have no strides
        with config.patch(size_asserts=False), _constant_to_lowerings(gm):
            compiled = inner_compile(gm, examples, static_input_idxs=static, **kwargs)
        values = lifting.values

        def run(args: list[Any]) -> Any:
            args.extend(values())
            return compiled(args)

        return run

    return compile_lifted


@contextlib.contextmanager
def _constant_to_lowerings(gm: fx.GraphModule) -> Iterator[None]:
    """Inputs of this graph that were constants still count as such where Inductor lowers oneDNN's calls.

    It asserts that packed weights are constants, and reads them only to tune kernels.
    """
    from torch._inductor.graph import GraphLowering

    lifted = {
        node.name: torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device="meta")
        for node in gm.graph.find_nodes(op="placeholder")
        if node.meta.get(_LIFTED)
    }
    lower = GraphLowering.placeholder

    def placeholder(self: Any, target: Any, *args: Any) -> Any:
        if target in lifted:
            self.constants[target] = lifted[target]
        return lower(self, target, *args)

    with mock.patch.object(GraphLowering, "placeholder", placeholder):
        yield


def _lift(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> torch.Tensor:
    """Makes one input of some nodes with the same constant; returns its value, under a fake mode a fake one."""
    first = nodes[0]
    constant: torch.Tensor = operator.attrgetter(str(first.target))(gm)
    value = torch.empty(constant.shape, dtype=constant.dtype, device=constant.device)
    # what is packed has no strides, and whoever reads it does not ask for them
    if not constant.is_mkldnn:
        value = torch.empty_strided(
            constant.shape, constant.stride(), dtype=constant.dtype, device=constant.device
        )
    inputs = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(inputs[-1]) if inputs else gm.graph.inserting_before():
        lifted = gm.graph.placeholder(f"{first.name}_lifted")
    lifted.meta = {**first.meta, "val": value, _LIFTED: constant.is_mkldnn}
    for node in nodes:
        node.replace_all_uses_with(lifted)
        gm.graph.erase_node(node)
    gm.recompile()
    return value


def packed_memory(constant: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor that oneDNN has packed."""
    return int(torch.ops.mkldnn.data_ptr(constant)), int(torch.ops.mkldnn._nbytes(constant))
