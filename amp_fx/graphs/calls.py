"""Calls: their arguments by name, what the graph says about gradients, and where they are in the user's program."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import OpOverload, is_hidden_call
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.runtime.state import cache_results


def arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """The node's arguments with their schema names, positional ones first."""
    if isinstance(node.target, OpOverload):
        names = [argument.name for argument in node.target._schema.arguments]
    else:
        names = [str(index) for index in range(len(node.args))]
    yield from zip(names, node.args, strict=False)
    yield from node.kwargs.items()


def argument_value(node: fx.Node, name: str) -> Any:
    """The argument called ``name``, or None where the program leaves it out."""
    return next((value for given, value in arguments(node) if given == name), None)


def args_of(node: fx.Node) -> Any:
    """Its arguments, of types that its target implies."""
    return node.args


_TENSORS = ("input", "weight", "bias")
_aten = torch.ops.aten
#: convolutions whose arguments say how much is padded
CONVOLUTIONS = {_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default}
CONVOLUTIONS |= {_aten.conv_transpose2d.input, _aten.conv_transpose3d.input}


def base_name(node: fx.Node) -> str:
    """``"add"`` for ``aten.add.Tensor`` and ``aten.add_.Tensor``."""
    if not isinstance(node.target, OpOverload):
        return ""
    return node.target._schema.name.removeprefix("aten::").removesuffix("_")


def convolves(node: fx.Node) -> bool:
    """True for such a convolution."""
    return node.target in CONVOLUTIONS


def is_channels_last(node: fx.Node) -> bool:
    """True where the channels of a convolution's result lie next to each other."""
    # a product of sizes that are not known is no 1
    channels, *_, columns = node.meta["val"].stride()[1:]
    return isinstance(channels, int) and channels == 1 and not (isinstance(columns, int) and columns == 1)


def convolution_settings(node: fx.Node) -> dict[str, Any]:
    """The arguments of a convolution besides tensors, sizes for each dimension."""
    dims = argument_value(node, "weight").meta["val"].ndim - 2
    schema: Any = node.target
    given = {each.name: each.default_value for each in schema._schema.arguments} | dict(arguments(node))

    def spread(value: Any) -> tuple[int, ...]:
        values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        return values if len(values) == dims else values * dims

    names = [name for name in given if name not in _TENSORS]
    return {name: given[name] if name == "groups" else spread(given[name]) for name in names}


def add_input(
    after: fx.Node, name: str, value: Any, meta: Mapping[str, Any] | None = None, *, stays: bool = False
) -> fx.Node:
    """One more input, behind another one; ``stays``: where it lives does not change, which CUDA graphs want to know."""
    with after.graph.inserting_after(after):
        added = after.graph.placeholder(name)
    static = {"tensor_dict": {"_dynamo_static_input_type": "unguarded"}} if stays else {}
    added.meta.update(val=value, example_value=value, **static, **(meta or {}))
    # AOTAutograd wants the attribute on every placeholder of a graph of Dynamo's
    added._dynamo_source = None  # type: ignore[attr-defined]  # Dynamo's own
    return added


def graph_inputs_of(value: fx.Node) -> Iterator[fx.Node]:
    """The inputs of the graph that a value is computed from, each once."""
    seen, stack = set[fx.Node](), [value]
    while stack:
        if (each := stack.pop()) in seen:
            continue
        seen.add(each)
        if each.op == "placeholder":
            yield each
        stack += reversed(each.all_input_nodes)


def origin(node: fx.Node) -> dict[str, Any]:
    """The metadata that says where in the program a node comes from."""
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


def values_read(node: fx.Node) -> list[fx.Node]:
    """The tensors that a call reads; sizes and other numbers, nodes where they are not known, are left out."""
    numbers = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
    return [each for each in node.all_input_nodes if not isinstance(each.meta.get("val"), numbers)]


def tensor_nodes(value: Any) -> list[fx.Node]:
    """The nodes inside one argument (a node, or a list of nodes as ``cat`` takes)."""
    found: list[fx.Node] = []
    fx.map_arg(value, lambda node: found.append(node) or node)
    return found


