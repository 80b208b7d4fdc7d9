"""The zoo through ``backend="amp_fx"``: eager's dtypes, at least autocast's accuracy, really low precision.

Of most models code is generated in the slow tests alone: otherwise their graphs run op by op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from support.checks.step_errors import (
    AMP_FX,
    AUTOCAST,
    EAGER_AUTOCAST,
    FP32,
    FP64,
    Arm,
    Run,
    run,
    wrong_gradients,
)
from support.models import zoo
from support.tracing.captured_graphs import without_inductor

#: of these code is generated in every run
GENERATED = ("mlp",)

#: attention spelled out differs in what its backward saves
IN_INFERENCE = [name for name in zoo.CASES if not name.endswith("_eager_attention")]


def _models(names: Iterable[str]) -> pytest.MarkDecorator:
    """Each model op by op, and with generated code."""
    slow = pytest.mark.slow
    cases = [pytest.param(name, id=name, marks=() if name in GENERATED else slow) for name in names]
    others = [name for name in names if name not in GENERATED]
    # autocast raises for an nn.LSTM on other CPUs
    cases += [pytest.param(n, id=f"{n}-op by op", marks=[pytest.mark.bf16] * (n == "lstm")) for n in others]
    return pytest.mark.parametrize("name", cases)


@pytest.fixture
def generate(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether code is generated in a test of :func:`_models`."""
    generates = "op by op" not in request.node.name
    with contextlib.nullcontext() if generates else without_inductor():
        yield generates


def _run(case: zoo.Case, arm: Arm, mode: Any) -> Run:
    return run(case, arm, mode)[0]


@pytest.mark.quick_rows("mlp", "gpt2-op by op", "resnet-op by op", "decoder-op by op", "waveform-op by op")
@_models(zoo.CASES)
def test_training_keeps_dtypes_reaches_every_parameter_and_is_as_accurate_as_autocast(
    name: str, generate: bool
) -> None:
    case, arms = zoo.make(name), (FP64, FP32, AUTOCAST if generate else EAGER_AUTOCAST, AMP_FX)
    exact, fp32, autocast, ours = (_run(case, arm, torch.enable_grad) for arm in arms)
    for part in ("outputs", "parameters", "buffers", "gradients"):
        assert ours.dtypes(part) == fp32.dtypes(part), part
    assert set(ours.dtypes("gradients").values()) == {torch.float32}
    assert all(gradient.isfinite().all() for gradient in ours.gradients.values())
    # buffers are running statistics
    for part in ("loss", "outputs", "gradients", "buffers"):
        assert ours.error(part, exact) <= _allowed(autocast.error(part, exact)), part
    assert not wrong_gradients(ours.gradients, autocast.gradients, exact.gradients)
    assert ours.error("gradients", exact) > _explained_by_fp32(fp32.error("gradients", exact))


@pytest.mark.quick_rows("mlp", "gpt2-op by op", "conv_net-op by op", "pyramid-op by op")
@_models(IN_INFERENCE)
@pytest.mark.usefixtures("generate")
def test_inference_keeps_dtypes_and_values_and_is_as_accurate_as_autocast(name: str) -> None:
    case, arms = zoo.make(name), (FP64, FP32, EAGER_AUTOCAST, AMP_FX)
    exact, fp32, autocast, ours = (_run(case, arm, torch.no_grad) for arm in arms)
    assert ours.dtypes("outputs") == fp32.dtypes("outputs")
    for part in ("loss", "outputs"):
        assert ours.error(part, exact) <= _allowed(autocast.error(part, exact)), part
    if case.low_in_eval:
        assert ours.error("outputs", exact) > _explained_by_fp32(fp32.error("outputs", exact))
    torch.testing.assert_close(ours.parameters, fp32.parameters, rtol=0, atol=0)
    torch.testing.assert_close(ours.buffers, fp32.buffers, rtol=0, atol=0)


@pytest.mark.quick_rows("mlp")
@_models(["conv_net", "gpt2", "mlp"])
@pytest.mark.usefixtures("generate")
def test_inference_mode_gives_what_no_grad_gives(name: str) -> None:
    case = zoo.make(name)
    eager, ours = (_run(case, arm, torch.inference_mode) for arm in (FP32, AMP_FX))
    assert ours.dtypes("outputs") == eager.dtypes("outputs")
    torch.testing.assert_close(ours.outputs, _run(case, AMP_FX, torch.no_grad).outputs, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_training_with_dropout_drops_as_often_as_eager_does() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Dropout(0.25))
    outputs = torch.compile(model, backend="amp_fx")(torch.randn(64, 64))
    outputs.square().sum().backward()
    assert outputs.dtype == torch.float32
    assert (outputs == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def _allowed(autocast_error: float) -> float:
    """Rounding falls differently in two programs: 1.25x, and 1e-3 where autocast was lucky."""
    return 1.25 * autocast_error + 1e-3


def _explained_by_fp32(fp32_error: float) -> float:
    """Above it an error is due to bf16: with a unit roundoff of 2**-9, a single op moves results by more."""
    return max(5 * fp32_error, 2.0**-14)
