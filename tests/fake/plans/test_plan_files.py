"""A plan that is given decides: it is followed exactly, or an error says which nodes moved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from amp_fx import AmpFxError, Plan, PlanError, Report, VerifyError
from amp_fx._torch import unwrapped_errors
from amp_fx.compiler.settings import Options
from amp_fx.precision.plans.label import Reason, ReasonKind
from amp_fx.precision.plans.matching import choose_plan
from amp_fx.precision.plans.plan_files import load_plans
from amp_fx.precision.policy import OpClass
from support.checks.below_16_bits import error_of, exact
from support.models.small import Parts
from support.tracing.captured_graphs import Rewritten, casts_of, rewrite

RULES = {"rules": [{"op": "gelu", "precision": "fp32"}, {"module": "head", "precision": "fp32"}]}


def net(
    before: Callable[[Tensor], Tensor] = lambda x: x, after: Callable[[Tensor], Tensor] = lambda y: y
) -> nn.Module:
    """With a body of its own, and a second output; ``before`` and ``after`` make it another."""

    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = before(x)
        x = x + checkpoint(m.block, x, use_reentrant=False)
        return after(F.softmax(m.head(m.norm(x)), -1)), x

    block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return Parts(run, block=block, norm=nn.LayerNorm(8), head=nn.Linear(8, 4))


@pytest.fixture(scope="module")
def made() -> Rewritten:
    torch._dynamo.reset()
    return rewrite(net(), torch.randn(6, 8), options={"policy": RULES})


def decisions(plan: Plan) -> list[tuple[Any, ...]]:
    return [(row.op, row.op_class, row.dtype, row.takes, row.pinned, row.reasons) for row in plan.nodes]


def follow(plan: object, model: nn.Module | None = None, batch: int = 6, **options: Any) -> Rewritten:
    return rewrite(model or net(), torch.randn(batch, 8), options={"plan": plan, **options})


def test_a_plan_is_followed_exactly(made: Rewritten, tmp_path: Path) -> None:
    made.plan.save(tmp_path / "plan.json")
    alone = rewrite(net(), torch.randn(6, 8))
    assert decisions(alone.plan) != decisions(made.plan)
    followed = follow(str(tmp_path / "plan.json"))
    assert decisions(followed.plan) == decisions(made.plan)
    assert followed.plan.casts == made.plan.casts
    assert casts_of(followed.gm) == casts_of(made.gm)
    assert followed.plan.policy == made.plan.policy
    assert [str(node) for node in followed.gm.graph.nodes] == [str(node) for node in made.gm.graph.nodes]
    # whatever policy and profile say, and for other batch sizes
    other = {"rules": [{"module": ".*", "precision": "fp32"}]}
    for followed in (follow(made.plan, policy=other, profile="auto"), follow(made.plan, batch=9)):
        assert decisions(followed.plan) == decisions(made.plan)


def test_a_plan_of_static_shapes_holds_for_dynamic_ones() -> None:
    def computes_with_sizes(m: Any, x: Tensor) -> Tensor:
        rows, columns = x.shape
        torch._check(rows > 2)
        y, _ = m.net(x.reshape(2, rows // 2, columns) * 0.5)
        return y.reshape(rows, -1)

    model = Parts(computes_with_sizes, net=net())
    made = rewrite(model, torch.randn(6, 8), options={"policy": RULES})
    torch._dynamo.reset()
    followed = rewrite(model, torch.randn(8, 8), options={"plan": made.plan}, dynamic=True)
    assert any(isinstance(node.meta.get("val"), torch.SymInt) for node in followed.gm.graph.nodes)
    assert decisions(followed.plan) == decisions(made.plan)


@pytest.mark.parametrize(
    "program",
    [
        lambda m, x: m.layer(x)[:, None].exp()[:, 0],
        lambda m, x: m.layer(x[:, None])[:, :, None].flatten(1).exp(),
        lambda m, x: m.layer(x[:4] * m.table[: len(x)][:4, :8]).softmax(-1),
        lambda m, x: (m.layer(x)[:4, None].tanh() + F.gelu(m.table[:4, None]))[:, 0],
        lambda m, x: m.layer((x.t() if len(x) > 5 else x.t().contiguous()).exp().t()),
        lambda m, x: (m.layer(x) if len(x) > 5 else m.layer(x).t().clone().t()).sin(),
        lambda m, x: F.gelu(m.layer(x if len(x) > 5 else x[None].expand(2, -1, -1)))[..., :8],
    ],
    ids=["rows", "rows twice", "alias", "two", "copy", "copy of a view", "expanded"],
)
@pytest.mark.parametrize("sizes", [(4, 6), (6, 4)])
def test_a_plan_holds_where_another_size_has_other_views(program: Any, sizes: tuple[int, int]) -> None:
    layers = {"layer": nn.Linear(8, 8), "last": nn.Linear(8, 8)}
    model = Parts(lambda m, x: m.last(program(m, x)), **layers, table=torch.randn(8, 8))
    rules = {"policy": {"rules": [{"module": "last", "precision": "fp32"}]}}
    made = rewrite(model, torch.randn(sizes[0], 8), options=rules, dynamic=sizes[0] == 6)
    torch._dynamo.reset()
    x = torch.randn(sizes[1], 8)
    followed = rewrite(model, x, options={"plan": made.plan}, dynamic=sizes[1] == 6)
    assert [row.op for row in followed.plan.nodes] != [row.op for row in made.plan.nodes]
    assert followed.dtypes("linear") == ["bfloat16", "float32"]
    with torch.autocast("cpu", torch.bfloat16):
        theirs = model(x)
    ours, theirs = (error_of(y, exact(model, x)) for y in (followed.outputs, theirs))
    assert 0 < ours <= 1.25 * theirs


def test_a_plan_holds_wherever_tensors_of_numbers_are_made() -> None:
    # a GPU that is not there has no numbers
    layer, literals = nn.Linear(8, 8), ((lambda: torch.tensor([0.5] * 8)), (lambda: torch.empty(8)))
    models = [Parts(lambda m, x, made=made: F.gelu(m.layer(x) * made()), layer=layer) for made in literals]
    for model, other in (models, models[::-1]):
        made = rewrite(model, torch.randn(6, 8), options={"policy": RULES})
        found = follow([made.plan], other)
        assert found.dtypes("linear") == ["bfloat16"]
        assert found.dtypes("mul.Tensor") == found.dtypes("gelu") == ["float32"]


def test_a_plan_holds_where_autocast_around_it_casts_one_operand_of_several() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return F.scaled_dot_product_attention(y, y, w), F.conv_transpose1d(y, w[:, :, None])

    args = torch.randn(4, 4), torch.randn(4, 4)
    made = rewrite(program, *args, ambient=torch.bfloat16)
    followed = rewrite(program, *args, ambient=torch.bfloat16, options={"plan": made.plan})
    assert decisions(followed.plan) == decisions(made.plan)
    assert [row.flops for row in followed.plan.nodes if row.flops] == [128, 256, 128]


def test_a_plan_holds_where_numbers_are_complex_or_compared() -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        turned = torch.view_as_complex(y.float().view(-1, 4, 2)) * torch.fft.rfft(x)[:, :4]
        return torch.where(y > x, torch.view_as_real(turned).flatten(1), y)

    model = Parts(call, layer=nn.Linear(8, 8))
    made = rewrite(model, torch.randn(6, 8))
    assert decisions(follow(made.plan, model).plan) == decisions(made.plan)


def test_copies_follow_a_plan_that_has_them_and_their_input_where_it_has_none() -> None:
    copied, as_it_lies = (lambda x, w: x.t().contiguous() @ w), (lambda x, w: x.t() @ w)
    args = torch.randn(16, 8), torch.randn(16, 4)
    plan = rewrite(copied, *args, options={"profile": "off"}).plan
    for dtype in (torch.float32, torch.bfloat16):
        nodes = [replace(row, dtype=dtype) if row.name == "contiguous" else row for row in plan.nodes]
        plan = replace(plan, nodes=nodes)
        followed = rewrite(copied, *args, options={"plan": (plan,)}).plan
        assert followed.node("contiguous").dtype is dtype
        # the same rows but for the copy, either way round
        without = rewrite(as_it_lies, *args, options={"plan": (plan,)}).plan
        assert without.node("matmul").dtype is torch.bfloat16
        again = rewrite(copied, *args, options={"plan": (without,)}).plan
        assert again.node("contiguous").dtype is again.node("t").dtype


def test_a_decision_that_was_edited_is_followed(made: Rewritten, tmp_path: Path) -> None:
    data = json.loads(made.plan.to_json())
    row = next(row for row in data["nodes"] if row["module_path"] == "block.0" and row["op"] == "linear")
    assert row["dtype"] == "bfloat16"
    row.update(dtype="float32", op_class="fp32", reasons=[{"kind": "listed", "values": {"why": "edited"}}])
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    followed = follow(path)
    (edited,) = [r for r in followed.plan.nodes if r.reasons == (Reason.of(ReasonKind.LISTED, why="edited"),)]
    assert edited.dtype is torch.float32
    body = followed.gm.get_submodule("wrap_body_0")
    assert isinstance(body, fx.GraphModule)
    linears = body.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert [node.meta["val"].dtype for node in linears] == [torch.float32, torch.bfloat16]


def test_a_plan_that_cannot_run_is_an_error_even_when_not_strict(made: Rewritten) -> None:
    first, *others = made.plan.nodes
    assert (first.op, first.op_class, first.dtype) == ("linear", OpClass.LOW, torch.bfloat16)
    broken = replace(made.plan, nodes=[replace(first, takes="any"), *others])
    with pytest.raises(VerifyError, match=r"linear .*torch\.bfloat16"):
        compile_with(broken, net(), strict=False)


def compile_with(plan: Any, model: nn.Module, **options: Any) -> None:
    with unwrapped_errors(AmpFxError):
        torch.compile(model, backend="amp_fx", options={"plan": plan, **options})(torch.randn(6, 8))


@pytest.mark.parametrize("strict", [True, False])
def test_a_plan_of_another_model_is_an_error_that_names_its_calls(made: Rewritten, strict: bool) -> None:
    nodes = [replace(row, module_path=f"other.{row.module_path}") for row in made.plan.nodes]
    moved = r"linear \(block.0 linear\) is new.*linear \(other.block.0 linear\) is gone"
    with pytest.raises(PlanError, match=moved):
        compile_with(replace(made.plan, nodes=nodes), net(), strict=strict)


def test_other_dtypes_are_named(made: Rewritten) -> None:
    with pytest.raises(PlanError, match=r"linear \(block.0 linear\).*float16.*bfloat16"):
        follow(made.plan, dtype="float16")
    rows = [replace(row, traced=torch.float16) for row in made.plan.nodes]
    with pytest.raises(PlanError, match=r"linear \(block.0 linear\) has dtype float32, had float16"):
        follow(replace(made.plan, nodes=rows))


def test_the_graphs_of_a_report_are_told_apart_by_content(made: Rewritten, tmp_path: Path) -> None:
    other = rewrite(net(after=torch.tanh), torch.randn(6, 8), options={"policy": RULES}).plan
    report = Report([other, replace(made.plan, phase="backward"), made.plan])
    path = report.save(tmp_path / "report.json")
    for plans in (path, report.plans):
        assert decisions(follow(plans).plan) == decisions(made.plan)
        assert decisions(follow(plans, net(after=torch.tanh)).plan) == decisions(other)
    with pytest.raises(PlanError):
        follow([Plan(phase="backward")])


def test_of_equal_graphs_that_trained_alike_of_equal_shapes_or_name_is_followed(made: Rewritten) -> None:
    outline = replace(made.plan, graph="1/0", training=True)
    far = replace(made.plan, training=False)
    resized = replace(outline, inputs=[replace(row, shape=(1,)) for row in outline.inputs])
    renamed, same = replace(outline, graph="0/0"), replace(outline)
    # copies of weights have no sizes of their own
    copy = replace(outline.inputs[0], name="copy", shape=(5, 7), copy_of=outline.inputs[0].name)
    copied = replace(renamed, inputs=[*outline.inputs, copy])
    assert choose_plan([resized, copied], outline)[0] is copied
    # each is nearer than those before it; other programs were compiled first, and this graph as late as the other
    late = replace(outline, graph="0/1")
    plans = [far, resized, late, renamed, same]
    assert all(choose_plan(plans[: at + 1], outline)[0] is plan for at, plan in enumerate(plans))


def test_plans_that_match_equally_well_and_decide_otherwise_are_told_once(
    made: Rewritten, caplog: Any
) -> None:
    first = replace(made.plan, graph="0/3")
    again = replace(first, graph="0/4")
    other = replace(again, nodes=[replace(row, op_class=OpClass.FP32) for row in first.nodes])
    outlines = [replace(made.plan, graph=graph) for graph in ("5/0", "5/1")]
    assert all(choose_plan([first, again], outline)[0] is first for outline in outlines)
    assert not caplog.records
    assert all(choose_plan([first, other], outline)[0] is first for outline in outlines)
    [record] = caplog.records
    assert "0/3, 0/4" in record.getMessage()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("", {"version": 4}, "4.*5"),
        ("", {"nodes": {}}, "plan.nodes.*list"),
        ("", {"nodes": [{"name": 1}]}, r"plan.nodes\[0\].op"),
        ("", {"nodes": [{"nam": "x"}]}, r"plan.nodes\[0\].nam .*'name'"),
        ("", {"casts": [{}]}, r"plan.casts\[0\].name"),
        ("", {"inputs": [3]}, r"plan.inputs\[0\].*object.*3"),
        ("", {"training": 1}, "plan.training.*bool.*1"),
        ("", {"autocast": {"casts": "9"}}, "plan.autocast.casts.*int.*'9'"),
        ("", {"polcy": "x"}, "plan.polcy"),
        ("nodes", {"op_class": "hot"}, r"nodes\[0\].op_class.* low, .*'hot'"),
        ("nodes", {"dtype": "int33"}, r"nodes\[0\].dtype.*'int33'"),
        ("nodes", {"dtype": "nn"}, r"nodes\[0\].dtype.*'nn'"),
        ("nodes", {"operands": [[1], 2]}, r"nodes\[0\].operands\[1\].*list.*2"),
        ("nodes", {"flops": True}, r"nodes\[0\].flops.*int.*True"),
    ],
)
def test_the_wrong_field_of_a_file_is_named(
    made: Rewritten, tmp_path: Path, place: str, value: dict[str, Any], message: str
) -> None:
    data = json.loads(made.plan.to_json())
    (data[place][0] if place else data).update(value)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=rf"plan\.json'.*{message}"):
        Options.parse(None, {"plan": path})


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "JSON"), (b"[]", "list"), (b"[" * 100_000, "JSON"), (b"\xff", "JSON"),
        (b'{"plans": 3, "version": 1}', "plans"), (b'{"version": 0}', "0"), (b'{"name": "a package"}', "'name'"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_plan_is_refused(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=rf"broken\.json'.*{named}"):
        Options.parse(None, {"plan": str(path)})


def test_a_file_that_is_missing_or_too_long_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"none\.json.*amp_fx\.explain"):
        Options.parse(None, {"plan": str(tmp_path / "none.json")})
    monkeypatch.setattr("amp_fx.precision.plans.files.MAX_FILE", 10)
    path = tmp_path / "long.json"
    path.write_text("{" + " " * 10 + "}")
    with pytest.raises(PlanError, match=r"long\.json.*10"):
        load_plans(path)
