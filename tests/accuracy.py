"""How far an arm (fp32 eager, compiled autocast, amp_fx) is from fp64 on a case of the zoo."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from amp_fx.reports.step import plain, relative_error
from zoo import Case

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


def compare(case: Case, mode: Mode, baseline: Arm) -> Comparison:
    """Runs a case in fp64 and fp32 eagerly, in ``baseline`` and by amp_fx."""
    exact, *runs = (run(case, arm, mode) for arm in (FP64, FP32, baseline, AMP_FX))
    return Comparison(runs[0], runs[2], *(_error(each, exact) for each in runs))


def run(case: Case, arm: Arm, mode: Mode) -> Run:
    """One step of a copy of the model: forward, loss and backward, or the forward alone in eval mode."""
    # Dynamo shares compiled code between all instances of a class, so that without a reset
    # an arm could run the code that another arm compiled.
    torch._dynamo.reset()
    model = copy.deepcopy(case.model).to(arm.dtype).train(mode == "train")
    batch = {
        name: value.to(arm.dtype) if value.is_floating_point() else value
        for name, value in case.inputs(0).items()
    }
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    dynamo = torch._dynamo.config.patch(**case.dynamo) if case.dynamo else contextlib.nullcontext()
    with dynamo, _MODES[mode](), torch.autocast("cpu", arm.autocast, enabled=arm.autocast is not None):
        outputs = case.run(_compiled(case, model, arm), batch)
        loss = case.loss_fn(outputs, batch)
    if mode == "train":
        loss.backward()
    leaves = tree_leaves_with_path(plain(outputs))
    return Run(
        loss=loss.double().item(),
        outputs={keystr(path): leaf.detach() for path, leaf in leaves if isinstance(leaf, Tensor)},
        gradients={name: p.grad for name, p in parameters.items() if p.grad is not None},
        parameters=parameters,
        buffers=buffers,
    )


def _compiled(case: Case, model: nn.Module, arm: Arm) -> nn.Module:
    if arm.compile is None:
        return model
    if not case.parts:
        return torch.compile(model, **arm.compile)  # pyright: ignore[reportReturnType]
    for part in case.parts:
        model.set_submodule(part, torch.compile(model.get_submodule(part), **arm.compile))  # pyright: ignore[reportArgumentType]
    return model


def _error(found: Run, exact: Run) -> Error:
    def far(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
        assert ours.keys() == theirs.keys()
        # a returned loss is far larger than small logits and would hide their error; it has its own field
        return relative_error(ours, {name: value for name, value in theirs.items() if value.dim()})

    return Error(
        loss=abs(found.loss - exact.loss) / max(abs(exact.loss), 1e-12),
        outputs=far(found.outputs, exact.outputs),
        gradients=far(found.gradients, exact.gradients),
        buffers=far(found.buffers, exact.buffers),
    )
