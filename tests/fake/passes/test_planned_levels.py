"""Plans that say in which level each matmul runs, and steps that follow them. No code is generated."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx import Plan, PlanError
from amp_fx.precision.placement.level_cost import LevelCost
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.label import Reason, ReasonKind
from amp_fx.precision.plans.plan import NodePlan
from amp_fx.precision.plans.plan_files import diff_plans
from amp_fx.precision.policy.levels import FORWARD, INPUT, LEVELS, ROLES, WEIGHT
from support.checks.below_16_bits import FP8_CPU, MLP, Step, lowered, options
from support.models.small import Parts

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
SIZES = 32, 64, 64, 64, 16


def mlp(given: dict[str, Any], tokens: int = 32) -> Step:
    return lowered(MLP(*SIZES), [torch.randn(tokens, 32)], given)


def step(plan: Plan, tokens: int = 32, **given: Any) -> Step:
    return mlp({"plan": plan, "strict": True, **given}, tokens)


def roles(plan: Plan) -> list[tuple[str, ...]]:
    """What runs below 16 bits, of each linear."""
    return [(*row.levels_below,) for row in plan.nodes if row.op == "linear"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A plan of policy fp8."""
    torch._dynamo.reset()
    return mlp(options(tmp_path_factory.mktemp("fp8"), "rowwise")).plan


def with_levels(plan: Plan, op: str, levels: dict[str, str]) -> Plan:
    """The plan with other levels of one op."""
    return replace(plan, nodes=[replace(row, levels=levels) if row.op == op else row for row in plan.nodes])


def silent(plan: Plan) -> Plan:
    """The plan that says nothing of levels."""
    return replace(plan, nodes=[replace(row, levels={}) for row in plan.nodes])


def edited(plan: Plan, *linears: Sequence[str], level: str = "rowwise") -> Plan:
    """The plan with other roles in a level."""
    wanted = iter(linears)

    def changed(row: NodePlan) -> NodePlan:
        if row.op != "linear":
            return row
        ours = next(wanted)
        return replace(row, levels={role: level if role in ours else "bfloat16" for role in ROLES})

    return replace(plan, nodes=[changed(row) for row in plan.nodes])


def refused(plan: object, **given: Any) -> str:
    with pytest.raises(PlanError) as info:
        mlp({"plan": plan, **given})
    return str(info.value)


def test_a_plan_says_of_every_matmul_in_which_level_it_runs(made: Plan) -> None:
    # no gradient of the input of the first
    assert roles(made) == [(FORWARD, WEIGHT), (FORWARD, INPUT, WEIGHT), (FORWARD, INPUT, WEIGHT), ()]
    data = json.loads(made.to_json())
    linears = [row["levels"] for row in data["nodes"] if row["op"] == "linear"]
    assert linears[1] == dict.fromkeys(ROLES, "rowwise")
    assert linears[3] == dict.fromkeys(ROLES, "bfloat16")
    assert not any(row["levels"] for row in data["nodes"] if row["op"] != "linear")
    assert Plan.from_json(made.to_json()) == made
    with pytest.raises(PlanError, match="3"):
        Plan.from_dict({**data, "version": 3})


@pytest.mark.parametrize("given", [{}, {"policy": "fp8", "profile": "off"}])
def test_a_plan_is_followed_whatever_policy_and_profile_say(made: Plan, given: dict[str, Any]) -> None:
    again = step(made, **given)
    assert roles(again.plan) == roles(made)
    assert again.counts() == (3, 5)
    assert again.plan.meaning == "rowwise"
    assert [row.computed for row in again.plan.nodes if row.flops] == [FP8, FP8, FP8, BF16]
    reasons = again.reasons()["layers.0"]
    assert [kind for kind, _ in reasons].count(ReasonKind.LEVEL_PLANNED) == 2
    # what is followed once more does not say it twice
    assert given or sorted(step(again.plan).reasons()["layers.0"]) == sorted(reasons)


