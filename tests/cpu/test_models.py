"""The zoo through ``backend="amp_fx"``: eager's dtypes, at least autocast's accuracy, really low precision.

Of most models code is generated in the slow tests alone: otherwise their graphs run op by op.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

import zoo
from amp_fx._torch import has_low_lstm
from amp_fx.reports.step import plain, relative_error
from graphs import DEFAULTS, autocast_in, without_inductor

#: of these code is generated in every run
GENERATED = ("mlp",)

#: attention spelled out differs in what its backward saves
IN_INFERENCE = [name for name in zoo.CASES if not name.endswith("_eager_attention")]


class Arm(NamedTuple):
    """A way to run a model."""

    compile: dict[str, Any] | None = None  # arguments of torch.compile; None: eagerly
    autocast: torch.dtype | None = None  # around the forward and the loss
    dtype: torch.dtype = torch.float32  # of the model and of its floating inputs


FP64, FP32 = Arm(dtype=torch.float64), Arm()
AUTOCAST, EAGER_AUTOCAST = Arm({"backend": "inductor"}, torch.bfloat16), Arm(autocast=torch.bfloat16)
# these models are too small to gain, and the built-in profile would keep them in fp32
AMP_FX = Arm({"backend": "amp_fx", "options": dict(DEFAULTS)})


class Run(NamedTuple):
    """What one step gave, tensors by name in the dtypes they came in."""

    loss: float
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]

    def dtypes(self, part: str) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in getattr(self, part).items()}


def run(case: zoo.Case, arm: Arm, mode: Callable[[], Any]) -> Run:
    """One step of a copy of the model: forward, loss and backward, or the forward alone in eval mode."""
    # Dynamo shares compiled code between all instances of a class: an arm could run another one's
    torch._dynamo.reset()
    trains = mode is torch.enable_grad
    model = copy.deepcopy(case.model).to(arm.dtype).train(trains)
    batch = {k: v.to(arm.dtype) if v.is_floating_point() else v for k, v in case.inputs(0).items()}
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    called: Any = model
    if arm.compile is not None:
        for part in case.parts:
            model.set_submodule(part, torch.compile(model.get_submodule(part), **arm.compile))  # pyright: ignore[reportArgumentType]
        called = model if case.parts else torch.compile(model, **arm.compile)
    with torch._dynamo.config.patch(**case.dynamo), mode(), autocast_in(arm.autocast):
        outputs = case.run(called, batch)
        loss = case.loss_fn(outputs, batch)
    if trains:
        loss.backward()
    leaves = tree_leaves_with_path(plain(outputs))
    return Run(
        loss=loss.double().item(),
        outputs={keystr(path): leaf.detach() for path, leaf in leaves if isinstance(leaf, Tensor)},
        gradients={name: p.grad for name, p in parameters.items() if p.grad is not None},
        buffers=buffers,
        parameters=parameters,
    )


def errors(found: Run, exact: Run) -> dict[str, float]:
    """Relative distances: of the loss, and in L2 over all outputs, gradients and buffers."""
    off = {"loss": abs(found.loss - exact.loss) / max(abs(exact.loss), 1e-12)}
    for part in ("outputs", "gradients", "buffers"):
        ours, theirs = getattr(found, part), getattr(exact, part)
        assert ours.keys() == theirs.keys()
        # a returned loss is far larger than small logits and would hide their error; it has its own
        off[part] = relative_error(ours, {name: value for name, value in theirs.items() if value.dim()})
    return off


def allowed(autocast_error: float) -> float:
    """Rounding falls differently in two programs: 1.25x, and 1e-3 where autocast was lucky."""
    return 1.25 * autocast_error + 1e-3


def explained_by_fp32(fp32_error: float) -> float:
    """Above it an error is due to bf16: with a unit roundoff of 2**-9, a single op moves results by more."""
    return max(5 * fp32_error, 2.0**-14)


def models(names: Iterable[str]) -> pytest.MarkDecorator:
    """Each model op by op, and with generated code."""
    cases = [
        pytest.param(name, id=name, marks=() if name in GENERATED else pytest.mark.slow) for name in names
    ]
    cases += [pytest.param(name, id=f"{name}-op by op") for name in names if name not in GENERATED]
    return pytest.mark.parametrize("name", cases)


@pytest.fixture
def generate(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether code is generated in a test of :func:`models`."""
    generates = "op by op" not in request.node.name
    with contextlib.nullcontext() if generates else without_inductor():
        yield generates


@models(zoo.CASES)
def test_training_keeps_dtypes_reaches_every_parameter_and_is_as_accurate_as_autocast(
    name: str, generate: bool
) -> None:
    case, baseline = zoo.make(name), AUTOCAST if generate else EAGER_AUTOCAST
    exact, fp32, autocast, ours = (
        run(case, arm, torch.enable_grad) for arm in (FP64, FP32, baseline, AMP_FX)
    )
    for part in ("outputs", "parameters", "buffers"):
        assert ours.dtypes(part) == fp32.dtypes(part), part
    assert set(ours.dtypes("gradients").values()) == {torch.float32}
    assert ours.gradients.keys() == fp32.gradients.keys()
    assert all(gradient.isfinite().all() for gradient in ours.gradients.values())
    # buffers are running statistics
    theirs, found = errors(autocast, exact), errors(ours, exact)
    for part, error in found.items():
        assert error <= allowed(theirs[part]), part
    assert found["gradients"] > explained_by_fp32(errors(fp32, exact)["gradients"])


@models(IN_INFERENCE)
def test_inference_keeps_dtypes_and_values_and_is_as_accurate_as_autocast(name: str, generate: bool) -> None:
    if name == "lstm" and not has_low_lstm(torch.bfloat16):
        pytest.skip("nn.LSTM under autocast raises on this CPU")
    case = zoo.make(name)
    exact, fp32, autocast, ours = (
        run(case, arm, torch.no_grad) for arm in (FP64, FP32, EAGER_AUTOCAST, AMP_FX)
    )
    assert ours.dtypes("outputs") == fp32.dtypes("outputs")
    theirs, found = errors(autocast, exact), errors(ours, exact)
    for part in ("loss", "outputs"):
        assert found[part] <= allowed(theirs[part]), part
    if case.low_in_eval:
        assert found["outputs"] > explained_by_fp32(errors(fp32, exact)["outputs"])
    torch.testing.assert_close(ours.parameters, fp32.parameters, rtol=0, atol=0)
    torch.testing.assert_close(ours.buffers, fp32.buffers, rtol=0, atol=0)


@models(["conv_net", "gpt2", "mlp"])
@pytest.mark.usefixtures("generate")
def test_inference_mode_gives_what_no_grad_gives(name: str) -> None:
    case = zoo.make(name)
    eager, ours = (run(case, arm, torch.inference_mode) for arm in (FP32, AMP_FX))
    assert ours.dtypes("outputs") == eager.dtypes("outputs")
    assert all(value.is_inference() for each in (eager, ours) for value in each.outputs.values())
    torch.testing.assert_close(ours.outputs, run(case, AMP_FX, torch.no_grad).outputs, rtol=1e-2, atol=1e-2)


def test_training_with_dropout_drops_as_often_as_eager_does() -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.Dropout(0.25))
    outputs = torch.compile(model, backend="amp_fx")(torch.randn(64, 64))
    outputs.square().sum().backward()
    assert outputs.dtype == torch.float32
    assert (outputs == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
