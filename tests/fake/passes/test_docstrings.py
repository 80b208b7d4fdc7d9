"""What the docstring of each pass shows is what the pass does: its graph before is made, and that after compared."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.fx as fx
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    TangentAOTInput,
)

from amp_fx import errors
from amp_fx._torch import convolution_op, quantised_ops
from amp_fx._torch.layout import convert_op
from amp_fx.graphs.keys import LEVEL, MARK
from amp_fx.passes import (
    PASSES,
    CallPacked,
    Classify,
    Constrain,
    FuseCasts,
    GemmEpilogue,
    HoldPacked,
    InsertCasts,
    KeepLess,
    KeepStatistics,
    KeepWeights,
    LayOutGradients,
    LayOutWeights,
    LowerTransforms,
    MarkCopies,
    MarkMatmuls,
    MarkStored,
    Note,
    Pass,
    PassContext,
    PinDtypes,
    Place,
    PlaceBySensitivity,
    PlaceLevels,
    QuantiseMatmuls,
    ReadScales,
    Replay,
    ScaleBackward,
    SeparateOutputs,
    Verify,
    WriteCasts,
)
from amp_fx.passes.base import mark
from amp_fx.precision.placement.cut import HIGH
from amp_fx.precision.plans.label import Takes
from amp_fx.precision.plans.plan import NodePlan
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.levels import LEVELS
from support.tracing.captured_graphs import captured
from support.tracing.graph_text import differences, graph_of, text_of

aten = torch.ops.aten
BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Example:
    """How the graph in a pass's docstring is made, and what the pass reads besides.

    Attributes:
        step: the pass.
        before: passes that label the graph first.
        device: of all values.
        low: the low dtype.
        prepare: notes on the graph what tracing has noted of it.
        constants: tensors that the graph holds, by name.
        graph: makes the graph, where a text alone does not.
    """

    step: Pass
    before: Sequence[Pass] = ()
    context: PassContext = PassContext()
    device: str = "cpu"
    low: torch.dtype = BF16
    prepare: Callable[[dict[str, fx.Node]], object] = len
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    graph: Callable[[], fx.GraphModule] | None = None


LABELLED = (Classify(), Constrain())
PLACED = (*LABELLED, Place())

ZEROS = torch.zeros(4, 8)
ROWWISE = LEVELS["rowwise"]
ROW = NodePlan(
    name="e", op="expand", module_path="", source="", traced=torch.float32, low=BF16, op_class=OpClass.FOLLOW,
    dtype=BF16, takes=Takes.DTYPE,
)  # fmt: skip


def vmapped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: torch.nn.functional.linear(row, w))(x)


def of_norm(nodes: dict[str, fx.Node]) -> None:
    nodes["low"].meta["original_aten"] = aten.native_layer_norm.default
    for name in ("share", "product"):
        nodes[name].meta["original_aten"] = aten.native_layer_norm_backward.default


def of_training(nodes: dict[str, fx.Node]) -> None:
    inputs = PlainAOTInput(0), PlainAOTInput(1), TangentAOTInput(PlainAOTOutput(0))
    for name, described in zip(("x", "scale", "tangent"), inputs, strict=True):
        nodes[name].meta["desc"] = described
    nodes["output"].meta["desc"] = [PlainAOTOutput(0), GradAOTOutput(PlainAOTInput(0))]


def with_weight(nodes: dict[str, fx.Node]) -> None:
    kept = len(nodes["output"].all_input_nodes) - 1
    nodes["output"].meta["desc"] = [PlainAOTOutput(0), *map(SavedForBackwardsAOTOutput, range(kept))]
    nodes["w"].meta["desc"] = PlainAOTInput(0)


def marked(nodes: dict[str, fx.Node]) -> None:
    for name in ("mm", "logits"):
        mark(nodes[name], MARK, name)


def levelled(nodes: dict[str, fx.Node]) -> None:
    mark(nodes["mm"], MARK, "mm")
    level = LEVELS["tensorwise"]
    nodes["mm"].meta[LEVEL] = level, level.kernels[0], None, ()


EXAMPLES = [
    Example(PinDtypes()),
    Example(Classify(), device="cuda"),
    Example(Constrain(), [Classify()], low=FP16),
    Example(KeepWeights(("w",)), LABELLED, low=FP16),
    Example(Place(), LABELLED),
    Example(InsertCasts(), PLACED),
    Example(FuseCasts()),
    Example(Verify(), PLACED),
    Example(Replay({"e": ROW}), LABELLED),
    Example(
        PlaceBySensitivity({}, placement=dict.fromkeys(("mm", "square", "mean"), (HIGH, HIGH))), LABELLED
    ),
    Example(LowerTransforms(), LABELLED, graph=lambda: captured(vmapped, torch.ones(8, 4), torch.ones(4, 4))),
    Example(MarkCopies(), context=PassContext(folded=frozenset({"w"}))),
    Example(MarkStored((("w",),))),
    Example(KeepStatistics(), prepare=of_norm),
    Example(LayOutGradients()),
    Example(SeparateOutputs()),
    Example(KeepLess(weights=(0,)), prepare=with_weight),
    Example(LayOutWeights()),
    Example(WriteCasts(), device="cuda"),
    Example(GemmEpilogue(), device="cuda"),
    Example(CallPacked()),
    Example(HoldPacked({ZEROS.data_ptr(): torch.ones(4, 8)}), constants={"w_packed": ZEROS}),
    Example(ReadScales()),
    Example(ScaleBackward(1), prepare=of_training),
    Example(MarkMatmuls(), PLACED),
    Example(PlaceLevels(ROWWISE, "cuda"), device="cuda", prepare=marked),
    Example(QuantiseMatmuls(), device="cuda", prepare=levelled),
]


@pytest.fixture(autouse=True, scope="module")
def _ops() -> None:
    """Torch knows the ops that docstrings name."""
    for op in (convert_op, convolution_op, quantised_ops):
        op()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example.step).__name__)
def test_a_pass_does_what_its_docstring_shows(example: Example) -> None:
    before, after, error = shown(type(example.step))
    gm = (
        example.graph() if example.graph else graph_of(before, example.device, example.low, example.constants)
    )
    example.prepare({node.name: node for node in gm.graph.nodes})
    for step in example.before:
        step.call(gm, example.context)
    assert differences(before, text_of(gm)) == [], text_of(gm)
    if error:
        kind, _, message = error.partition(": ")
        with pytest.raises(getattr(errors, kind), match=re.escape(message)):
            example.step.call(gm, example.context)
        return
    example.step.call(gm, example.context)
    gm.graph.lint()
    assert differences(after, text_of(gm)) == [], text_of(gm)


def shown(kind: type[Pass]) -> tuple[str, str, str]:
    """The texts before and after in a docstring, or the error that the pass raises."""
    text = inspect.cleandoc(kind.__doc__ or "")
    found = re.search(r"^[^\n]*::\n\n((?:    [^\n]*\n?|\n)+)", text, re.MULTILINE)
    assert found, f"{kind.__name__} shows no graph"
    before, _, after = re.sub("^    ", "", found[1], flags=re.MULTILINE).partition("# after")
    before, _, error = before.partition("# raises ")
    inputs = "".join(re.findall(r"^\w+: .*\n", before, re.MULTILINE))
    return before, inputs + after.partition("\n")[2], error.strip()


def test_a_graph_of_a_package_holds_what_is_packed() -> None:
    before, *_ = shown(HoldPacked)
    gm = graph_of(before, "cpu", BF16, {"w_packed": ZEROS})
    packed = torch.ones(4, 8)
    result = HoldPacked({ZEROS.data_ptr(): packed}).call(gm, PassContext())
    assert gm.w_packed is packed
    assert result.notes == {Note.HELD: {ZEROS.data_ptr()}}


#: :mod:`test_attention` has theirs
ELSEWHERE = {"attend", "choose-attention"}


def test_every_pass_has_an_example() -> None:
    assert {example.step.name for example in EXAMPLES} | ELSEWHERE == PASSES.keys()