@pytest.mark.parametrize(
    "linears",
    # the policy leaves the last in the low dtype; a plan is the last word
    [((FORWARD,), (), (INPUT, WEIGHT), ()), ((), (), (), (FORWARD, WEIGHT))],
    ids=["some", "last"],
)
def test_any_choice_is_followed_to_the_letter(made: Plan, linears: Sequence[Sequence[str]]) -> None:
    found = step(edited(made, *linears))
    chosen = [role for each in linears for role in each]
    assert found.counts() == (chosen.count(FORWARD), len(chosen) - chosen.count(FORWARD))
    assert [set(each) for each in roles(found.plan)] == [set(each) for each in linears]
    assert all(row.is_because(ReasonKind.PLANNED_LOW) for row in found.plan.nodes if row.flops)


@pytest.mark.slow
def test_a_plan_with_nothing_below_runs_nothing_there_under_policy_fp8(made: Plan, tmp_path: Path) -> None:
    given = options(tmp_path, "rowwise")
    assert mlp({**given, "plan": edited(made, (), (), (), ())}).counts() == (0, 0)
    # one that says nothing of levels leaves it to the policy
    assert mlp({**given, "plan": silent(made)}).counts() == (3, 5)


def test_levels_are_those_of_the_plan_and_may_differ(made: Plan) -> None:
    both = edited(made, (FORWARD, WEIGHT), (), (), ())
    rows = edited(made, (), ROLES, (), (), level="tensorwise").nodes
    nodes = [row if row.levels_below else other for row, other in zip(both.nodes, rows, strict=True)]
    found = step(replace(both, nodes=nodes))
    assert found.plan.meaning == "rowwise, tensorwise"
    scales = [node.args[2].meta["val"].ndim for node in found.scaled()[0]]  # type: ignore[union-attr]
    assert scales == [2, 0]
    gradients = {node.args[0].meta["val"].dtype for node in found.scaled()[1]}  # type: ignore[union-attr]
    assert gradients == {FP8, torch.float8_e5m2}


def test_what_cannot_be_is_refused_by_name(made: Plan) -> None:
    def with_row(op: str, **changes: Any) -> Plan:
        changed = next(row for row in made.nodes if row.op == op and row.name != "linear")
        nodes = [replace(row, **changes) if row is changed else row for row in made.nodes]
        return replace(made, nodes=nodes)

    assert "'rowwise', fp8 is 'tensorwise'" in refused(made, policy="fp8", fp8="tensorwise")
    assert "numerics='eager'" in refused(made, numerics="eager")
    wrong = edited(made, (WEIGHT,), (), (), (), level="rowwise_gw_hp")
    assert "rowwise_gw_hp" in refused(wrong)
    assert "linear_1 (linear) in rowwise, forward" in refused(with_row("linear", dtype=torch.float32))
    message = refused(with_row("gelu", levels={FORWARD: "rowwise"}))
    assert "gelu (gelu) in rowwise, forward" in message
    assert "linear, addmm, mm, matmul" in message
    for changed, wrong, valid in (
        ({"backward": "rowwise"}, "'backward'", "'forward'"),
        ({FORWARD: "rowwize"}, "'rowwize'", "'float32', 'bfloat16'"),
    ):
        message = refused(with_row("linear", levels=changed))
        assert all(name in message for name in ("linear_1", wrong, valid))
    uneven, tokens = MLP(32, 40, 40, 40, 16), [torch.randn(32, 32)]
    plan = with_levels(lowered(uneven, tokens, {"profile": "off"}).plan, "linear", {FORWARD: "rowwise"})
    with pytest.raises(PlanError, match=r"16 .*32 x 40"):
        lowered(uneven, tokens, {"plan": plan})
    with pytest.raises(PlanError, match=r"layers.0 linear\).*\(32, 40\), had \(32, 64\)"):
        lowered(uneven, tokens, {"plan": made})


