"""DDP and FSDP2 on the real engine, two processes, and tensor parallelism, four; gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.programs import distributed_runs
from support.programs.distributed_runs import global_batches, global_tokens, new_gpt2, new_model, on_processes
from support.tracing.captured_graphs import autocast_in


def on_one_process(
    steps: int, optimizer: str, lr: float, skip: int | None = None, dtype: torch.dtype | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of training with the global batch, in fp32 or under eager autocast."""
    model = new_model()
    own = getattr(torch.optim, optimizer)(model.parameters(), lr=lr)
    return trained(model, own, global_batches(steps), lambda x: model(x).square().mean(), dtype, skip)


def trained(
    model: nn.Module,
    own: torch.optim.Optimizer,
    batches: Iterable[Tensor],
    loss_of: Callable[[Tensor], Tensor],
    dtype: torch.dtype | None,
    skip: int | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    for step, batch in enumerate(batches):
        own.zero_grad()
        with autocast_in(dtype):
            loss = loss_of(batch)
        loss.backward()
        if step != skip:
            own.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def distance(got: dict[str, Tensor], exact: dict[str, Tensor], start: Any = None) -> float:
    start = start or dict(new_model().named_parameters())
    return max(((got[n] - exact[n]).norm() / (exact[n] - start[n]).norm()).item() for n in exact)


def assert_same_parameters(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one["parameters"].items():
        assert torch.equal(value, other["parameters"][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_an_overflow_on_one_process_skips_the_step_on_both(kind: str, tmp_path: Path) -> None:
    first, second = on_processes(2, distributed_runs.scaled_training, tmp_path, kind, 1)
    for each in (first, second):
        # one for each of DDP's buckets; one of the first block, whose input has no gradient, and one of the others
        assert each["graphs"] == {"ddp": 3, "fsdp2": 2}[kind]
        assert each["taken"] == [True, False, True, True]
        assert each["scales"] == [1024.0, 512.0, 512.0, 512.0]
        # one reduction of one number in each step
        assert each["reductions"] == [[4]] * 4
    # each says what it found itself
    assert second["names"][1]
    assert first["names"][0] == second["names"][0] == []
    assert_same_parameters(first, second)
    # as one process does that skips this step: parameters moved by the same amounts within fp16's precision
    assert distance(first["parameters"], on_one_process(4, "SGD", 0.1, skip=1)[1]) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_as_one_does_and_resume_where_they_were(kind: str, tmp_path: Path) -> None:
    first, second = on_processes(2, distributed_runs.trained_and_resumed, tmp_path, kind)
    expected, _ = on_one_process(4, "AdamW", 1e-3)
    # bf16 has 8 bits; the loss falls by far more
    assert first["losses"] == pytest.approx(expected, rel=5e-3)
    assert expected[0] - expected[3] > 0.1 * expected[0]
    assert first["losses"] == second["losses"]
    assert first["resumed"] == first["losses"][2:]
    assert first["dtypes"] == {torch.float32}
    assert_same_parameters(first, second)
    if kind == "ddp":
        # gradients sent in bf16
        assert first["other"]["losses"] == second["other"]["losses"]
        assert first["other"]["losses"] == pytest.approx(expected[:3], rel=5e-3)
    else:
        # where FSDP owns precision, weights arrive low and are not cast
        assert first["other"]["losses"] == pytest.approx(expected[:3], rel=1e-2)
        assert first["other"]["weights"] == {torch.bfloat16}
        assert not any("weight" in value for value in first["other"]["casts"])


def on_one_gpt2(dtype: torch.dtype | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """The same of :func:`distributed_runs.attending_training`."""
    model = new_gpt2()
    own = torch.optim.SGD(model.parameters(), lr=0.5)
    return trained(model, own, global_tokens(3), lambda x: model(input_ids=x, labels=x).loss, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_attention_as_products_trains_on_processes_with_recomputed_blocks(kind: str, tmp_path: Path) -> None:
    first, second = on_processes(2, distributed_runs.attending_training, tmp_path, kind)
    losses, exact = on_one_gpt2()
    _, autocast = on_one_gpt2(torch.bfloat16)
    start = dict(new_gpt2().named_parameters())
    assert losses[0] - losses[2] > 0.02 * losses[0]
    for each in (first, second):
        assert {*each["products"]} == {True}
        assert not any(each["fallbacks"])
        assert each["dtypes"] == {torch.float32}
        assert each["losses"] == pytest.approx(losses, rel=2e-3)
        assert distance(each["parameters"], exact, start) <= 1.25 * distance(autocast, exact, start)
    assert_same_parameters(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp", "fsdp2 + tp"])
def test_four_processes_with_tensor_parallelism_train_as_one_does(kind: str, tmp_path: Path) -> None:
    found = on_processes(4, distributed_runs.parallel_training, tmp_path, kind)
    losses, exact = on_one_process(3, "SGD", 1.0)
    _, autocast = on_one_process(3, "SGD", 1.0, dtype=torch.bfloat16)
    assert losses[0] - losses[2] > 0.02 * losses[0]
    for each in found:
        # fp32 weights, low matmuls, nothing left to autocast; equal blocks share their graphs
        assert each["linears"] == each["sums"] == {torch.bfloat16}
        assert each["fallbacks"] == [""] * each["graphs"]
        assert each["dtypes"] == {torch.float32}
        assert each["losses"] == pytest.approx(losses, rel=2e-3)
        # parameters moved as in fp32, no further off than autocast on one process
        assert distance(each["parameters"], exact) <= 1.25 * distance(autocast, exact)
        assert_same_parameters(each, found[0])
