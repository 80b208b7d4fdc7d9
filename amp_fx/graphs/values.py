"""Tensors of a graph: which may be re-typed, how large they are, on which device, and which share a storage."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, TypeGuard

import torch
import torch.fx as fx
from torch.utils._pytree import tree_leaves

from amp_fx._torch import FakeTensor, OpOverload, is_hidden_call, size_hint
from amp_fx.graphs.calls import (
    argument_value,
    is_gradient_call,
    is_layout,
    target_name,
    tensor_arguments,
)
from amp_fx.graphs.traits import op_row
from amp_fx.precision.policy.table import DEVICES

#: dtypes that amp_fx places; fp8 and fp64 are the program's own business
LOW_DTYPES = (torch.bfloat16, torch.float16)
PLACED_DTYPES = (torch.float32, *LOW_DTYPES)
#: namespaces of ops whose schemas and tags say all that a result depends on
KNOWN_NAMESPACES = ("aten", "prims", "quantized_decomposed", "amp_fx")


def tensors(value: Any) -> list[torch.Tensor]:
    """Tensors inside a nested value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_eligible(value: Any) -> TypeGuard[torch.Tensor]:
    """True for a tensor that mixed precision may re-type: plain, strided, fp32, bf16 or fp16.

    The rule of ``is_eligible`` in ``ATen/autocast_mode.h`` (floating, not fp64), without tensor subclasses,
    which choose their own storage.
    """
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in PLACED_DTYPES
        and value.layout is torch.strided
        and type(value) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
    )


def numel(value: torch.Tensor) -> int:
    """Number of elements; symbolic sizes count with the hint they were traced with."""
    return math.prod(size_hint(size) for size in value.shape)


def dtypes_and_sizes(node: fx.Node) -> list[tuple[torch.dtype, list[int]]]:
    """Dtype and sizes of each tensor in a node's value. Symbolic sizes are the trace's numbers; no guard is set."""
    return [(value.dtype, [*map(size_hint, value.shape)]) for value in tensors(node.meta.get("val"))]


def cast_bytes(value: torch.Tensor, to: torch.dtype) -> int:
    """Bytes a cast of ``value`` reads and writes when it is a kernel of its own."""
    return numel(value) * (value.dtype.itemsize + to.itemsize)


# ---- devices. PyTorch lets a 0-d CPU tensor take part in what runs on any device, as a number does; it says nothing
# about where the arithmetic is.


def program_device(program: Any, given: Any) -> str:
    """The first type of device, other than the CPU, of what a call is given and of the weights of a module."""
    weights = (program.parameters(), program.buffers()) if isinstance(program, torch.nn.Module) else ()
    devices = (value.device.type for value in itertools.chain(tensors(given), *weights))
    return next((name for name in devices if name != "cpu"), "cpu")


def graph_devices(gm: fx.GraphModule) -> frozenset[str]:
    """Device types of the tensors in a Dynamo or captured graph; 0-d CPU tensors only if there is nothing else."""
    values = [value for node in gm.graph.nodes for value in _values(node)]
    placed = [value for value in values if not _is_number(value)]
    return frozenset(value.device.type for value in placed or values)


def listed_devices(gm: fx.GraphModule) -> frozenset[str]:
    """The devices of a graph that have op lists."""
    return graph_devices(gm).intersection(DEVICES)


def graph_device(gm: fx.GraphModule, among: Collection[str]) -> str:
    """The one of these device types on which a graph's calls compute the most elements; ``"cpu"`` if there is none."""
    elements: Counter[str] = Counter()
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            for value in _values(node):
                if value.is_floating_point():
                    elements[value.device.type] += numel(value)
    return max(among, key=lambda device: (elements[device], device != "cpu", device), default="cpu")


def call_device(values: Sequence[torch.Tensor], among: Collection[str]) -> str | None:
    """The one of these device types that a call computes on, by the values that it takes and returns; or None."""
    found = [value for value in values if value.device.type in among]
    placed = [value for value in found if not _is_number(value)]
    return next((value.device.type for value in placed or found), None)


def _values(node: fx.Node) -> list[torch.Tensor]:
    value: Any = node.meta.get("val", node.meta.get("example_value"))
    return tensors(value)


def _is_number(value: torch.Tensor) -> bool:
    return value.ndim == 0 and value.device.type == "cpu"


#: of kernels that torch brings along
_LIBRARIES = ("mkldnn", "onednn", "quantized")
#: of ATen's calls what raises by the numbers that it is given, beside all of linear algebra
_RAISING = (
    "_assert_async", "bernoulli", "bincount", "cholesky", "cholesky_inverse", "ctc_loss", "geqrf", "inverse", "logdet",
    "lu_solve", "lu_unpack", "multinomial", "normal", "pinverse", "qr", "slogdet", "svd", "triangular_solve",
)  # fmt: skip
#: of linear algebra what multiplies and adds
_SUMMING = ("cross", "diagonal", "matmul", "multi_dot", "norm", "vecdot", "vector_norm")