def test_a_diff_of_plans_names_the_matmul_and_the_role(made: Plan) -> None:
    other = edited(made, (FORWARD, WEIGHT), (FORWARD, WEIGHT), (), ())
    assert [str(change) for change in diff_plans([made], [other]).changes] == [
        "layers.1 linear, gradient of its input (forward): float8_e4m3fn -> bfloat16",
        "layers.2 linear (forward): float8_e4m3fn -> bfloat16",
        "layers.2 linear, gradient of its input (forward): float8_e4m3fn -> bfloat16",
        "layers.2 linear, gradient of its weight (forward): float8_e4m3fn -> bfloat16",
    ]
    assert not diff_plans([made], [made])
    # a plan of autocast says nothing of roles
    assert len(diff_plans([silent(made)], [other]).changes) == 4


def test_what_becomes_a_batch_of_products_is_refused() -> None:
    def turned(m: Any, x: Tensor) -> Tensor:
        return torch.matmul(m.a(x).transpose(1, 2), m.w).float().square().mean()

    model, x = Parts(turned, a=nn.Linear(32, 32), w=torch.randn(16, 16)), torch.randn(4, 16, 32)
    plan = lowered(model, [x], {"profile": "off", "strict": True}).plan
    with pytest.raises(PlanError, match=r"matmul \(matmul\) in rowwise"):
        lowered(model, [x], {"plan": with_levels(plan, "matmul", {FORWARD: "rowwise"})})


def test_other_numbers_of_tokens_keep_gradients_of_weights_low_and_say_so(made: Plan, caplog: Any) -> None:
    found = step(made, tokens=24)
    assert found.counts() == (3, 2)
    assert roles(found.plan) == [(FORWARD,), (FORWARD, INPUT), (FORWARD, INPUT), ()]
    given = {"grain": 16, "sizes": "64 x 24 x 32", "planned": "fp8"}
    assert Reason.of(ReasonKind.INDIVISIBLE, role=WEIGHT, **given) in found.plan.node("linear").reasons
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert any("linear" in text for text in warned)


def test_calls_inside_a_checkpoint_are_chosen_and_followed_as_others_are(tmp_path: Path) -> None:
    class Checkpointed(MLP):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(lambda y: self.layers[1](self.layers[0](y)).relu(), x, use_reentrant=False)  # type: ignore[assignment]
            return self.layers[2](x).float().mean()

    model, x = Checkpointed(32, 64, 64, 16), torch.randn(32, 32)
    first = lowered(model, [x], options(tmp_path))
    assert [bool(each) for each in roles(first.plan)] == [True, True, False]
    assert sum(map(len, roles(first.plan))) == 5
    # the forward of both, recomputed or not, and their gradients
    forward, backward = first.counts()
    assert forward == 2
    assert backward >= 3
    again = lowered(model, [x], {"plan": first.plan, "strict": True})
    assert roles(again.plan) == roles(first.plan)
    assert again.counts() == first.counts()


@pytest.mark.quick_rows("autocast")
@pytest.mark.parametrize("policy", ["autocast", "fp8"])
def test_evaluation_by_a_plan_of_training_and_vice_versa(made: Plan, policy: str, tmp_path: Path) -> None:
    given = {"policy": policy, "profile": options(tmp_path)["profile"]}
    with torch.no_grad():
        found = step(made, **given)
        assert {row.computed for row in found.plan.nodes if row.flops} == {BF16}
        del given["policy"]
        plan = mlp(options(tmp_path, "rowwise")).plan
    assert any(row.levels_below for row in plan.nodes)
    # gradients were not asked about
    assert step(plan, policy=policy, **given).counts() == ((3, 5) if policy == "fp8" else (0, 0))


