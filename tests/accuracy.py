"""How far an arm (fp32 eager, compiled autocast, amp_fx) is from fp64 on a case of the zoo."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zoo import Case

__all__ = ["AMP_FX", "AUTOCAST", "EAGER_AUTOCAST", "FP32", "FP64", "Arm", "Comparison", "Error", "Run"]
__all__ += ["compare", "error_of", "run"]

Mode = Literal["train", "no_grad", "inference_mode"]

_MODES: dict[Mode, Any] = {
    "train": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@dataclass(frozen=True)
class Arm:
    """One way to run a model.

    Attributes:
        compile: keyword arguments of ``torch.compile``, or None to run eagerly.
        autocast: the dtype of an ambient ``torch.autocast`` around the forward and the loss, or None.
        dtype: what the model and its floating inputs are converted to first.
    """

    compile: Mapping[str, Any] | None = None
    autocast: torch.dtype | None = None
    dtype: torch.dtype = torch.float32


FP64 = Arm(dtype=torch.float64)
FP32 = Arm()
AUTOCAST = Arm(compile={"backend": "inductor"}, autocast=torch.bfloat16)
EAGER_AUTOCAST = Arm(autocast=torch.bfloat16)
# profile off: these models are too small to gain, and the built-in profile would keep them in fp32
AMP_FX = Arm(compile={"backend": "amp_fx", "options": {"profile": "off", "strict": True}})


@dataclass(frozen=True)
class Run:
    """What one step gave, in the dtypes it came in; the tensors by name."""

    loss: float
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Error:
    """Relative distance from the fp64 run: of the loss, and in L2 over all outputs (gradients, buffers)."""

    loss: float
    outputs: float
    gradients: float
    buffers: float


@dataclass(frozen=True)
class Comparison:
    """The arms beside each other: errors against fp64, and the runs themselves for their dtypes."""

    fp32: Run
    amp_fx: Run
    fp32_error: Error
    autocast_error: Error
    amp_fx_error: Error


def compare(case: Case, mode: Mode, arm: Arm = AMP_FX, baseline: Arm = AUTOCAST, seed: int = 0) -> Comparison:
    """Runs a case in fp64 and fp32 eagerly, in ``baseline`` and in ``arm``."""
    reference, fp32, low, ours = (run(case, each, mode, seed) for each in (FP64, FP32, baseline, arm))
    return Comparison(
        fp32=fp32,
        amp_fx=ours,
        fp32_error=error_of(fp32, reference),
        autocast_error=error_of(low, reference),
        amp_fx_error=error_of(ours, reference),
    )


def run(case: Case, arm: Arm, mode: Mode, seed: int = 0) -> Run:
    """One step of a copy of the model: forward, loss and backward, or the forward alone in eval mode."""
    # Dynamo shares compiled code between all instances of a class, so that without a reset
    # an arm could run the code that another arm compiled.
    torch._dynamo.reset()
    model = copy.deepcopy(case.model).to(arm.dtype).train(mode == "train")
    batch = {
        name: value.to(arm.dtype) if value.is_floating_point() else value
        for name, value in case.inputs(seed).items()
    }
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    dynamo = torch._dynamo.config.patch(**case.dynamo) if case.dynamo else contextlib.nullcontext()
    with dynamo, _MODES[mode](), torch.autocast("cpu", arm.autocast, enabled=arm.autocast is not None):
        outputs = case.run(_compiled(case, model, arm), batch)
        loss = case.loss_fn(outputs, batch)
    if mode == "train":
        loss.backward()
    return Run(
        loss=loss.double().item(),
        outputs={name: value.detach() for name, value in _named_tensors(outputs)},
        gradients={name: p.grad for name, p in parameters.items() if p.grad is not None},
        parameters=parameters,
        buffers=buffers,
    )


def error_of(result: Run, reference: Run) -> Error:
    """The errors of a run against the fp64 one."""
    return Error(
        loss=abs(result.loss - reference.loss) / max(abs(reference.loss), 1e-12),
        outputs=_relative_l2(_without_scalars(result.outputs), _without_scalars(reference.outputs)),
        gradients=_relative_l2(result.gradients, reference.gradients),
        buffers=_relative_l2(result.buffers, reference.buffers),
    )


def _compiled(case: Case, model: nn.Module, arm: Arm) -> nn.Module:
    if arm.compile is None:
        return model
    if not case.parts:
        return torch.compile(model, **arm.compile)  # pyright: ignore[reportReturnType]
    for part in case.parts:
        model.set_submodule(part, torch.compile(model.get_submodule(part), **arm.compile))  # pyright: ignore[reportArgumentType]
    return model


def _named_tensors(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested dicts (Hugging Face's ModelOutput is one) and sequences, with a name for each."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named_tensors(item, f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _named_tensors(item, f"{name}.{index}")


def _without_scalars(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A returned loss is far larger than small logits and would hide their error; it has its own field."""
    return {name: tensor for name, tensor in tensors.items() if tensor.dim()}


def _relative_l2(values: Mapping[str, Tensor], references: Mapping[str, Tensor]) -> float:
    if values.keys() != references.keys():
        raise AssertionError(f"not the same tensors: {sorted(values.keys() ^ references.keys())}")
    if not values:
        return 0.0
    pairs = [(values[name].double(), reference.double()) for name, reference in references.items()]
    distance = sum((value - reference).square().sum() for value, reference in pairs)
    norm = sum(reference.square().sum() for _, reference in pairs)
    return (torch.as_tensor(distance) / torch.as_tensor(norm)).sqrt().item()
