"""One step of a case of the zoo in several ways, and how far each is from the step in fp64: as a whole, and of each
parameter by itself."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from amp_fx.instruments.step import plain, relative_error, zeroed
from support.models.zoo import Batch, Case


@dataclass(frozen=True)
class Arm:
    """One way to run a model."""

    compile: Mapping[str, Any] | None = None  # arguments of torch.compile; None: eagerly
    autocast: torch.dtype | None = None  # of an ambient torch.autocast around the forward and the loss
    dtype: torch.dtype = torch.float32  # what the model and its floating inputs are converted to first


FP64, FP32 = Arm(dtype=torch.float64), Arm()
AUTOCAST, EAGER_AUTOCAST = Arm({"backend": "inductor"}, torch.bfloat16), Arm(None, torch.bfloat16)
# profile off: these models are too small to gain, and the built-in profile would keep them in fp32
AMP_FX = Arm({"backend": "amp_fx", "options": {"profile": "off", "strict": True}})


@dataclass(frozen=True)
class Run:
    """What one step gave, in the dtypes it came in; the tensors by name."""

    loss: float
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    def dtypes(self, part: str) -> dict[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in getattr(self, part).items()}

    def error(self, part: str, exact: Run) -> float:
        """Relative distance from the fp64 run: of the loss, or in L2 over all tensors of another part."""
        if part == "loss":
            return abs(self.loss - exact.loss) / max(abs(exact.loss), 1e-12)
        ours, theirs = getattr(self, part), getattr(exact, part)
        assert ours.keys() == theirs.keys()
        # a returned loss is far larger than small logits and would hide their error; it is a part of its own
        return relative_error(ours, {name: value for name, value in theirs.items() if value.dim()})


def run(case: Case, arm: Arm, mode: Any, seeds: Sequence[int] = (0,)) -> list[Run]:
    """One step of a copy of the model for each seed: forward, loss and backward; without gradients the forward alone.

    The model is in eval mode where no gradients are wanted. It is compiled once.
    """
    # Dynamo shares compiled code between all instances of a class, so that without a reset
    # an arm could run the code that another arm compiled.
    torch._dynamo.reset()
    model = copy.deepcopy(case.model).to(arm.dtype).train(mode is torch.enable_grad)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    call, found = _compiled(case, model, arm), list[Run]()
    for seed in seeds:
        model.zero_grad()
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(before[name])
        found.append(_step(case, arm, mode, call, case.inputs(seed), parameters, buffers))
    return found


def _step(
    case: Case,
    arm: Arm,
    mode: Any,
    call: nn.Module,
    inputs: Batch,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> Run:
    batch = {
        name: value.to(arm.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    dynamo = torch._dynamo.config.patch(**case.dynamo) if case.dynamo else contextlib.nullcontext()
    # autocast that is switched off is a user's wish, and not the same as none
    autocast = torch.autocast("cpu", arm.autocast) if arm.autocast else contextlib.nullcontext()
    with dynamo, mode(), autocast:
        outputs = case.run(call, batch)
        loss = case.loss_fn(outputs, batch)
    if mode is torch.enable_grad:
        loss.backward()
    leaves = tree_leaves_with_path(plain(outputs))
    named = {keystr(path): leaf.detach().clone() for path, leaf in leaves if isinstance(leaf, Tensor)}
    # AOTAutograd gives zeros to what is behind a result of which there is no gradient, eager code nothing
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in parameters.items()
        if mode is torch.enable_grad
    }
    kept = {name: buffer.clone() for name, buffer in buffers.items()}
    return Run(loss.double().item(), named, gradients, parameters, kept)


def _compiled(case: Case, model: nn.Module, arm: Arm) -> nn.Module:
    if arm.compile is None:
        return model
    if not case.parts:
        return torch.compile(model, **arm.compile)  # pyright: ignore[reportReturnType]
    for part in case.parts:
        model.set_submodule(part, torch.compile(model.get_submodule(part), **arm.compile))  # pyright: ignore[reportArgumentType]
    return model


#: share of the mean size of all gradients below which a gradient is judged by that size: what is left where all of it
#: cancels (the bias in front of a norm, of keys) is rounding
_LEAST = 2.0**-4
#: the same of a gradient that is zero but for rounding in fp64
_CANCELS = 2.0**-40


def wrong_gradients(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], exact: Mapping[str, Tensor], times: float = 2.0
) -> dict[str, str]:
    """Parameters whose gradient is far worse than that of another run, each judged by itself.

    A gradient may be ``times`` as far from the exact one as theirs is, or as all of theirs are together. One that is
    zero where the exact one and theirs are not is always wrong. The bias in front of a norm has none: what cancels is
    as large as its weight's gradient, by which the error counts.
    """
    whole = relative_error(theirs, exact)
    size = math.sqrt(sum(each.double().square().sum().item() for each in exact.values()))
    mean = size / math.sqrt(max(sum(each.numel() for each in exact.values()), 1))
    wrong = _lost(ours, theirs, exact)
    for name, true in exact.items():
        norm = max(true.double().norm().item(), _LEAST * mean * math.sqrt(true.numel()), 1e-30)
        weight = exact.get(f"{name.removesuffix('bias')}weight")
        if weight is not None and true.double().norm() < _CANCELS * size:
            norm = max(norm, weight.double().norm().item())
        error, allowed = (
            (each[name].double() - true.double()).norm().item() / norm for each in (ours, theirs)
        )
        if not error <= times * max(allowed, whole):
            wrong[name] = f"error {error:.2e}, theirs {allowed:.2e}, of all {whole:.2e}"
    return wrong


#: times autocast's error that are allowed, and what is in any case: two roundings to bf16 of the largest value
_TIMES, _NOISE = 1.05, 2.0**-12


def far_off(
    ours: Sequence[Run], exact: Sequence[Run], eager: Sequence[Run], *others: Sequence[Run]
) -> dict[str, Any]:
    """Outputs and gradients of several batches that are less accurate than under autocast, with their errors.

    torch's own faults in generated code, which ``others`` may have, are no excuse: the least error counts.
    """
    failed: dict[str, Any] = {}
    for part in ("outputs", "gradients"):
        found = _error(ours, part, exact)
        theirs = min(_error(each, part, exact) for each in (eager, *others))
        if not found <= _TIMES * theirs + _NOISE:
            failed[part] = f"error {found:.2e}, autocast's {theirs:.2e}, {found / theirs:.3f} times"
    wrong = wrong_gradients(_joined(ours), _joined(eager), _joined(exact))
    for each in zip(ours, eager, exact, strict=True):
        # of one batch: together with those of others it is not zero
        wrong |= _lost(*(one.gradients for one in each))
    if wrong:
        failed[f"{len(wrong)} of {len(exact[0].gradients)} gradients"] = wrong
    return failed


def _lost(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> dict[str, str]:
    return dict.fromkeys({*zeroed(ours, exact)} - {*zeroed(theirs, exact)}, "is zero")


def _joined(runs: Sequence[Run]) -> dict[str, Tensor]:
    """The gradients of all batches, one beside another."""
    return {name: torch.stack([each.gradients[name] for each in runs]) for name in runs[0].gradients}


def _error(runs: Sequence[Run], part: str, exact: Sequence[Run]) -> float:
    """Of several batches together: the root of the mean square."""
    return math.sqrt(
        sum(each.error(part, true) ** 2 for each, true in zip(runs, exact, strict=True)) / len(runs)
    )
