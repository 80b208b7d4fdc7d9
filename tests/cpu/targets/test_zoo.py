"""The zoo compiled for an H100 that is not there: it compiles, and moves and saves no more than autocast's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoo
from amp_fx.errors import WeightsError
from targets import Facts, needs_a_target, process, trace_case

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]


def cases(quick: str) -> list[Any]:
    """One is small, which has linears and attention or linears alone; the others take minutes."""
    return [pytest.param(name, marks=() if name == quick else pytest.mark.slow) for name in zoo.CASES]


OFF = {"profile": "off", "strict": True}
TRAINING = {
    "bf16": OFF,
    "fast": {**OFF, "policy": "fast"},
    "fp16": {**OFF, "dtype": "float16", "scaler": "default"},
    "fast fp16": {**OFF, "policy": "fast", "dtype": "float16", "scaler": "default"},
}
INFERENCE = {weights: {**OFF, "weights": weights} for weights in ("auto", "cast", "cache")}


def compiled(graphs: Any, options: dict[str, Any]) -> Facts:
    return process().call("targets:compiled", graphs, options)


def compiled_by_autocast(graphs: Any) -> Facts:
    return process().call("targets:compiled_at_equal_results", graphs)


def assert_no_worse(ours: Facts, autocast: Facts) -> None:
    assert ours.counts.bytes_moved <= autocast.counts.bytes_moved
    assert ours.counts.casts <= autocast.counts.casts
    assert ours.counts.saved_bytes - ours.result_saved_bytes <= autocast.counts.saved_bytes
    assert "activation" not in ours.casts
    assert set(ours.wide) <= {"gradient"}
    assert ours.rounded == 0


@pytest.mark.parametrize("name", cases("transformer_layer"))
def test_training_compiles_and_is_never_above_autocast(name: str) -> None:
    graphs = trace_case(zoo.make(name), "train")
    autocast = compiled_by_autocast(graphs)
    for arm, options in TRAINING.items():
        ours = compiled(graphs, options)
        if "scaler" not in options:
            assert_no_worse(ours, autocast)
        assert ours.counts.extern_kernels == autocast.counts.extern_kernels, arm


@pytest.mark.parametrize("name", cases("transformer_layer"))
def test_inference_compiles_and_is_never_above_autocast(name: str) -> None:
    graphs = trace_case(zoo.make(name), "no_grad")
    autocast = compiled_by_autocast(graphs)
    for weights, options in INFERENCE.items():
        ours = compiled(graphs, options)
        if weights == "cast":
            assert_no_worse(ours, autocast)


@pytest.mark.parametrize("name", cases("mlp"))
def test_dynamic_shapes_compile(name: str) -> None:
    graphs = trace_case(zoo.make(name), "train", dynamic=True)
    assert_no_worse(compiled(graphs, OFF), compiled_by_autocast(graphs))


def test_weights_without_values_cannot_be_folded() -> None:
    graphs = trace_case(zoo.make("mlp"), "no_grad")
    with pytest.raises(WeightsError, match="weights='cache'"):
        compiled(graphs, {**OFF, "weights": "freeze"})


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


def test_checkpointing_compiles() -> None:
    case = zoo.Case(
        "checkpointed",
        Checkpointed(),
        lambda seed: {"x": torch.randn(32, 64)},
        lambda outputs, batch: outputs,
    )
    graphs = trace_case(case, "train")
    assert_no_worse(compiled(graphs, OFF), compiled_by_autocast(graphs))
