"""Agreement with torch.autocast, op by op: ``python tests/conformance.py --write`` puts it into the docs.

Two sources of calls, each on CPU (real tensors) and on CUDA (fake tensors, which go through the real
AutocastCUDA kernels on any machine):

- torch's own lists, ``torch.testing._internal.autocast_test_lists``, with its arguments and expected dtypes;
- every row of the op lists of amp_fx that can be asked (``tests/support/ops/listed_ops.py``).

Each call becomes a graph of its own, which is captured and rewritten as under the user's autocast, and run. It
agrees if

1. its results have the dtypes that autocast gives, and that torch's list names,
2. the kernels below compute in the dtypes in which those of autocast do,
3. on CPU, its results are equal bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.testing._internal import autocast_test_lists
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import amp_fx.compiler.rewriting
from amp_fx import CaptureError, PassError
from amp_fx._torch import FakeTensorMode, autocast_disabled, enable_autocast
from amp_fx.compiler.settings import Options
from amp_fx.graphs.regions import Region
from amp_fx.graphs.values import tensors
from support.ops.listed_ops import ASKED, LOW, arguments, on_device, overload

DOCUMENT = Path(__file__).parent.parent / "docs" / "contributors" / "conformance.md"
START, END = "<!-- agreement: start -->\n", "<!-- agreement: end -->\n"

#: the least share of agreement
REQUIRED = 0.98

#: calls that differ on purpose, by device and name, and why
EXPLAINED: dict[tuple[str, str], str] = {
    ("cpu", "_grid_sampler_2d_cpu_fallback"): "an inner call without a fake kernel, which no graph can hold",
    ("cpu", "gru.input"): "the same roundings; its steps are split and joined by other ops",
    ("mps", "gru.input"): "the same roundings; its steps are split and joined by other ops",
    ("mps", "lstm.input"): "one kernel on a Mac, in the dtype given; what was asked is not that kernel",
    ("cuda", "lstm.input"): "computed in fp16 by both; traced, and so returned, in fp32 without cudnn",
    **{
        (device, name): "products of experts, low on purpose: autocast lists none"
        for device in LOW
        for name in ("_grouped_mm", "transformers::grouped_mm_fallback")
    },
}

#: whether these run at all depends on the instructions of the CPU
_MACHINE = {("cpu", "lstm.input"), ("cpu", "mkldnn_rnn_layer")}

#: ops that compute nothing: the dtype in which a value is moved is amp_fx's to choose
_MOVES = frozenset(
    {"_to_copy", "view", "_unsafe_view", "t", "transpose", "expand", "unsqueeze", "squeeze", "permute"}
    | {"clone", "alias", "select", "slice", "detach", "as_strided", "contiguous", "unbind", "unsafe_split"}
    | {"prim::device", "lift_fresh", "lift_fresh_copy"}
)


@dataclass(frozen=True)
class Call:
    source: str  # "torch" for torch's own lists, "amp_fx" for the rows of the op lists
    device: str
    low: torch.dtype
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: torch.dtype | None = None  # of the result, where torch's list names it


@dataclass(frozen=True)
class Answer:
    """How a call differs from autocast; no differences: it agrees."""

    call: Call
    differences: tuple[str, ...]


def calls() -> Iterator[Call]:
    """Every call, in the order of the table."""
    torch.manual_seed(0)
    for low in (torch.bfloat16, torch.float16):
        yield from _torch_calls("cpu", low, autocast_test_lists.AutocastCPUTestLists(torch.device("cpu")))
    yield from _torch_calls("cuda", torch.float16, autocast_test_lists.AutocastTestLists(torch.device("cpu")))
    for device, name in ASKED:
        if (device, name) in _MACHINE:
            continue
        yield Call("amp_fx", device, LOW[device], name, overload(name), *arguments(name))


def _torch_calls(device: str, low: torch.dtype, lists: object) -> Iterator[Call]:
    """The calls of one of torch's lists, as its own tests make them."""
    for group, entries in vars(lists).items():
        for entry in entries if isinstance(entries, list) else ():
            name, args, *rest = entry
            if not isinstance(args, tuple):
                # ("einsum", "bkhd,bqhd->bqkh", ...): torch's own test does not run it either
                continue
            if device == "cpu" and "promote" in group:
                # arguments for bf16, then those for fp16
                args, rest = (args, *rest)[low is torch.float16], rest[1:]
            expected = next((value for value in rest if isinstance(value, torch.dtype)), None)
            kwargs = next((value for value in rest if isinstance(value, dict)), {})
            function = getattr(_owner(group), name, None) or getattr(Tensor, name)
            yield Call("torch", device, low, name, function, args, kwargs, expected)


def _owner(group: str) -> object:
    """Where the functions of a list are found."""
    if group.startswith("methods"):
        return Tensor
    owners = {"nn": torch._C._nn, "banned": torch._C._nn, "linalg": torch._C._linalg}  # pyright: ignore[reportAttributeAccessIssue]
    return owners.get(group.partition("_")[0], torch)


# ---- asking ----