def tensor_arguments(node: fx.Node) -> list[tuple[str, fx.Node]]:
    """The nodes inside the node's arguments, each with the argument's name."""
    return [(name, source) for name, value in arguments(node) for source in tensor_nodes(value)]


def functional(op: OpOverload) -> OpOverload | None:
    """``aten.add.Tensor`` of ``aten.add_.Tensor``, and of itself; None where an in-place op has no such form."""
    packet = getattr(_aten, op._schema.name.removeprefix("aten::").removesuffix("_"), None)
    return getattr(packet, op._overloadname, None)


def readers(
    node: fx.Node,
    passes_on: Callable[[fx.Node], bool] | None = None,
    reads: Mapping[fx.Node, Iterable[fx.Node]] | None = None,
) -> list[fx.Node]:
    """All that reads a value, directly or behind readers that pass it on; these are among the results.

    ``passes_on`` says which readers do; None: reshapes, which have every element. ``reads``: who reads a node, where
    that is more than its users.
    """
    passes_on = passes_on or (lambda reader: has_trait(reader, Trait.RESHAPES))
    found = dict.fromkeys(node.users if reads is None else reads[node])
    stack = list(found)
    while stack:
        if passes_on(reader := stack.pop()):
            users = reader.users if reads is None else reads[reader]
            more = [user for user in users if user not in found]
            found.update(dict.fromkeys(more))
            stack += more
    return list(found)


def behind(node: fx.Node, *traits: Trait) -> fx.Node:
    """The value behind reshapes, which have every element of it, or behind calls with other traits."""
    while has_trait(node, *(traits or (Trait.RESHAPES,))):
        node = node.all_input_nodes[0]
    return node


def start(graph: fx.Graph) -> fx.Node:
    """The first node that is no input."""
    return next(node for node in graph.nodes if node.op != "placeholder")


def target_name(node: fx.Node) -> str:
    """The Python name of the target of a call."""
    # Dynamo of torch 2.11 makes functions of what a DTensor does: "prim_redistribute", "prim from_local"
    return getattr(node.target, "__name__", str(node.target)).removeprefix("prim_").removeprefix("prim ")


def changes_shape(name: str) -> bool:
    """True for the name of an op that lays the very value otherwise: ``y.unsqueeze_(0)``, ``y.t_()``."""
    # the namespace has Python's own methods as well, such as __eq__
    is_in_place = name.endswith("_") and not name.endswith("__")
    packet = getattr(torch.ops.aten, name, None) if is_in_place else None
    return packet is not None and torch.Tag.inplace_view in getattr(packet, packet.overloads()[0]).tags


#: what Dynamo calls the ways to make a DTensor of a tensor, the reverse, and to place one otherwise
LAYOUTS = frozenset({"from_local", "full_tensor", "redistribute", "to_local"})


def is_layout(node: fx.Node) -> bool:
    """True for a call that hands on the shards of a DTensor, in the dtype that they have."""
    return not isinstance(node.target, OpOverload) and target_name(node) in LAYOUTS


def is_data(node: fx.Node) -> bool:
    """True for ``x.data``: a view that no dispatcher sees."""
    return is_hidden_call(node.target) and "val" in node.meta


def output_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes that the graph returns, in order, repeats included."""
    return tensor_nodes(gm.graph.output_node().args[0])


#: the one form of cast in a captured graph after ``pin_dtypes``, and the one in Inductor's graphs
PROGRAM_CAST, CAST = torch.ops.aten.to.dtype, torch.ops.prims.convert_element_type.default


def is_cast(node: fx.Node) -> bool:
    """True for a cast of a captured graph."""
    return node.target is PROGRAM_CAST


def is_parameter(node: fx.Node) -> bool:
    """True for a graph input that is a parameter of the user's module."""
    return node.op == "placeholder" and isinstance(
        node.meta.get("example_value", node.meta.get("val")), torch.nn.Parameter
    )


