"""``amp_fx.explain`` is for every program that compiles: small models, architectures, and torch's own databases."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx import Report
from support.models import architectures, zoo

#: of every how many-th op and module: with ``DATABASES=1`` in the environment, of all
STEP = int(os.environ.get("DATABASES", "4"))
CASES = {
    **dict.fromkeys(architectures.ARCHITECTURES, architectures.make),
    **dict.fromkeys(zoo.CASES, zoo.make),
}


class Run(nn.Module):
    """A case as one call of a batch."""

    def __init__(self, case: zoo.Case) -> None:
        super().__init__()
        self.model, self.case = case.model, case

    def forward(self, batch: zoo.Batch) -> Any:
        return self.case.run(self.model, batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_model_is_explained_beside_autocast_with_its_times(name: str) -> None:
    case = CASES[name](name)
    with torch._dynamo.config.patch(dict(case.dynamo)):
        report = amp_fx.explain(Run(case), (case.inputs(0),))
    forward = [plan for plan in report.plans if plan.phase == "forward"]
    assert forward
    assert not [plan.fallback for plan in forward if plan.fallback]
    assert all(plan.autocast and plan.seconds for plan in forward if plan.nodes)
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert "torch.autocast" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["ops", "modules"])
def test_calls_of_torchs_databases_are_explained(which: str) -> None:
    # the databases take seconds to import
    from support.ops import torch_databases

    samples = [*getattr(torch_databases, which)(STEP)]
    found = {sample.name: torch_databases.explanation(sample) for sample in samples}
    asked = {name: said for name, said in found.items() if not said.startswith("not asked")}
    assert {name: said for name, said in asked.items() if said != "explained"} == {}
    assert len(asked) > 30


@pytest.mark.parametrize(
    "fails", ["amp_fx.compiler.predicting.constrained", "amp_fx.compiler.rewriting.rewrite"]
)
def test_what_a_report_does_not_know_is_said_with_its_reason(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise amp_fx.PassError("no price for this")

    monkeypatch.setattr(fails, refuse)
    report = amp_fx.explain(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8))
    assert not [plan.fallback for plan in report.plans if plan.fallback]
    assert "not known of graph" in str(report)
    assert "no price for this" in str(report)
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


class Observed(nn.Module):
    """Adds a hook in its first call, and takes what that has seen: as models of transformers have hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.is_hooked = False

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        if not self.is_hooked:
            hook_in(self, seen)
        x = self.first(x)
        return self.last(seen[-1] + x) / len(seen)


def _hook_in(model: Observed, seen: list[Tensor]) -> None:
    model.first.register_forward_hook(lambda *given: seen.append(given[-1]))
    model.is_hooked = True


hook_in: Any = torch.compiler.disable(_hook_in)


def test_hooks_that_a_call_adds_are_gone_afterwards() -> None:
    model = Observed()
    report = amp_fx.explain(model, torch.randn(2, 8))
    assert report.plans
    assert not model.is_hooked
    assert not model.first._forward_hooks


def test_a_lazy_module_is_explained_and_has_no_sizes_afterwards() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4))
    before = torch.random.get_rng_state()
    report = amp_fx.explain(model, torch.randn(2, 6, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [row.shape for row in report.plans[0].inputs if row.parameter] == [(8, 6), (8,), (4, 8), (4,)]
    assert all(isinstance(each, nn.UninitializedParameter) for each in model.parameters())
