"""Sensitivity files: written and read back, refused where they are wrong, and found by the calls of a graph."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx.compiler.rewriting
from amp_fx import OptionsError, PlanError, Policy
from amp_fx.compiler.settings import Options
from amp_fx.graphs.regions import ambient_regions
from amp_fx.passes import OUTLINE, PassContext, run_passes
from amp_fx.precision.plans.sensitivity import (
    CallSensitivity,
    GraphSensitivity,
    ReadSensitivity,
    Sensitivity,
    slots,
)
from support.tracing.captured_graphs import captured, dynamo_graph, rewrite


def measured(program: Callable[..., Any], *args: Any, value: float | None = 1e-6) -> Sensitivity:
    """The same sensitivity for every call of a program's one graph."""
    gm = captured(program, *args)
    outline = run_passes(gm, OUTLINE, PassContext(training=True))
    outline.training, calls = True, []
    for node in (node for node in gm.graph.nodes if node.op == "call_function"):
        reads = {slot: ReadSensitivity(value, value) for slot, _, _ in slots(node)}
        calls.append(CallSensitivity(node.name, value, value, reads))
    return Sensitivity("program", torch.bfloat16, graphs=[GraphSensitivity(outline, calls)])


def two_matmuls(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(torch.matmul(x, w).relu(), w)


ARGS = torch.randn(8, 8), torch.randn(8, 8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sensitivity.json"


def test_a_sensitivity_file_reads_back_as_it_was_written_levels_below_16_bits_included(path: Path) -> None:
    sensitivity = measured(two_matmuls, *ARGS, value=1 / 3)
    call = sensitivity.graphs[0].calls[0]
    call.gradient, sensitivity.level = None, "rowwise"
    call.roles = {"forward": {"input": 1e-4, "weight": 2e-4}, "gradient of its weight": {"input": None}}
    sensitivity.save(path)
    read = Sensitivity.load(path)
    assert read == sensitivity
    # an overflow is null, which every JSON reader takes; it has no rates
    text = path.read_text()
    assert "Infinity" not in text
    assert not {"bandwidth", "peak", "launch"} & set(json.loads(text))
    first, second, *_ = read.graphs[0].calls
    assert first.below("forward") == pytest.approx(3e-4)
    # it overflows, or was not measured
    assert first.below("gradient of its weight") == first.below("gradient of its input") == math.inf
    assert second.below("forward") == math.inf


def test_of_several_states_the_largest_sensitivity_of_each_rounding_counts(path: Path) -> None:
    states = [measured(two_matmuls, *ARGS, value=value) for value in (1e-6, 2e-6)]
    states[0].graphs[0].calls[1].value = None
    for state, (x, w) in zip(states, ((1e-4, 5e-4), (3e-4, None)), strict=True):
        state.level = "rowwise"
        state.graphs[0].calls[0].roles = {"forward": {"input": x, "weight": w}}
    worst = Sensitivity.worst([*states, states[0]])
    first, second, *_ = worst.graphs[0].calls
    assert (first.value, second.value, second.gradient) == (2e-6, None, 2e-6)
    assert first.roles == {"forward": {"input": 3e-4, "weight": None}}
    assert (worst.level, worst.states, worst.batches) == ("rowwise", 3, 3)
    assert all((read.value, read.gradient) == (2e-6, 2e-6) for read in first.reads.values())
    worst.save(path)
    assert Sensitivity.load(path) == worst
    # they have to be measured alike
    state = measured(two_matmuls, *ARGS)
    for other, named in (
        (replace(state, level="tensorwise"), "none, tensorwise"),
        (replace(state, of="outputs"), "gradients, outputs"),
        (replace(state, dtype=torch.float16), "bfloat16, float16"),
    ):
        with pytest.raises(PlanError, match=named):
            Sensitivity.worst([state, other])


@pytest.mark.parametrize(
    ("change", "of_a_call", "message"),
    [
        ({}, {"roles": {"forward": 1.0}}, r"calls\[0\].roles.forward.*object"),
        ({}, {"value": "x"}, r"calls\[0\].value.*float"),
        ({"version": 0}, {}, "0"),
        ({"format": "amp_fx plan"}, {}, "sensitivity"),
    ],
)
def test_the_wrong_field_of_a_file_is_named(path: Path, change: Any, of_a_call: Any, message: str) -> None:
    data = json.loads(json.dumps({**measured(two_matmuls, *ARGS).to_dict(), **change}))
    data["graphs"][0]["calls"][0].update(of_a_call)
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=message):
        Sensitivity.load(path)


def test_a_policy_with_sensitivity_prints_the_form_it_parses(path: Path) -> None:
    policy = Policy.parse({"base": "autocast", "sensitivity": str(path), "budget": 0.5})
    assert Policy.parse(str(policy)) == policy
    assert policy.budget == 0.5
    # plans of a policy without sensitivity are what they were
    assert str(Policy()) == "autocast"
    assert Policy().to_dict() == {"base": "autocast", "rules": []}


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"budget": 1.0}, "'sensitivity'"),
        ({"sensitivity": 7}, "7"),
        ({"sensitivity": "sensitivity.json", "budget": -1}, "budget.*-1"),
        ({"sensitivity": "sensitivity.json", "budget": True}, "budget.*True"),
        ({"sensitivity": "sensitivity.json", "budget": float("nan")}, "budget.*nan"),
        ({"sensitivity": "sensitivity.json", "budgt": 1.0}, "'budgt'.*'budget'"),
    ],
)
def test_a_wrong_policy_is_refused(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        Policy.parse(policy)


def test_a_missing_file_and_contradictions_with_sensitivity_are_refused(path: Path) -> None:
    with pytest.raises(PlanError, match=r"calibrate\(...\).save\('nowhere.json'\)"):
        Options.parse(None, {"policy": {"sensitivity": "nowhere.json"}})
    measured(two_matmuls, *ARGS).save(path)
    policy = {"policy": {"sensitivity": str(path)}}
    with pytest.raises(OptionsError, match=r"bfloat16.*float16"):
        Options.parse(None, {**policy, "dtype": "float16"})
    with pytest.raises(OptionsError, match="numerics='eager'"):
        Options.parse(None, {**policy, "numerics": "eager"})
    assert Options.parse(None, policy).low_dtype("cpu") is torch.bfloat16


def test_policy_fp8_takes_a_sensitivity_file_that_has_fp8(path: Path) -> None:
    sensitivity = measured(two_matmuls, *ARGS)
    sensitivity.save(path)
    policy = {"base": "fp8", "sensitivity": str(path), "budget": 8}
    with pytest.raises(OptionsError, match="policy='fp8'"):
        Options.parse(None, {"policy": policy})
    sensitivity.level = "tensorwise"
    sensitivity.save(path)
    parsed = Options.parse(None, {"policy": policy, "fp8": "tensorwise"})
    assert parsed.policy.budget == 8
    assert Policy.parse(str(parsed.policy)) == parsed.policy
    with pytest.raises(OptionsError, match=r"'tensorwise'.*'rowwise'"):
        Options.parse(None, {"policy": policy, "fp8": "rowwise"})


def test_a_graph_is_found_by_its_calls_and_other_batch_sizes_do_not_matter(path: Path) -> None:
    (graph,) = measured(lambda x, w: x.t().contiguous() @ w, *ARGS).graphs
    assert "contiguous" in {call.name for call in graph.calls}
    assert graph.renamed(graph.outline) == graph.calls
    sensitivity = measured(two_matmuls, *ARGS)
    sensitivity.graphs[0].calls[0].value = None
    sensitivity.save(path)
    options = {"policy": {"sensitivity": str(path), "budget": 1.0}}
    found = rewrite(two_matmuls, torch.randn(64, 8), torch.randn(8, 8), options=options)
    assert found.dtypes("matmul") == ["float32", "bfloat16"]


def test_of_equal_graphs_the_log_says_which_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    graphs = [measured(two_matmuls, *ARGS, value=value).graphs[0] for value in (1e-6, 2e-6)]
    for at, graph in enumerate(graphs):
        graph.outline.graph = f"0/{at}"
    sensitivity = Sensitivity("program", torch.bfloat16, graphs=graphs)
    for at, graph in enumerate(graphs):
        # other programs were compiled first
        assert sensitivity.graph(replace(graph.outline, graph=f"5/{at}")) is graph
    assert "same calls" not in caplog.text
    assert sensitivity.graph(replace(graphs[1].outline, graph="5/2")) is graphs[0]
    assert "graphs 0/0, 0/1" in caplog.text


def test_a_model_that_has_moved_on_is_told_by_name(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layers = [nn.Linear(8, 8) for _ in range(5)]
    before = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    measured(before, torch.randn(4, 8), value=None).save(path)
    opts = Options.parse(None, {"policy": {"sensitivity": str(path)}, "profile": "off"})
    regions = ambient_regions({"cpu": torch.bfloat16})
    # what was measured overflows in 16 bits; the rest is placed by the policy's list
    gm = dynamo_graph(nn.Sequential(layers[0], nn.Tanh(), layers[1], layers[2]), torch.randn(4, 8))
    _, plan = amp_fx.compiler.rewriting.rewrite(gm, regions, opts, training=True)
    assert [row.dtype for row in plan.nodes if row.flops] == [torch.float32, torch.float32, torch.bfloat16]
    assert all(text in caplog.text for text in ("tanh (1 tanh)", "linear_2 (3 linear)", "relu (1 relu)"))
    gm = dynamo_graph(nn.Sequential(nn.Sequential(*layers)), torch.randn(4, 8))
    with pytest.raises(PlanError, match=r"linear \(0.0 linear\) is new; linear \(0 linear\) is gone"):
        amp_fx.compiler.rewriting.rewrite(gm, regions, opts, training=True)
    # calibration is about gradients: what is only evaluated is placed by the policy's list
    _, plan = amp_fx.compiler.rewriting.rewrite(gm, regions, opts)
    assert {row.dtype for row in plan.nodes} == {torch.bfloat16}