class _Kernels(TorchDispatchMode):
    """Notes the calls below autocast: the op, and the dtype it computes in.

    Kernels that take several dtypes widen inside, and some are told their dtype: whether an argument is
    widened before or within makes no difference to the numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in _MOVES:
            dtypes = [t.dtype for t in tensors((args, kwargs)) if t.is_floating_point()]
            told = (kwargs or {}).get("dtype")
            if name in ("_softmax", "_log_softmax") and args[2]:
                # half_to_float: reads fp16, computes and returns fp32
                told = torch.float32
            widest = functools.reduce(torch.promote_types, dtypes) if dtypes else None
            self.seen.append((name, told or widest))
        return func(*args, **(kwargs or {}))


def answer(call: Call) -> Answer | None:
    """Asks autocast and amp_fx; None where autocast itself cannot run the call."""
    fake = None if call.device == "cpu" else FakeTensorMode(allow_non_fake_inputs=True)
    args, kwargs = call.args, call.kwargs
    if fake is not None:
        with fake:
            args, kwargs = on_device((args, kwargs), call.device)
    with warnings.catch_warnings():
        # ops on the lists are deprecated, random programs of torch's lists broadcast in losses
        warnings.simplefilter("ignore")
        try:
            with _Kernels() as theirs, enable_autocast(call.device, True, call.low):
                torch.manual_seed(0)
                wanted = call.function(*args, **kwargs)
        except (RuntimeError, NotImplementedError, AssertionError):
            # no kernel here: "Torch not compiled with CUDA enabled" is an AssertionError
            return None
        finally:
            torch.clear_autocast_cache()
        try:
            # what is wrong with AMX is in fp32, whatever the lists say
            with mock.patch("torch.cpu._is_amx_tile_supported", return_value=False):
                rewritten = as_rewritten(call, args, kwargs)
        except (CaptureError, PassError) as error:
            if isinstance(error.__cause__, (DynamicOutputShapeException, DataDependentOutputException)):
                # Dynamo ends a graph in front of such a call
                return None
            return Answer(call, (f"not rewritten: {error}",))
        with _Kernels() as ours, autocast_disabled():
            torch.manual_seed(0)
            got = rewritten(*tensors((args, kwargs)))
    return Answer(call, tuple(_differences(call, got, wanted, ours.seen, theirs.seen)))


def _differences(call: Call, got: Any, wanted: Any, ours: list[Any], theirs: list[Any]) -> Iterator[str]:
    pairs = list(zip(tree_leaves(got), tree_leaves(wanted), strict=True))
    dtypes = [tuple(v.dtype if isinstance(v, Tensor) else type(v) for v in pair) for pair in pairs]
    if any(one is not other for one, other in dtypes):
        yield f"results in {[str(one) for one, _ in dtypes]}, autocast's in {[str(o) for _, o in dtypes]}"
    if call.expected is not None and isinstance(wanted, Tensor) and wanted.dtype is not call.expected:
        yield f"torch's list says {call.expected}, autocast gives {wanted.dtype}"
    if ours != theirs:
        yield f"kernels {ours}, autocast's {theirs}"
    if call.device == "cpu" and not all(_equal(one, other) for one, other in pairs):
        yield "other values"


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return one == other
    same = one.shape == other.shape and one.dtype is other.dtype
    return same and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def as_rewritten(call: Call, args: Any, kwargs: Any) -> fx.GraphModule:
    """The call as a graph of Dynamo's kind, rewritten; takes the tensors among the arguments, in order."""
    graph = fx.Graph()
    with FakeTensorMode() as mode:

        def to_placeholder(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            node = graph.placeholder(f"x{len(graph.nodes)}")
            node.meta["example_value"] = mode.from_tensor(value) if call.device == "cpu" else value
            return node

        held = tree_map(to_placeholder, (args, kwargs))
    called = graph.call_function(call.function, *held)
    called._rename("called")
    graph.output((called,))
    gm = fx.GraphModule({}, graph)
    ambient = {call.device: Region(True, call.low, by_user=True)}
    options = Options(call.low, numerics="eager", profile="off", strict=True)
    with enable_autocast(call.device, True, call.low):
        return amp_fx.compiler.rewriting.rewrite(gm, ambient, options)[0]


# ---- telling ----


def table(answers: Sequence[Answer]) -> str:
    """The table of agreement, and every disagreement with its reason, in Markdown."""
    groups: dict[str, list[Answer]] = {}
    for each in answers:
        call = each.call
        key = f"{call.source} | {call.device} | {str(call.low).removeprefix('torch.')}"
        groups.setdefault(key, []).append(each)
    lines = ["| source | device | low dtype | calls | agree | share |", "|---|---|---|---|---|---|"]
    for key, members in (*groups.items(), ("all | |", answers)):
        agree = sum(not each.differences for each in members)
        lines.append(f"| {key} | {len(members)} | {agree} | {100 * agree / len(members):.1f} % |")
    lines += ["", "Disagreements, each with its reason:", ""]
    for key in dict.fromkeys((each.call.device, each.call.name) for each in answers if each.differences):
        lines.append(f"- `{key[1]}` on {key[0]}: {EXPLAINED.get(key, '**unexplained**')}")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Agreement with torch.autocast, op by op.")
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT.name}")
    given = parser.parse_args(arguments)
    answers = [each for call in calls() if (each := answer(call)) is not None]
    for each in answers:
        if each.differences:
            call = each.call
            print(f"{call.source} {call.device} {call.low} {call.name}: {each.differences}")
    agreement = table(answers)
    print(agreement)
    if given.write:
        before, rest = DOCUMENT.read_text(encoding="utf-8").split(START)
        DOCUMENT.write_text(before + START + agreement + END + rest.split(END)[1], encoding="utf-8")
    return int("**unexplained**" in agreement)


if __name__ == "__main__":
    sys.exit(main())
