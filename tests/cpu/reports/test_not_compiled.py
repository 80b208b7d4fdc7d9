"""``amp_fx.explain`` says what of a program is not compiled, why, and what to do."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx import Report
from support.models.small import Parts, Recurrent, UpDown
from support.torch_versions import UP_TO_2_13, UP_TO_2_14
from support.tracing.captured_graphs import plans


def explained(model: nn.Module, *args: Tensor) -> Report:
    return amp_fx.explain(model, *args, options={"profile": "off", "strict": True})


class Own(nn.LSTM):
    """No layer of torch's own."""


REMEDY = "    Call the layer in a method of its own with @torch.compiler.disable: what is around it is compiled then"
INNER = Parts(lambda m, x: m.last(m.inner(x)), inner=Recurrent(late=False), last=nn.Linear(8, 8))
ALONE = nn.LSTM(8, 8, batch_first=True)


@pytest.mark.parametrize(
    ("model", "graphs"),
    [(Recurrent(late=False), 1), (Recurrent(late=True), 2), (INNER, 2), (ALONE, 0)],
    ids=["first", "between", "inner", "alone"],
)
def test_a_recurrent_layer_in_training_is_named_and_what_is_around_it_is_compiled(
    model: nn.Module, graphs: int
) -> None:
    report = explained(model, torch.randn(2, 4, 8))
    assert sum(plan.phase == "forward" for plan in report.plans) == graphs
    assert "Dynamo does not support RNN, GRU, or LSTM" in str(report)
    assert ("casts in the graphs" in str(report)) == bool(graphs)
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


@pytest.mark.skipif(not UP_TO_2_14, reason="Dynamo leaves the layer alone")
def test_what_dynamo_gives_up_is_named_with_its_reason_and_remedy() -> None:
    report = explained(Own(8, 8, batch_first=True), torch.randn(2, 4, 8))
    lines = str(report).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("not compiled"))
    assert "RNN, GRU, or LSTM" in lines[at + 1]
    assert lines[at + 2] == REMEDY
    data = json.loads(json.dumps(report.to_dict()))
    assert Report.from_dict(data) == report
    assert [row["kind"] for row in data["summary"]["advice"]][:1] == ["not compiled"]


@pytest.mark.parametrize("policy", ["autocast", "fast"])
def test_a_report_about_an_lstm_without_gradients_has_it_in_the_graph_beside_autocast(policy: str) -> None:
    with torch.inference_mode():
        report = amp_fx.explain(
            Recurrent(late=True), torch.randn(2, 4, 8), options={"profile": "off", "policy": policy}
        )
    (plan,) = report.plans
    assert plans(plan, "lstm")
    assert not report.graph_breaks
    assert "torch.autocast" in str(report)


def test_what_of_torchs_own_is_compiled_in_place_is_explained_as_it_runs_and_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model.compile(backend="amp_fx")
    report = explained(model, torch.randn(2, 4, 8))
    assert bool(report.plans) is not UP_TO_2_13
    for named in ("Sequential.compile()", "torch.compile(module, backend='amp_fx')"):
        assert (named in str(report)) is UP_TO_2_13
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3)), UpDown(8, 16))
    model = Parts(lambda m, x: m.layers(x), layers=layers)
    for module in model.children():
        for layer in module.children():
            layer.compile(backend="amp_fx")
    notes = explained(model, torch.randn(2, 8)).notes
    assert ["(layers.0 and 2 more)" in row.text for row in notes] == [True] * UP_TO_2_13


def test_a_program_of_which_dynamo_makes_no_graph_says_what_to_look_for_or_names_the_break() -> None:
    with torch.compiler.set_stance("force_eager"):
        report = explained(UpDown(8, 16), torch.randn(4, 8))
    assert "0 graphs" in str(report)
    assert report.graph_breaks == []

    report = explained(Parts(torch.compiler.disable(lambda _, x: x + 1)), torch.randn(4, 8))
    assert str(report).splitlines()[1] == "nothing was compiled"
    (reason,) = report.graph_breaks
    assert "torch.compiler.disable" in reason