@pytest.fixture(scope="module")
def cal() -> amp_fx.Calibration:
    torch.manual_seed(0)
    return amp_fx.calibrate(MLP(*SIZES), torch.randn(32, 32), policy="fp8", fp8="tensorwise", profile=FP8_CPU)


@pytest.mark.slow
def test_a_policy_with_sensitivity_runs_below_what_the_plan_of_the_same_budget_does(
    cal: amp_fx.Calibration, tmp_path: Path
) -> None:
    path = str(cal.save(tmp_path / "sensitivity.json"))
    below = []
    for budget in (1, 4, 20):
        policy = {"base": "fp8", "sensitivity": path, "budget": budget}
        found = mlp({**options(tmp_path), "policy": policy})
        plan = cal.plan(budget, verify=False)
        assert roles(found.plan) == roles(plan.plans[0])
        assert cal.predict(found.plan) == pytest.approx(plan.point.error)
        assert found.plan.meaning == "tensorwise"
        below.append(sum(found.counts()))
        if budget == 4:
            assert any(row.is_because(ReasonKind.LEVEL_OVER_BUDGET) for row in found.plan.nodes)
    assert 0 == below[0] < below[1] < below[2] == 8
    with torch.no_grad():
        found = mlp({**options(tmp_path), "policy": policy})
    assert {row.computed for row in found.plan.nodes if row.flops} <= {BF16, torch.float32}
    assert found.plan.meaning.startswith("as autocast")


def test_a_plan_of_what_was_not_measured_is_not_predicted(cal: amp_fx.Calibration, made: Plan) -> None:
    with pytest.raises(PlanError, match=r"rowwise.*tensorwise"):
        cal.predict(made)
    plan = cal.plan(20, verify=False).plans[0]
    plain = amp_fx.calibrate(MLP(*SIZES), torch.randn(32, 32), profile="off")
    with pytest.raises(PlanError, match="tensorwise"):
        plain.predict(plan)
    assert plain.predict(edited(plan, (), (), (), ())) > 0
    with pytest.raises(PlanError, match="gelu in tensorwise, forward"):
        cal.predict(with_levels(plan, "gelu", {FORWARD: "tensorwise"}))


def test_a_device_without_the_rate_has_nothing_to_choose() -> None:
    slow = DeviceProfile("a CPU", "cpu", {"float32": 1e9, "bfloat16": 1e9, "float16": 1e9}, 1e9, 1e-6)
    assert LevelCost.of(slow, BF16, LEVELS["rowwise"]) is None
    with pytest.raises(amp_fx.OptionsError, match=r"cpu a CPU .*fp8"):
        amp_fx.calibrate(MLP(*SIZES), torch.randn(32, 32), policy="fp8", profile=slow)
    with pytest.raises(amp_fx.OptionsError, match=r"fp8='rowwise'.*'fp8'"):
        amp_fx.calibrate(MLP(*SIZES), torch.randn(32, 32), fp8="rowwise")


def test_rules_keep_calls_from_the_level_whatever_was_measured() -> None:
    policy = {"base": "fp8", "rules": [{"module": r"layers\.1", "precision": "low"}]}
    torch.manual_seed(0)
    found = amp_fx.calibrate(MLP(*SIZES), torch.randn(32, 32), policy=policy, profile="off")
    assert roles(found.plan(100, verify=False).plans[0]) == [(FORWARD, WEIGHT), (), ROLES, ()]


def test_weights_are_not_held_low_for_a_plan_that_reads_them_below(made: Plan) -> None:
    found = step(made, weights="cache")
    assert found.counts() == (3, 5)
    assert not any(given.copy_of for given in found.plan.inputs)


def test_a_model_of_one_linear_has_a_plan() -> None:
    cal = amp_fx.calibrate(
        nn.Linear(16, 16), torch.randn(16, 16), lambda y: y.square().mean(), policy="fp8", profile="off"
    )
    assert not any(row.levels_below for row in cal.plan(100, verify=False).plans[0].nodes)
