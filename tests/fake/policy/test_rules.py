"""User rules: by op and by module path, both ways, the last wins; a policy prints what it parses."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from amp_fx import OptionsError, Plan, Policy, Rule, export, extra_files
from amp_fx.graphs.traits import LINEAR_OPS, OPS
from amp_fx.precision.plans.label import Reason, ReasonKind
from amp_fx.precision.policy.table import DEVICES, rows_of
from support.checks.whole_program import DOWN, UP, check
from support.models.small import Parts
from support.tracing.captured_graphs import plans, rewrite


def attention() -> nn.Module:
    linears = {"query": nn.Linear(8, 8), "key": nn.Linear(8, 8)}
    return Parts(lambda m, x: F.softmax(m.query(x) @ m.key(x).mT, -1), **linears)


def rules(*given_rules: dict[str, str]) -> dict[str, Any]:
    return {"policy": {"base": "autocast", "rules": list(given_rules)}}


# ---- what rules do to graphs ----

LOW_LOSS = {"casts": {DOWN: 2, UP: 1}, "dtypes": {"mse_loss": "bfloat16"}, "tolerance": 1e-2}

#: name -> makes a program and its arguments, a rule, and what is promised of them
RULED: dict[str, tuple[Callable[[], tuple[Any, ...]], dict[str, str], dict[str, Any]]] = {
    "an op is forced to fp32": (
        lambda: (attention(), torch.randn(2, 8)), {"op": "softmax", "precision": "fp32"},
        {"casts": {DOWN: 5, UP: 1}, "dtypes": {"softmax": "float32", "linear": "bfloat16", "matmul": "bfloat16"}},
    ),
    "an op is forced low": (
        lambda: (lambda x: F.mse_loss(x, torch.zeros_like(x)), torch.randn(4, 8)),
        {"op": "mse_loss", "precision": "low"}, LOW_LOSS,
    ),
    "the program's own casts and integers are not reached": (
        lambda: (lambda x: (x.to(torch.float16), x.argmax()), torch.randn(8)), {"module": ".*", "precision": "low"},
        {"casts": {("float32", "float16"): 1, DOWN: 1}, "reference": torch.float32},
    ),
    "the exceptions of an op's arguments are kept": (
        lambda: (lambda *args: F.batch_norm(*args), torch.randn(4, 8, 2), torch.zeros(8), torch.ones(8)),
        {"op": "batch_norm", "precision": "low"},
        {"casts": {DOWN: 1, UP: 1}, "dtypes": {"batch_norm": "bfloat16"}, "tolerance": 1e-2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULED)
def test_a_rule_does_what_it_says(name: str) -> None:
    make, rule, promised = RULED[name]
    program, *args = make()
    plan = check(program, *args, options=rules(rule), **promised).plan
    assert all(row.is_because(ReasonKind.RULE) for row in plan.nodes if row.op == rule.get("op"))
    if promised is LOW_LOSS:
        plain = check(program, *args, casts={}, dtypes={"mse_loss": "float32"})
        assert plain.one("mse_loss").is_because(ReasonKind.LISTED)


def wide_linears(*given_rules: dict[str, str]) -> list[str]:
    """Module paths of the linears of an encoder that are in fp32; the others are in bf16."""
    layers = nn.ModuleList([attention(), attention()])
    encoder = Parts(lambda m, x: (m.layers[0](x), m.layers[1](x)), layers=layers)
    rows = plans(rewrite(encoder, torch.randn(2, 8), options=rules(*given_rules)).plan, "linear")
    assert {row.dtype for row in rows} <= {torch.float32, torch.bfloat16}
    return [row.module_path for row in rows if row.dtype is torch.float32]


def test_a_rule_by_op_and_module_a_regular_expression_needs_both_and_the_last_that_matches_wins() -> None:
    by_op = {"op": "linear", "module": "key$", "precision": "fp32"}
    found = wide_linears({"module": r"^layers\.0\b", "precision": "fp32"})
    assert found == ["layers.0.query", "layers.0.key"]
    found = wide_linears(by_op, {"op": "mm", "module": ".", "precision": "fp32"})
    assert found == ["layers.0.key", "layers.1.key"]
    everything, one = {"module": ".*", "precision": "fp32"}, {"module": r"layers\.1\.key", "precision": "low"}
    assert wide_linears(everything, one) == ["layers.0.query", "layers.0.key", "layers.1.query"]
    assert len(wide_linears(one, everything)) == 4


# ---- rules by themselves ----


@pytest.mark.parametrize(
    ("op", "name", "matches"),
    [
        ("softmax", "softmax.int", True), ("softmax.int", "softmax.int", True), ("softmax.int", "softmax", False),
        ("aten.softmax.int", "softmax.int", True), ("aten::linear", "linear", True),
        ("aten.linear.default", "linear", True), ("linear", "linear_backward", False),
        ("max", "softmax.int", False), ("mylib::attention", "mylib::attention", True),
    ],
)  # fmt: skip
def test_op_names_match_with_and_without_overload(op: str, name: str, matches: bool) -> None:
    assert Rule.parse({"op": op, "precision": "fp32"}).matches(name, "") is matches


def test_a_rule_that_asks_for_int8_is_about_linears_and_under_that_policy_only() -> None:
    rule = Rule.parse({"module": "encoder", "precision": "int8"})
    found = {name.partition(".")[0] for name in OPS if rule.matches(name, "encoder.0")}
    assert found == LINEAR_OPS.keys()
    for bad in (
        {"base": "int8", "rules": [{"op": "softmax", "precision": "int8"}]},
        {"rules": [{"op": "linear", "precision": "int8"}]},
    ):
        with pytest.raises(OptionsError, match="int8"):
            Policy.parse(bad)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"op": "mm", "precision": "fp3"}, r"'fp3' .*'fp32', 'low'.*'fp32'"),
        ({"op": "mm"}, r"precision None"),
        ({"op": "mm", "precison": "low"}, r"'precison' .*'precision'"),
        ({"precision": "low"}, r"'op'.*'module'"),
        ({"module": "layer[", "precision": "low"}, r"layer\["),
        ({"op": 3, "precision": "low"}, r"'op' .*3"),
        ({"module": ["a"], "precision": "low"}, r"'module' .*\['a'\]"),
        ("softmax", r"op, module, precision.*'softmax'"),
        ({"op": "softmaxx", "precision": "fp32"}, r"'softmaxx' .*'softmax'"),
        ({"op": "F.linear", "precision": "fp32"}, r"'F\.linear' .*'linear'"),
        ({"op": "softmax.dim", "precision": "fp32"}, r"'softmax\.dim' .*'softmax\.int'"),
        ({"op": "prims::flor", "precision": "fp32"}, r"'prims::flor' .*'prims::floor'"),
        ({"module": "head", "precision": "low", "result": "fp64"}, r"'fp64' .*fp32"),
        ({"module": "head", "precision": "low", "result": True}, r"True .*fp32"),
        ({"module": "head", "precision": "fp32", "result": "fp32"}, r"'result' .*fp32.*'low'"),
        ({"module": "head", "result": "fp32"}, r"precision None"),
        ({"op": "linear", "precision": "low", "implementation": "flash"}, r"'implementation' .*attention"),
        ({"module": "head", "precision": "low", "implementation": "flash"}, r"'implementation' .*attention"),
    ],
)
def test_bad_rules_are_named(rule: object, message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        Policy.parse({"rules": [rule]})


def test_every_op_on_a_list_and_one_that_no_list_has_may_be_in_a_rule() -> None:
    for name in {name for device in DEVICES for name in rows_of(device)}:
        assert Rule.parse({"op": name, "precision": "fp32"}).op == name

    @torch.library.custom_op("amp_fx_rules::halve", mutates_args=())
    def halve(x: Tensor) -> Tensor:
        return x / 2

    assert Rule.parse({"op": "amp_fx_rules::halve", "precision": "low"}).op == "amp_fx_rules::halve"
    with pytest.raises(OptionsError, match=r"'amp_fx_rules::halv'.*'amp_fx_rules::halve'"):
        Rule.parse({"op": "amp_fx_rules::halv", "precision": "low"})
    # the first of a library that is imported later
    for name in ("not_imported_yet::op", "_fused_rms_norm"):
        assert Rule.parse({"op": name, "precision": "low"}).op == name


_RULES = st.builds(
    Rule,
    precision=st.sampled_from(["fp32", "low"]),
    op=st.sampled_from(sorted(rows_of("cpu"))),
    module=st.none() | st.sampled_from([".*", r"layers\.\d+", 'quote"d', "ünïcode$", ""]),
)


@given(st.lists(_RULES, max_size=4))
def test_any_policy_goes_through_text_and_json_unchanged(given_rules: list[Rule]) -> None:
    policy = Policy(rules=tuple(given_rules))
    assert Policy.parse(str(policy)) == policy
    assert Policy.parse(json.loads(json.dumps(policy.to_dict()))) == policy


# ---- results in fp32 ----

WIDE = {"module": "head", "precision": "low", "result": "fp32"}


def with_head() -> nn.Module:
    return nn.Sequential(OrderedDict(head=nn.Linear(8, 16), softmax=nn.Softmax(-1)))


def test_on_cuda_the_call_reads_low_and_everybody_reads_its_result_in_fp32() -> None:
    rewritten = rewrite(with_head(), torch.randn(2, 3, 8), device="cuda", options=rules(WIDE))
    row = rewritten.one("linear")
    assert (row.dtype, row.pinned) == (torch.bfloat16, torch.float32)
    assert row.is_because(ReasonKind.WIDE_RESULT)
    [linear] = rewritten.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert [user.meta["val"].dtype for user in linear.users] == [torch.float32]
    # what is stored, and no cast
    assert row.bytes == 4 * 2 * 3 * 16
    assert row.name not in {cast.value for cast in rewritten.plan.casts}
    assert row.name in next(reader for reader in rewritten.plan.nodes if "softmax" in reader.op).inputs


def test_on_a_cpu_the_call_runs_in_fp32_and_the_plan_says_why() -> None:
    row = rewrite(with_head(), torch.randn(2, 3, 8), options=rules(WIDE)).one("linear")
    assert row.dtype is torch.float32
    assert row.reasons[-1] == Reason.of(
        ReasonKind.NO_WIDE_RESULT, device="cpu", op="linear", low=torch.bfloat16
    )


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x @ x.select(0, 0),
        lambda x: torch.addmm(x, x, x, beta=0.5),
        lambda x: F.conv1d(x.unsqueeze(0), x.unsqueeze(2)),
    ],
    ids=["a vector", "a scaled addend", "a convolution"],
)
def test_what_no_kernel_returns_in_fp32_runs_in_fp32_on_cuda_too(program: Any) -> None:
    wide = rules({**WIDE, "module": ".*"})
    rows = rewrite(program, torch.randn(8, 8), device="cuda", options=wide).plan.nodes
    assert all(row.is_because(ReasonKind.NO_WIDE_RESULT) for row in rows if row.is_because(ReasonKind.RULE))
    assert torch.bfloat16 not in {row.dtype for row in rows}


def test_a_plan_with_a_result_in_fp32_is_followed_and_where_there_is_none_in_fp32(tmp_path: Path) -> None:
    first = rewrite(with_head(), torch.randn(2, 8), device="cuda", options=rules(WIDE)).plan
    first.save(tmp_path / "plan.json")
    options = {"plan": str(tmp_path / "plan.json")}
    again = rewrite(with_head(), torch.randn(2, 8), device="cuda", options=options).plan
    rows = [
        [(row.dtype, row.pinned, row.result_dtype, row.reasons) for row in plan.nodes]
        for plan in (first, again)
    ]
    assert rows[0] == rows[1]
    program = export(with_head(), (torch.randn(2, 8),), plan=first)
    (stored,) = plans(Plan.from_json(extra_files(program)["amp_fx.json"]), "linear")
    on_cpu = rewrite(with_head(), torch.randn(2, 8), options=options).one("linear")
    for row, device in ((on_cpu, "cpu"), (stored, "a program")):
        assert row.dtype is torch.float32
        assert row.result_dtype is None
        why = Reason.of(ReasonKind.NO_WIDE_RESULT, device=device, op="linear", low=torch.bfloat16)
        assert row.reasons[-1] == why
    # an exported program has no such results of its own
    with pytest.raises(OptionsError):
        export(with_head(), (torch.randn(2, 8),), **rules(WIDE))
