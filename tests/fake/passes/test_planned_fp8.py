"""Plans that say what runs in fp8, matmul by matmul, and steps that follow them. No code is generated."""

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
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx import Plan, PlanError
from amp_fx.placement.fp8 import Fp8Cost
from amp_fx.placement.profile import DeviceProfile
from amp_fx.plans.diff import diff_plans
from amp_fx.plans.plan import NodePlan
from amp_fx.policy.fp8 import FORWARD, INPUT, ROLES, WEIGHT
from fp8 import FP8_CPU, MLP, Step, lowered, options

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
SIZES = 32, 64, 64, 64, 16


def step(plan: Plan, tokens: int = 32, **given: Any) -> Step:
    return lowered(MLP(*SIZES), [torch.randn(tokens, 32)], {"plan": plan, "strict": True, **given})


def roles(plan: Plan) -> list[tuple[str, ...]]:
    """What runs in fp8, of each linear."""
    return [row.fp8_roles for row in plan.nodes if row.op == "linear"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A plan of policy fp8."""
    torch._dynamo.reset()
    given = options(tmp_path_factory.mktemp("fp8"), "rowwise")
    return lowered(MLP(*SIZES), [torch.randn(32, 32)], given).plan


def edited(plan: Plan, *linears: Sequence[str]) -> Plan:
    """The plan with other roles in fp8."""
    wanted = iter(linears)

    def changed(row: NodePlan) -> NodePlan:
        if row.op != "linear":
            return row
        ours = next(wanted)
        return replace(row, roles={role: FP8 if role in ours else BF16 for role in ROLES})

    return replace(plan, nodes=[changed(row) for row in plan.nodes])


def refused(plan: object, **given: Any) -> PlanError:
    with pytest.raises(BackendCompilerFailed) as info:
        lowered(MLP(*SIZES), [torch.randn(32, 32)], {"plan": plan, **given})
    assert isinstance(info.value.inner_exception, PlanError)
    return info.value.inner_exception


def test_a_plan_says_of_every_matmul_what_it_multiplies(made: Plan) -> None:
    # no gradient of the input of the first
    assert roles(made) == [(FORWARD, WEIGHT), (FORWARD, INPUT, WEIGHT), (FORWARD, INPUT, WEIGHT), ()]
    data = json.loads(made.to_json())
    linears = [row["roles"] for row in data["nodes"] if row["op"] == "linear"]
    assert linears[1] == dict.fromkeys(ROLES, "float8_e4m3fn")
    assert linears[3] == dict.fromkeys(ROLES, "bfloat16")
    assert not any(row["roles"] for row in data["nodes"] if row["op"] != "linear")
    assert Plan.from_json(made.to_json()) == made
    # one from before plans said so
    for row in data["nodes"]:
        del row["roles"]
    old = Plan.from_dict(data)
    assert not old.decides_fp8


@pytest.mark.parametrize(
    "given", [{}, {"policy": "fp8"}, {"policy": "fp8", "profile": "off"}, {"policy": "fast"}]
)
def test_a_plan_is_followed_whatever_policy_and_profile_say(made: Plan, given: dict[str, Any]) -> None:
    again = step(made, **given)
    assert roles(again.plan) == roles(made)
    assert tuple(map(len, again.scaled())) == (3, 5)
    assert again.plan.fp8 == "rowwise"
    assert [row.multiplied for row in again.plan.nodes if row.flops] == [FP8, FP8, FP8, None]
    reason = next(row.reason for row in again.plan.nodes if row.op == "linear")
    assert reason.endswith(
        "; forward: fp8, rowwise, as the plan has it; gradient of its weight: fp8, rowwise, as the plan has it"
    )
    # what is followed once more does not say it twice
    assert step(again.plan).reasons()["layers.0"] == reason


@pytest.mark.parametrize(
    "linears",
    [
        ((FORWARD,), (), (INPUT, WEIGHT), ()),
        ((), (WEIGHT,), (FORWARD, INPUT), ()),
        # the policy leaves the last in the low dtype; a plan is the last word
        ((), (), (), (FORWARD, WEIGHT)),
    ],
    ids=["some", "others", "last"],
)
def test_any_choice_is_followed_to_the_letter(made: Plan, linears: Sequence[Sequence[str]]) -> None:
    found = step(edited(made, *linears))
    forward, backward = found.scaled()
    assert len(forward) == sum(FORWARD in each for each in linears)
    assert len(backward) == sum(role != FORWARD for each in linears for role in each)
    assert [set(each) for each in roles(found.plan)] == [set(each) for each in linears]
    assert all("low, as the plan has it" in found.reasons()[f"layers.{n}"] for n in range(3))


def test_a_plan_without_fp8_runs_none_under_policy_fp8(made: Plan, tmp_path: Path) -> None:
    none = edited(made, (), (), (), ())
    given = {**options(tmp_path, "rowwise"), "plan": none}
    found = lowered(MLP(*SIZES), [torch.randn(32, 32)], given)
    assert found.scaled() == ([], [])
    # one that says nothing of fp8 leaves it to the policy
    silent = replace(made, nodes=[replace(row, roles={}) for row in made.nodes])
    found = lowered(MLP(*SIZES), [torch.randn(32, 32)], {**given, "plan": silent})
    assert tuple(map(len, found.scaled())) == (3, 5)


def test_the_recipe_is_that_of_the_plan(made: Plan) -> None:
    found = step(replace(made, fp8="tensorwise"))
    gradients = [node.args[0].meta["val"].dtype for node in found.scaled()[1]]  # type: ignore[union-attr]
    assert gradients == [torch.float8_e5m2] * 5
    message = str(refused(made, policy="fp8", fp8="tensorwise"))
    assert "by recipe 'rowwise', fp8 is 'tensorwise'; make a plan for that, or drop the option" in message
    assert "by recipe 'rowwize'; valid: 'rowwise', 'tensorwise'" in str(refused(replace(made, fp8="rowwize")))
    message = str(refused(replace(made, fp8="rowwise_gw_hp")))
    assert "rowwise_gw_hp leaves gradients of weights in the low dtype" in message


def test_what_cannot_be_is_refused_by_name(made: Plan) -> None:
    def with_row(op: str, **changes: Any) -> Plan:
        at = next(at for at, row in enumerate(made.nodes) if row.op == op and row.name != "linear")
        return replace(
            made, nodes=[*made.nodes[:at], replace(made.nodes[at], **changes), *made.nodes[at + 1 :]]
        )

    assert "linear_1 (linear) in fp8, forward: the call itself is not in the low dtype" in str(
        refused(with_row("linear", dtype=torch.float32))
    )
    assert "gelu (gelu) in fp8, forward: only linear, addmm, mm, matmul with a matrix run in fp8" in str(
        refused(with_row("gelu", roles={FORWARD: FP8}))
    )
    assert "linear_1 has role 'backward' in the plan; valid: 'forward', 'gradient of its input'" in str(
        refused(with_row("linear", roles={"backward": FP8}))
    )
    assert "numerics='eager' contradicts" in str(refused(made, numerics="eager"))

    class Narrow(MLP):
        """The same calls with other sizes."""

    with pytest.raises(
        BackendCompilerFailed, match="16 does not divide the sizes 40 x 32 of what it multiplies"
    ):
        lowered(Narrow(32, 40, 40, 40, 16), [torch.randn(32, 32)], {"plan": made})


def test_a_diff_of_plans_names_the_matmul_and_the_role(made: Plan) -> None:
    other = edited(made, (FORWARD, WEIGHT), (FORWARD, WEIGHT), (), ())
    other = replace(
        other,
        nodes=[replace(row, multiplied=FP8 if FORWARD in row.fp8_roles else None) for row in other.nodes],
    )
    assert [str(change) for change in diff_plans([made], [other]).changes] == [
        "layers.1 linear, gradient of its input (forward): float8_e4m3fn -> bfloat16",
        "layers.2 linear (forward): float8_e4m3fn -> bfloat16",
        "layers.2 linear, gradient of its input (forward): float8_e4m3fn -> bfloat16",
        "layers.2 linear, gradient of its weight (forward): float8_e4m3fn -> bfloat16",
    ]
    assert not diff_plans([made], [made])
    # a plan of autocast says nothing of roles
    plain = replace(made, nodes=[replace(row, roles={}, multiplied=None) for row in made.nodes])
    assert len(diff_plans([plain], [other]).changes) == 4


def test_what_becomes_a_batch_of_products_is_refused() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(32, 32)
            self.w: Tensor
            self.register_buffer("w", torch.randn(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(self.a(x).transpose(1, 2), self.w).float().square().mean()

    model, x = Turned(), torch.randn(4, 16, 32)
    plan = lowered(model, [x], {"profile": "off", "strict": True}).plan
    assert torch.ops.aten.bmm.default in {
        node.target
        for _, graph in lowered(model, [x], {"plan": plan, "strict": True}).counter.graphs
        for node in graph.before.graph.nodes
    }
    nodes = [replace(row, roles={FORWARD: FP8}) if row.op == "matmul" else row for row in plan.nodes]
    with pytest.raises(
        BackendCompilerFailed, match=r"matmul \(matmul\) in fp8, which is no product of two matrices here"
    ):
        lowered(model, [x], {"plan": replace(plan, nodes=nodes, fp8="rowwise")})


def test_other_numbers_of_tokens_keep_gradients_of_weights_low_and_say_so(
    made: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    found = step(made, tokens=24)
    assert tuple(map(len, found.scaled())) == (3, 2)
    assert roles(found.plan) == [(FORWARD,), (FORWARD, INPUT), (FORWARD, INPUT), ()]
    assert "16 does not divide its sizes 64 x 24 x 32, though the plan has fp8" in found.reasons()["layers.0"]
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert any(
        "the plan has fp8 for gradient of its weight of linear, which stays low" in text for text in warned
    )


def test_a_plan_knows_the_calls_inside_a_checkpoint(tmp_path: Path) -> None:
    class Checkpointed(MLP):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(lambda y: self.layers[1](self.layers[0](y)).relu(), x, use_reentrant=False)  # type: ignore[assignment]
            return self.layers[2](x).float().mean()

    model, x = Checkpointed(32, 64, 64, 16), torch.randn(32, 32)
    first = lowered(model, [x], options(tmp_path))
    assert sum(map(len, roles(first.plan))) == 5
    again = lowered(model, [x], {"plan": first.plan, "strict": True})
    assert roles(again.plan) == roles(first.plan)
    assert tuple(map(len, again.scaled())) == tuple(map(len, first.scaled()))


@pytest.mark.parametrize("policy", ["autocast", "fp8"])
def test_evaluation_by_a_plan_of_training_runs_nothing_in_fp8(
    made: Plan, policy: str, tmp_path: Path
) -> None:
    with torch.no_grad():
        found = step(made, policy=policy, profile=options(tmp_path)["profile"])
    assert not found.plan.decides_fp8
    assert {row.computed for row in found.plan.nodes if row.flops} == {BF16}


# --- measured harm under the policy ---


@pytest.fixture(scope="module")
def cal() -> amp_fx.Calibration:
    torch.manual_seed(0)
    return amp_fx.calibrate(MLP(*SIZES), torch.randn(32, 32), policy="fp8", fp8="tensorwise", profile=FP8_CPU)


def test_a_policy_with_harm_runs_in_fp8_what_the_plan_of_the_same_budget_does(
    cal: amp_fx.Calibration, tmp_path: Path
) -> None:
    path = str(cal.save(tmp_path / "harm.json"))
    counts = []
    for budget in (1, 4, 20):
        policy = {"base": "fp8", "harm": path, "budget": budget}
        found = lowered(MLP(*SIZES), [torch.randn(32, 32)], {**options(tmp_path), "policy": policy})
        plan = cal.plan(budget, verify=False)
        assert roles(found.plan) == roles(plan.plans[0])
        assert cal.predict(found.plan) == pytest.approx(plan.point.error)
        assert found.plan.fp8 == "tensorwise"
        counts.append(sum(map(len, found.scaled())))
        if budget == 4:
            why = "fp8 would cost more time or error than the budget allows"
            assert any(why in reason for reason in found.reasons().values())
    assert 0 == counts[0] < counts[1] < counts[2] == 8


def test_evaluation_by_measured_harm_runs_nothing_in_fp8(cal: amp_fx.Calibration, tmp_path: Path) -> None:
    policy = {"base": "fp8", "harm": str(cal.save(tmp_path / "harm.json")), "budget": 20}
    with torch.no_grad():
        found = lowered(MLP(*SIZES), [torch.randn(32, 32)], {**options(tmp_path), "policy": policy})
    assert {row.computed for row in found.plan.nodes if row.flops} <= {BF16, torch.float32}
    assert found.plan.fp8 == "as autocast: plans and budgets of fp8 are about gradients"


def test_a_plan_of_another_recipe_or_of_what_was_not_measured_is_not_predicted(
    cal: amp_fx.Calibration, made: Plan
) -> None:
    with pytest.raises(PlanError, match="by recipe rowwise; measured was tensorwise"):
        cal.predict(made)
    plan = cal.plan(20, verify=False).plans[0]
    plain = amp_fx.calibrate(MLP(*SIZES), torch.randn(32, 32), profile="off")
    with pytest.raises(PlanError, match=r"measured was nothing of fp8\. Calibrate with policy='fp8'"):
        plain.predict(plan)
    assert plain.predict(edited(plan, (), (), (), ())) > 0
    row = next(row for row in plan.nodes if row.op == "gelu")
    nodes = [replace(row, roles={FORWARD: FP8}) if each is row else each for each in plan.nodes]
    with pytest.raises(PlanError, match="runs gelu in fp8, forward, which was not measured"):
        cal.predict(replace(plan, nodes=nodes))


def test_a_device_without_fp8_has_nothing_to_choose() -> None:
    slow = DeviceProfile("a CPU", "cpu", {"float32": 1e9, "bfloat16": 1e9, "float16": 1e9}, 1e9, 1e-6)
    assert Fp8Cost.of(slow, BF16) is None
    with pytest.raises(
        amp_fx.OptionsError, match=r"nothing to choose: cpu a CPU has no fp8 rate\. Plan for a GPU"
    ):
        amp_fx.calibrate(MLP(*SIZES), torch.randn(32, 32), policy="fp8", profile=slow)
    with pytest.raises(amp_fx.OptionsError, match="fp8='rowwise' is about policy 'fp8'"):
        amp_fx.calibrate(MLP(*SIZES), torch.randn(32, 32), fp8="rowwise")


def test_rules_keep_calls_from_fp8_whatever_was_measured() -> None:
    policy = {"base": "fp8", "rules": [{"module": r"layers\.1", "precision": "low"}]}
    torch.manual_seed(0)
    found = amp_fx.calibrate(MLP(*SIZES), torch.randn(32, 32), policy=policy, profile="off")
    assert roles(found.plan(100, verify=False).plans[0]) == [(FORWARD, WEIGHT), (), ROLES, ()]


def test_weights_are_not_held_low_for_a_plan_that_reads_them_in_fp8(made: Plan) -> None:
    found = step(made, weights="cache")
    assert tuple(map(len, found.scaled())) == (3, 5)
    assert not any(given.copy_of for given in found.plan.inputs)


def test_a_model_of_one_linear_has_a_plan() -> None:
    cal = amp_fx.calibrate(
        nn.Linear(16, 16), torch.randn(16, 16), lambda y: y.square().mean(), policy="fp8", profile="off"
    )
    assert "nothing: it would run nothing in fp8" in str(cal)
    assert not any(row.fp8_roles for row in cal.plan(100, verify=False).plans[0].nodes)