#: ops whose results may be views of what they are given, and whose schemas do not say so
_ALIASING = frozenset({
    "aten::align_tensors", "aten::atleast_1d", "aten::atleast_2d", "aten::atleast_3d", "aten::broadcast_tensors",
    "aten::meshgrid", "aten::type_as",
})  # fmt: skip


def is_alias(node: fx.Node) -> bool:
    """True where the result may be a view; fake values do not tell it of what was re-typed."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target is operator.getitem
    return schema.name in _ALIASING or any(each.alias_info for each in schema.returns)


def is_returned(node: fx.Node) -> bool:
    """True if the graph may return the value itself, or a view of it: there are only views, and ops with one input."""
    found = readers(node, lambda user: len(values_read(user)) == 1 or is_alias(user))
    return any(reader.op == "output" for reader in found)


def grad_modes(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Whether gradients are on at each node, as far as the graph itself says; True at its start.

    A cast made where they are off has no gradient, so it must not be shared with readers where they are on.
    """
    modes: dict[fx.Node, bool] = {}
    enabled = True
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        modes[node] = enabled
    return modes


def is_gradient_call(node: fx.Node) -> bool:
    """True for ``torch.autograd.grad``, as a train step has it that Dynamo captured whole."""
    return node.target is torch.autograd.grad


def is_leaf_call(node: fx.Node) -> bool:
    """True for ``y.requires_grad_()``, which ATen does not have."""
    return node.op == "call_method" and node.target == "requires_grad_"


def differentiated(graph: fx.Graph) -> set[fx.Node]:
    """The values by which the graph itself takes gradients, or their leaves. Readers must read this very node."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_gradient_call(node):
            found.update(tensor_nodes(node.kwargs.get("inputs", node.args[1:2])))
        elif is_leaf_call(node):
            found.update((node, *node.all_input_nodes))
    return found


# ---- source line and module

_FRAME_LOCAL = re.compile(r"^\w\['\w+'\]")
_INDEXED = re.compile(r"(?:\._(?:modules|parameters|buffers))?\['?([^'\]]+)'?\]")
#: of a stack trace: path, line number and code
_LAST_FRAME = re.compile(r'(?s:.*)^\s*File "([^"]*)", line (\d+).*\n?\s*(.*)', re.MULTILINE)


def source_line(node: fx.Node) -> str:
    """The user's innermost source line, as ``file:line: code``, or an empty string."""
    trace = node.meta.get("stack_trace")
    return innermost_line(trace) if isinstance(trace, str) else ""


def where(node: fx.Node) -> str:
    """Where an error is, in words: the user's source line; in a module of torch that is called directly, its path."""
    path = module_path(node)
    return source_line(node) or (f"module {path}" if path else "no source line")


def module_path(node: fx.Node) -> str:
    """Dotted path of the module the node belongs to, ``"encoder.layer.0"``; empty outside any module."""
    # in a backward graph, that of the forward
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    return dotted_path(str(list(stack.values())[-1][0]))


def dotted_path(source: str) -> str:
    """``"encoder.layer.0"`` of what Dynamo writes as ``L['self'].encoder._modules['layer']._modules['0']``."""
    return _INDEXED.sub(r".\1", _FRAME_LOCAL.sub("", source)).lstrip(".")


def starred(path: str) -> str:
    """A module path with ``*`` for the numbers of repeated blocks: ``"layers.*.up"``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def short_source(source: str) -> str:
    """``train.py:7: y = f(x)`` for a source line with its whole path; at most 60 characters."""
    path, colon, rest = source.partition(":")
    return f"{Path(path).name}{colon}{rest}"[:60]


def class_name(kind: type | str) -> str:
    """The class of a module in ``nn_module_stack``, as torch.export writes it."""
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


@cache_results(4096)  # repeated layers have the same lines
def innermost_line(trace: str) -> str:
    """The last line of a stack trace, as ``file:line: code``, or an empty string."""
    frame = _LAST_FRAME.match(trace)
    return "{}:{}: {}".format(*frame.groups()) if frame else ""
