"""One plan is followed by the compiled model and by the exported one, at other sizes, call by call; no code is made."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import amp_fx
from amp_fx import Plan, PlanError
from amp_fx.exporting import packaging
from amp_fx.precision.plans.matching import choose_plan, match
from amp_fx.precision.plans.plan import dtype_name
from amp_fx.precision.policy.levels import FORWARD
from support.checks.below_16_bits import error_of, exact
from support.models.any_length import SIZED, make
from support.models.small import Parts
from support.tracing.captured_graphs import rewrite

AUTO = Dim.AUTO
#: what no default would have: every second module in fp32
RULES = {"rules": [{"module": r"(^|\.)(k|v|own_k|up|head|out|router|last)$", "precision": "fp32"}]}


def unpacked(m: Any, x: Tensor) -> Tensor:
    """A tensor is unpacked, which Dynamo traces otherwise than torch.export."""
    q, k, v = m.qkv(x).unflatten(-1, (3, -1)).movedim(-2, 0)
    return m.out((q @ k.mT).softmax(-1) @ v)


def split(m: Any, x: Tensor) -> Tensor:
    gate, value = F.gelu(m.q(x)).chunk(2, -1)
    return m.out(gate * value.view(*x.shape[:-1], -1)) + x


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.q(x).relu_()
    y.mul_(0.5).add_(1)
    return m.out(y)


def twice(m: Any, x: Tensor) -> Tensor:
    """One module is called twice."""
    return m.out(F.silu(m.q(F.silu(m.q(x)))))


def einsum(m: Any, x: Tensor) -> Tensor:
    return m.out(torch.einsum("btc,dc->btd", x, m.q.weight).tanh())


def linears(program: Callable[[Any, Tensor], Tensor], **columns: int) -> nn.Module:
    torch.manual_seed(0)
    return Parts(
        program, **{name: nn.Linear(32, count) for name, count in columns.items()}, out=nn.Linear(32, 8)
    ).eval()


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "unpacked": lambda: linears(unpacked, qkv=96),
    "split": lambda: Parts(split, q=nn.Linear(32, 64), out=nn.Linear(32, 32)).eval(),
    "in place": lambda: linears(in_place, q=32),
    "twice": lambda: linears(twice, q=32),
    "einsum": lambda: linears(einsum, q=32),
}


def inputs(name: str, rows: int = 2, length: int = 6) -> tuple[Tensor, ...]:
    return SIZED[name].inputs(rows, length) if name in SIZED else (torch.randn(rows, length, 32),)


def model_of(name: str) -> nn.Module:
    return make(name) if name in SIZED else PROGRAMS[name]()


def placed(plan: Plan) -> list[tuple[str, str]]:
    """Where products run, by module, in order."""
    return [(row.module_path, row.precision) for row in plan.matmuls]


def compiled(model: Any, args: Any, dynamic: bool | None = None, **options: Any) -> Plan:
    torch._dynamo.reset()
    with torch.no_grad():
        return rewrite(model, *args, options=options, dynamic=dynamic).plan


def plan_of(program: Any) -> Plan:
    return Plan.from_json(amp_fx.extra_files(program)["amp_fx.json"])


@pytest.mark.parametrize("name", [*SIZED, *PROGRAMS])
def test_the_compiled_and_the_exported_model_follow_one_plan(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, args = model_of(name), inputs(name)
    made = compiled(model, args, policy=RULES)
    wanted = placed(made)
    assert {precision for _, precision in wanted} == {"float32", "bfloat16"}
    assert placed(compiled(model, args)) != wanted
    exported = plan_of(amp_fx.export(model, args, plan=made))
    assert placed(exported) == wanted
    # and the other way round, where sizes are not known
    others = inputs(name, 3, 9)
    assert placed(compiled(model, others, dynamic=True, plan=exported)) == wanted
    assert placed(plan_of(amp_fx.export(model, others, plan=made))) == wanted
    assert "without a row" not in caplog.text.lower()


@pytest.mark.parametrize("name", ["gated", "unpacked", "tied"])
def test_a_package_has_what_the_plan_of_the_compiled_model_says(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, args = model_of(name), inputs(name)
    made, programs = compiled(model, args, policy=RULES), list[torch.export.ExportedProgram]()
    monkeypatch.setattr(packaging, "compile_package", lambda program, *_: programs.append(program))
    program, plain = amp_fx.export(model, inputs(name, 3, 9), plan=made), {"freezing": False}
    amp_fx.package(program, tmp_path / "model.pt2", profile="off", inductor_configs=plain)
    products = [
        dtype_name(node.meta["val"].dtype)
        for node in programs[0].graph.nodes
        if any(name in str(node.target) for name in ("linear", "matmul", "bmm"))
    ]
    assert products == [precision for _, precision in placed(made)]


def test_a_plan_is_followed_by_a_program_that_was_decomposed() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.norm(m.first(x)).relu_()
        return m.out((m.up(y.flatten(2).mT) @ m.table).softmax(-1))

    torch.manual_seed(0)
    parts = {
        "first": nn.Conv2d(3, 16, 3),
        "norm": nn.BatchNorm2d(16),
        "up": nn.Linear(16, 16),
        "out": nn.Linear(16, 4),
    }
    model, x = Parts(run, **parts, table=torch.randn(16, 16)).eval(), torch.randn(2, 3, 8, 8)
    made = compiled(model, (x,), policy=RULES)
    program = torch.export.export(model, (x,)).run_decompositions()
    followed = amp_fx.convert(program, plan=made)
    plan = plan_of(followed)
    assert not {row.op for row in plan.nodes} & {"conv2d", "linear", "batch_norm", "matmul", "relu_"}
    assert placed(plan) == placed(made)
    assert [precision for _, precision in placed(plan)] == ["bfloat16", "float32", "bfloat16", "float32"]
    assert error_of(followed.module()(x), exact(model, x)) < 2e-2


def test_a_call_without_a_row_and_a_row_without_a_call_are_told_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layers = {name: nn.Linear(32, 32) for name in ("first", "last")}
    before = Parts(lambda m, x: m.last(F.silu(m.first(x))), **layers)
    more = {**layers, "new": nn.Linear(32, 32)}
    after = Parts(lambda m, x: m.last(m.new(m.first(x).tanh())), **more)
    made = compiled(before, inputs(""), policy={"rules": [{"module": ".", "precision": "fp32"}]})
    x = torch.randn(2, 6, 32)
    torch._dynamo.reset()
    found = rewrite(after, x, options={"plan": made})
    assert placed(found.plan) == [("first", "float32"), ("new", "bfloat16"), ("last", "float32")]
    assert error_of(found.outputs, exact(after, x)) < 1e-2
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    message = record.getMessage()
    new, _, gone = message.partition("Without a call")
    assert "linear_1 (new linear)" in new
    assert "tanh (tanh)" in new
    assert "silu (silu)" in gone
    assert "last" not in message


def mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: mlp(32, 48, 48, 8), r"linear \(0 linear\).*\(32, 48\).*\(32, 64\)"),
        (
            lambda: nn.Sequential(nn.Sequential(mlp(32, 64, 64, 8))),
            r"linear \(0.0.0 linear\) is new.*\(0 linear\) is gone",
        ),
        (lambda: nn.Sequential(nn.Conv1d(6, 4, 3), nn.Conv1d(4, 4, 3)), r"conv1d \(0 conv1d\) is new"),
        (
            lambda: nn.Sequential(*mlp(32, 64, 64), *mlp(64, 9, 9, 9, 9)),
            r"linear_2 \(2 linear\).*\(64, 9\).*\(64, 8\)",
        ),
        (lambda: mlp(32, 64, 64, 8).bfloat16(), r"bfloat16, had float32"),
    ],
    ids=["width", "elsewhere", "op", "mostly", "dtype"],
)
def test_a_plan_of_another_model_is_refused(other: Callable[[], nn.Module], named: str) -> None:
    made = compiled(mlp(32, 64, 64, 8), inputs(""))
    model = other()
    x = torch.randn(2, 6, 32, dtype=next(model.parameters()).dtype)
    with pytest.raises(PlanError, match=named):
        compiled(model, (x,), plan=made)


def test_equal_calls_of_one_module_keep_their_rows_where_one_is_new() -> None:
    weights = [torch.randn(32, 32) for _ in range(3)]

    def program(new: bool) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            x = x.tanh() @ weights[0] if new else x
            x = F.gelu(x @ weights[1])
            return (x.sin() @ weights[2]).softmax(-1)

        return run

    made = compiled(program(False), inputs(""))
    rows = iter((torch.float32, torch.bfloat16))
    nodes = [replace(row, dtype=next(rows)) if row.op == "matmul" else row for row in made.nodes]
    found = compiled(program(True), inputs(""), plan=replace(made, nodes=nodes))
    assert [precision for _, precision in placed(found)] == ["bfloat16", "float32", "bfloat16"]


def test_a_head_with_other_classes_has_no_row_and_the_others_have() -> None:
    made = compiled(mlp(32, 64, 64, 8), inputs(""), policy={"rules": [{"module": ".", "precision": "fp32"}]})
    found = compiled(mlp(32, 64, 64, 9), inputs(""), plan=made)
    assert placed(found) == [("0", "float32"), ("1", "float32"), ("2", "bfloat16")]


def test_graphs_that_end_elsewhere_follow_the_rows_of_all_plans() -> None:
    layers = {name: nn.Linear(32, 32) for name in ("a", "b", "c")}
    whole = Parts(lambda m, x: m.c(m.b(m.a(x).tanh()).sin()), **layers)
    ends = [Parts(lambda m, x: m.a(x).tanh(), **layers), Parts(lambda m, x: m.c(m.b(x).sin()), **layers)]
    rules = {"rules": [{"module": "a|c", "precision": "fp32"}]}
    plans = [compiled(end, inputs(""), policy=rules) for end in ends]
    wanted = [("a", "float32"), ("b", "bfloat16"), ("c", "float32")]
    assert placed(plan_of(amp_fx.export(whole, inputs(""), plan=plans))) == wanted
    made = compiled(whole, inputs(""), policy=rules)
    assert placed(made) == wanted
    assert [each for end in ends for each in placed(compiled(end, inputs(""), plan=made))] == wanted


def test_what_shares_a_storage_here_alone_is_pinned_as_this_graph_has_it() -> None:
    layer = nn.Linear(32, 32)
    alone = Parts(lambda m, x: m.layer(x).view(-1), layer=layer)
    both = Parts(lambda m, x: (y := m.layer(x), y.view(-1)), layer=layer)
    x = torch.randn(2, 6, 32)
    for made, model in ((alone, both), (both, alone)):
        found = rewrite(model, x, options={"plan": compiled(made, (x,))})
        torch._dynamo.reset()
        assert placed(found.plan) == [("layer", "bfloat16")]
        assert all(y.dtype is torch.float32 for y in ([found.outputs] if model is alone else found.outputs))


def test_levels_below_16_bits_find_their_calls_too() -> None:
    x = (torch.randn(8, 32),)
    made = compiled(mlp(32, 32, 32), x)
    nodes = [replace(row, levels={FORWARD: "int8"}) if row.module_path == "0" else row for row in made.nodes]
    longer = nn.Sequential(*mlp(32, 32, 32), nn.Tanh(), nn.Linear(32, 4))
    for plan in (
        compiled(longer, x, plan=(made := replace(made, nodes=nodes))),
        plan_of(amp_fx.export(longer, x, plan=made)),
    ):
        assert [(where, which) for where, which in placed(plan)] == [
            ("0", "int8"),
            ("1", "bfloat16"),
            ("3", "bfloat16"),
        ]


def test_rows_are_matched_in_time_where_thousands_are_alike() -> None:
    row = compiled(torch.tanh, (torch.randn(4),)).nodes[0]
    plan = Plan(nodes=[replace(row, name=f"tanh_{at}") for at in range(3000)])
    more = Plan(nodes=[*plan.nodes, replace(row, op="sin", name="sin")])
    assert len(match(plan, more).pairs) == 3000
    _, found = choose_plan([plan], more)
    assert [row.name for row in found.new] == ["sin"]
