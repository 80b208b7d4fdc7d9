"""What a program costs on an H100 that is not there: ``python -m benchmarks.counts --target``, loss scaling, and casts
of inputs beside what the cost model charges for them; the zoo compiles, and moves and saves no more than autocast's.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_fx.errors import WeightsError
from amp_fx.instruments.targets.tracing import TracedGraph
from amp_fx.passes import Classify, Constrain, PassContext, PinDtypes, run_passes
from amp_fx.precision.placement.cost import CostModel
from benchmarks.counts import ASSUMED, main
from benchmarks.results import read
from benchmarks.workloads import WORKLOADS
from support.models import zoo
from support.models.small import Parts
from support.programs.target_process import (
    OFF,
    Facts,
    facts,
    needs_a_target,
    process,
    quick_ones,
    trace_case,
    traced,
)
from support.torch_versions import IS_2_11, UP_TO_2_13
from support.tracing.captured_graphs import captured, rewrite

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]


#: what docs/benchmarks.md shows
[RESULTS] = (Path(__file__).parents[3] / "benchmarks" / "results").glob("counts_cuda_h100_*.jsonl")
ARMS = ("autocast", "off", "fast")
GRAPHS = ("forward", "backward")


class Counted(NamedTuple):
    """What the command says of a workload: text, messages, its header and its rows by arm."""

    workload: str
    text: str
    messages: str
    header: dict[str, Any]
    rows: dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=quick_ones(WORKLOADS, "naive_attention"))
def counted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Counted:
    path = tmp_path_factory.mktemp("counts") / "counts.jsonl"
    of = ["--only", request.param, "--modes", "training", "--arms", *ARMS, "freezing"]
    text, messages = process().call(
        "support.programs.target_process:count", ["--target", "cuda:h100", *of, "--json", str(path)]
    )
    header, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return Counted(request.param, text, messages, header["header"], {row["arm"]: row for row in rows})


def test_arms_are_counted_for_a_target_and_the_assumptions_are_printed(counted: Counted) -> None:
    assert "cuda:h100 (H100, sm_90), not in the machine" in counted.text
    assert all(line in counted.text for line in ASSUMED)
    assert counted.header["assumed"] == list(ASSUMED)
    assert tuple(counted.rows) == ARMS
    assert "skipped: arm 'freezing' needs a device" in counted.messages
    moved = {arm: sum(row[graph]["bytes_moved"] for graph in GRAPHS) for arm, row in counted.rows.items()}
    assert moved["fast"] <= moved["off"] < moved["autocast"]


def test_no_program_gets_a_cast_kernel_back(counted: Counted) -> None:
    wanted = counted.workload, "training"
    rows = [row for row in read(RESULTS)[1] if (row["workload"], row["mode"]) == wanted]
    shown = {row["arm"]: row for row in rows if row["arm"] in ("off", "fast")}
    assert len(shown) == 2
    for (arm, before), graph in itertools.product(shown.items(), GRAPHS):
        for fact in ("casts", "cast_bytes", "bytes_moved"):
            assert counted.rows[arm][graph][fact] <= before[graph][fact], (arm, graph)


def test_an_unknown_target_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--target", "cuda:h10"])
    assert "'cuda:h100'" in capsys.readouterr().err


# ---- loss scaling ----


#: at most so many times the bytes of a step without a scaler
OF_PLAIN = {"naive_attention": 1.04, "gpt2": 1.08, "bert": 1.09, "resnet": 1.11}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_ones(OF_PLAIN, "naive_attention"))
def test_a_step_takes_fewer_kernels_and_bytes_than_with_torchs_scaler(name: str) -> None:
    arms = ("autocast_scaler", "amp_fx_fp16", "amp_fx_scaler")
    theirs, plain, ours = (
        process().call("support.programs.target_process:counted", name, arm) for arm in arms
    )
    autocast, scaled = theirs.forward + theirs.backward, ours.forward + ours.backward
    assert scaled.kernels <= autocast.kernels
    # a kernel that divides reads the scale
    assert scaled.bytes_moved <= autocast.bytes_moved + 4 * scaled.kernels
    assert ours.total.kernels < theirs.total.kernels
    assert ours.total.bytes_moved < 0.99 * theirs.total.bytes_moved
    assert ours.total.bytes_moved < OF_PLAIN[name] * plain.total.bytes_moved


# ---- casts of a graph's inputs ----


def attention(x: Tensor, *projections: Tensor) -> Tensor:
    q, k, v = (F.linear(x, weight).unflatten(-1, (4, 16)).transpose(1, 2) for weight in projections)
    return F.scaled_dot_product_attention(q, k, v)


def biased(x: Tensor, v: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return F.linear(F.linear(x, v, b).relu(), w, c)


SQUARE = (64, 64)
#: what is done with an input and parameters, and the sizes of these
PROGRAMS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "biases": (biased, [(128, 64), SQUARE, (64,), SQUARE, (64,)]),
    "three readers of one input": (attention, [(2, 128, 64), SQUARE, SQUARE, SQUARE]),
    "a weight of two matmuls": (lambda x, w: F.linear(F.linear(x, w).relu(), w), [(128, 64), SQUARE]),
    "a transposed weight": (lambda x, w: x @ w.t(), [(128, 64), SQUARE]),
    "a batch of matmuls": (lambda x, w: x @ w, [(2, 128, 64), (2, 64, 64)]),
    "a convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(4, 16, 32, 32), (16, 16, 3, 3), (16,)]),
    "attention on inputs": (F.scaled_dot_product_attention, [(2, 4, 128, 64)] * 3),
}


def charged(model: nn.Module, x: Tensor) -> int:
    """Bytes, by the cost model: one byte is one unit."""
    gm = captured(model, x, device="cuda")
    run_passes(gm, (PinDtypes(), Classify(), Constrain()), PassContext())
    cost = CostModel(gm.graph, None, training=True)
    nodes = {node.name: node for node in gm.graph.nodes}
    casts = rewrite(model, x, device="cuda").plan.casts
    read = [nodes[cast.value] for cast in casts if cast.to_dtype is torch.bfloat16]
    return sum(cost.cast_kernel(node, torch.bfloat16) for node in read if cost.is_stored(node))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_casts_of_inputs_cost_what_is_charged_for_them(name: str) -> None:
    run, sizes = PROGRAMS[name]
    x, *parameters = (torch.randn(size, requires_grad=True) for size in sizes)
    model = Parts(lambda m, x: run(x, *m.own.parameters()).square().mean(), own=nn.ParameterList(parameters))
    found = facts(traced(model, x), OFF)
    assert set(found.casts) <= {"input", "gradient"}
    # from torch 2.14 on, the second matmul adds the first one's result, which is then widened by itself
    added_by_matmul = name == "a weight of two matmuls" and not UP_TO_2_13
    assert found.counts.cast_bytes == charged(model, x) + added_by_matmul * 6 * 64 * 64


# ---- the zoo ----

TRAINING = {
    "bf16": OFF,
    "fast": {**OFF, "policy": "fast"},
    "fp16": {**OFF, "dtype": "float16", "scaler": "default"},
    "fast fp16": {**OFF, "policy": "fast", "dtype": "float16", "scaler": "default"},
}


def compiled_by_autocast(graphs: Any) -> Facts:
    return process().call("support.programs.target_process:compiled_at_equal_results", graphs)


def assert_no_worse(ours: Facts, autocast: Facts) -> None:
    assert ours.counts.bytes_moved <= autocast.counts.bytes_moved
    assert ours.counts.casts <= autocast.counts.casts
    assert ours.counts.saved_bytes - ours.result_saved_bytes <= autocast.counts.saved_bytes
    assert "activation" not in ours.casts
    assert set(ours.wide) <= {"gradient"}
    assert ours.rounded == 0


@functools.cache
def training(name: str) -> tuple[list[TracedGraph], Facts]:
    graphs = trace_case(zoo.make(name), "train")
    return graphs, compiled_by_autocast(graphs)


# the other arms are put together from these
@pytest.mark.quick_rows("bf16-transformer_layer")
@pytest.mark.parametrize("name", quick_ones(zoo.CASES, "transformer_layer"))
@pytest.mark.parametrize("arm", quick_ones(TRAINING, "bf16", "fast fp16"))
def test_training_compiles_and_is_never_above_autocast(name: str, arm: str) -> None:
    graphs, autocast = training(name)
    ours = facts(graphs, TRAINING[arm])
    if "scaler" not in TRAINING[arm]:
        assert_no_worse(ours, autocast)
    assert ours.counts.extern_kernels == autocast.counts.extern_kernels


@pytest.mark.parametrize("name", quick_ones(zoo.CASES, "transformer_layer"))
def test_inference_compiles_and_is_never_above_autocast(name: str) -> None:
    if IS_2_11 and name == "transformer_layer":
        pytest.skip("torch 2.11 has no fake values of its fast layer, and runs it")
    graphs = trace_case(zoo.make(name), "no_grad")
    assert_no_worse(facts(graphs, {**OFF, "weights": "cast"}), compiled_by_autocast(graphs))
    facts(graphs, {**OFF, "weights": "cache"})


@pytest.mark.parametrize("name", quick_ones(zoo.CASES, "mlp"))
def test_dynamic_shapes_compile(name: str) -> None:
    graphs = trace_case(zoo.make(name), "train", dynamic=True)
    assert_no_worse(facts(graphs, OFF), compiled_by_autocast(graphs))


def test_weights_without_values_cannot_be_folded() -> None:
    graphs = trace_case(zoo.make("mlp"), "no_grad")
    with pytest.raises(WeightsError, match="weights='cache'"):
        facts(graphs, {**OFF, "weights": "freeze"})


def test_checkpointing_compiles() -> None:
    def program(m: Any, x: Tensor) -> Tensor:
        for layer in (m.first, m.second):
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()

    first, second = (nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2))
    graphs = traced(Parts(program, first=first, second=second), torch.randn(32, 64))
    assert_no_worse(facts(graphs, OFF), compiled_by_autocast(graphs))
