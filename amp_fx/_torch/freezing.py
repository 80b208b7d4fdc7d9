"""Inductor's freezing: what it folds, and constants that become inputs again."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol
from unittest import mock

import torch
import torch.fx as fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Lifting", "observe_freezing", "packed_layout", "packed_memory"]

#: marks inputs that were packed constants
_LIFTED = "amp_fx_lifted"

#: of all elements of a frozen graph's constants, those that folding may add
_EXPANDED = 1 / 32


class Lifting(Protocol):
    """Which constants of a frozen graph are inputs of the compiled one instead, and what they are in each call."""

    def note_given(self, gm: fx.GraphModule) -> None:
        """Called before constants are folded; the first time, they are those that the graph was given."""

    def note(self, gm: fx.GraphModule, node: fx.Node, constant: torch.Tensor) -> None:
        """Called before a node of a graph is replaced by a constant."""

    def choose(self, gm: fx.GraphModule) -> Sequence[Sequence[fx.Node]]:
        """The ``get_attr`` nodes of each of these constants; asked once for each frozen graph."""
        ...

    @property
    def values(self) -> Callable[[], Sequence[torch.Tensor]]:
        """Returns the constants of the call that is going on in this thread. Kept as long as the compiled graph."""
        ...


class _Current(threading.local):
    """What this thread freezes."""

    lifting: Lifting | None = None
    #: inputs of the graph that were packed constants, and what stands for these
    lifted: Mapping[str, torch.Tensor] = {}


class _Patches:
    """What is replaced in Inductor while any thread freezes a graph; for the other threads, all is as it was."""

    def __init__(self) -> None:
        # held while attributes of modules are set, and while nothing else runs
        self._lock = threading.Lock()
        self._count = 0
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> None:
        # imported by now, so that nothing is while the lock is held
        from torch._inductor import compile_fx, freezing
        from torch._inductor.graph import GraphLowering

        with self._lock:
            self._count += 1
            if self._count == 1:
                for owner, name, replacement in (
                    (freezing, "constant_fold", _folding(freezing.constant_fold)),
                    (compile_fx, "fw_compiler_freezing", _lifting(compile_fx.fw_compiler_freezing)),
                    (GraphLowering, "placeholder", _lowering(GraphLowering.placeholder)),
                ):
                    self._undo.enter_context(mock.patch.object(owner, name, replacement))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._undo.close()


_current = _Current()
_patches = _Patches()


@contextlib.contextmanager
def observe_freezing(lifting: Lifting) -> Iterator[None]:
    """Tells what Inductor's freezing computes in this thread inside the block, and lifts constants.

    What has more elements than what it is computed from, as embeddings that are expanded to a batch, is folded up to
    :data:`_EXPANDED` of all elements: each batch size has constants of its own.
    """
    with _patches:
        before, _current.lifting = _current.lifting, lifting
        try:
            yield
        finally:
            _current.lifting = before


def _folding(fold: Callable[..., None]) -> Callable[..., None]:
    """In the place of ``freezing.constant_fold``."""

    def constant_fold(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        if _current.lifting is None:
            fold(gm, *args, **kwargs)
        else:
            _current.lifting.note_given(gm)
            _pack_by_onednn(gm)
            with _disable_current_modes():
                _fold(gm, _current.lifting)

    return constant_fold


def _fold(gm: fx.GraphModule, lifting: Lifting) -> None:
    """Replaces by constants what follows from constants."""
    from torch._inductor.constant_folding import ConstantFolder, replace_node_with_constant

    class Folder(ConstantFolder):
        def __init__(self) -> None:
            super().__init__(gm, skip_constructors=True)
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

    folder = Folder()
    folder.run()
    for node, constant in folder.node_replacements.items():
        lifting.note(gm, node, constant)
        replace_node_with_constant(gm, node, constant)
    unread = [node for node in gm.graph.find_nodes(op="get_attr") if not node.users]
    for node in unread:
        gm.graph.erase_node(node)
    for name in {str(node.target) for node in unread} - _read_attributes(gm):
        delattr(gm, name)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _read_attributes(gm: fx.GraphModule) -> set[str]:
    return {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}


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


def _lifting(compile_frozen: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of ``compile_fx.fw_compiler_freezing``."""

    def fw_compiler_freezing(*args: Any, inner_compile: Callable[..., Any], **kwargs: Any) -> Any:
        if _current.lifting is not None:
            inner_compile = _lifted(inner_compile, _current.lifting)
        return compile_frozen(*args, inner_compile=inner_compile, **kwargs)

    return fw_compiler_freezing


def _lowering(lower: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of ``GraphLowering.placeholder``.

    Inputs that were constants still count as such where Inductor lowers oneDNN's calls. It asserts that packed weights
    are constants, and reads them only to tune kernels.
    """

    def placeholder(self: Any, target: Any, *args: Any) -> Any:
        if target in _current.lifted:
            self.constants[target] = _current.lifted[target]
        return lower(self, target, *args)

    return placeholder


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
    before = _current.lifted
    _current.lifted = {
        node.name: torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device="meta")
        for node in gm.graph.find_nodes(op="placeholder")
        if node.meta.get(_LIFTED)
    }
    try:
        yield
    finally:
        _current.lifted = before


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


def packed_layout(constant: torch.Tensor) -> bytes:
    """How oneDNN has laid out a tensor that it has packed."""
    # while a graph is compiled, modes are on that run ops on fake values
    with _disable_current_modes():
        return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(constant).numpy())
