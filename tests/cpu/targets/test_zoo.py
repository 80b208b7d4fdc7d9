"""The zoo compiled for an H100 that is not there: it compiles, and moves and saves no more than autocast's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoo
from amp_fx.errors import WeightsError
from amp_fx.targets.tracing import TracedGraph
from small_models import Parts
from targets import OFF, Facts, facts, needs_a_target, process, quick_ones, trace_case, traced
from versions import IS_2_11

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]


TRAINING = {
    "bf16": OFF,
    "fast": {**OFF, "policy": "fast"},
    "fp16": {**OFF, "dtype": "float16", "scaler": "default"},
    "fast fp16": {**OFF, "policy": "fast", "dtype": "float16", "scaler": "default"},
}


def compiled_by_autocast(graphs: Any) -> Facts:
    return process().call("targets:compiled_at_equal_results", graphs)


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