def raises(node: fx.Node) -> bool:
    """True for a call that may raise an error of its own kind: another library's op, or one that looks at numbers."""
    if node.op not in ("call_function", "call_method"):
        return False
    packet = getattr(node.target, "overloadpacket", node.target)
    namespace, _, name = getattr(packet, "_qualified_op_name", f"aten::{target_name(node)}").partition("::")
    is_algebra = name.startswith("linalg_") and name.removeprefix("linalg_") not in _SUMMING
    return namespace not in (*KNOWN_NAMESPACES, *_LIBRARIES) or is_algebra or name in _RAISING


# ---- storages


def storage_of(node: fx.Node) -> int | None:
    """An identity for the one storage behind the node's value; equal for views of each other.

    ``chunk`` and its kin return several views of one storage, and have it too. None for values without a
    storage, or with several.
    """
    values = tensors(node.meta.get("val"))
    if not all(isinstance(value, FakeTensor) and value.layout is torch.strided for value in values):
        return None
    keys = {value.untyped_storage()._cdata for value in values}
    return keys.pop() if len(keys) == 1 else None


def is_view(node: fx.Node) -> bool:
    """True where the value is a view of the node's first argument, or one of its results."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if getattr(node.target, "__name__", "") == "getitem":
        return True
    key = storage_of(node)
    return key is not None and key == storage_of(node.all_input_nodes[0])


def written_arguments(node: fx.Node) -> list[tuple[str, fx.Node]]:
    """Arguments that the node writes to or, as ``batch_norm`` for evaluation, would write to; by name."""
    if not isinstance(node.target, OpOverload):
        return []
    names = {a.name for a in node.target._schema.arguments if a.alias_info and a.alias_info.is_write}
    names.update(op_row(node).writes)
    return [slot for slot in tensor_arguments(node) if slot[0] in names]


def in_place_target(node: fx.Node) -> fx.Node | None:
    """The value that an in-place op (``add_``) writes to and returns; None for other ops.

    ``batch_norm`` is none, though its schema is mutable for the running statistics' sake.
    """
    op = node.target
    if not isinstance(op, OpOverload) or not op._schema.is_mutable or not op._schema.name.endswith("_"):
        return None
    return written_arguments(node)[0][1]


def storages_written_in(graph: fx.Graph) -> frozenset[int]:
    """Storages that any node of a graph writes to."""
    return frozenset(writers_in(graph))


def writers_in(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """Storage -> the nodes of a graph that write to it, in order."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for key in written_storages(node):
            found.setdefault(key, []).append(node)
    return found


def sources_in(graph: fx.Graph) -> dict[fx.Node, dict[fx.Node, list[fx.Node]]]:
    """Node -> its inputs -> where the numbers in each come from: itself, and the calls that wrote to its storage."""
    writers: dict[int | None, list[fx.Node]] = {}
    found: dict[fx.Node, dict[fx.Node, list[fx.Node]]] = {}
    for node in graph.nodes:
        found[node] = {each: [each, *writers.get(storage_of(each), ())] for each in node.all_input_nodes}
        for key in written_storages(node):
            writers.setdefault(key, []).append(node)
    return found


def writes_to_shared_inputs(graph: fx.Graph) -> bool:
    """True where two inputs share a storage that is written to."""
    shared = Counter(map(storage_of, graph.find_nodes(op="placeholder")))
    return any(shared[key] > 1 for key in storages_written_in(graph))


def written_storages(node: fx.Node) -> set[int]:
    """Storages the node writes to. A call whose effects are unknown counts as writing to all it is given.

    So does one whose body writes to what the body is given.
    """
    if node.op not in ("call_function", "call_method"):
        return set()
    if isinstance(node.target, OpOverload):
        switch = op_row(node).writes_if
        only_reads = switch and not argument_value(node, switch)
        sources = [] if only_reads else [source for _, source in written_arguments(node)]
    else:
        computes_numbers = getattr(node.target, "__module__", "") in ("_operator", "operator", "math")
        is_known = is_gradient_call(node) or is_layout(node) or is_hidden_call(node.target)
        only_reads = computes_numbers or is_known or _bodies_only_read(node)
        sources = [] if only_reads else node.all_input_nodes
    return {key for source in sources if (key := storage_of(source)) is not None}


def _bodies_only_read(node: fx.Node) -> bool:
    """True for a call with captured bodies that do not write to what they are given."""
    attributes = [source.target for source in node.all_input_nodes if source.op == "get_attr"]
    values = [getattr(node.graph.owning_module, str(name), None) for name in attributes]
    bodies = [value.graph for value in values if isinstance(value, fx.GraphModule)]
    inputs = [given for body in bodies for given in body.find_nodes(op="placeholder")]
    # a body that was not captured has no fake values
    is_known = bool(bodies) and all("val" in given.meta for given in inputs)
    written = frozenset[int]().union(*map(storages_written_in, bodies)) if is_known else ()
    return is_known and not any(storage_of(given) in written for given in inputs)


def is_fixed(node: fx.Node) -> bool:
    """True for tensors of known sizes."""
    values = tensors(node.meta.get("val"))
    return bool(values) and all(isinstance(size, int) for value in values for size in value.shape)


def is_pure(node: fx.Node) -> bool:
    """True where a value follows from arguments alone, in a call that may as well run elsewhere.

    What other libraries' ops depend on is not known: one may read a setting, draw numbers, or ask other processes.
    """
    if node.op != "call_function" or not is_fixed(node):
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target.namespace not in KNOWN_NAMESPACES:
        return False
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags
