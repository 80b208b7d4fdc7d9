"""Runs a row of the table of combined options as a program does: a call, changed weights, a batch of another size."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import amp_fx
from support.checks.below_16_bits import FP8_CPU, INT8_CPU
from support.checks.option_pairs import AXES, Row, options_of
from support.models.for_options import Model, make
from support.tracing.captured_graphs import autocast_in, op_by_op

Prepare = Callable[[Model], Callable[..., Any]]

#: what a session does before each of its calls, and the sizes of their batches
STEPS = {"the first call": 4, "after weights have changed": 4, "with another batch size": 6}

#: of a loop's loss in fp16
_SCALE = 128.0


@dataclass(frozen=True)
class Seen:
    """What one call gives: outputs, gradients, and buffers after it."""

    outputs: list[Tensor]
    gradients: list[Tensor]
    buffers: list[Tensor]


def check(row: Row, folder: Path, *, generate: bool = True, device: str = "cpu") -> None:
    """Runs a row, and once more from a warm cache; without generated code, graphs run op by op, and once.

    Fails where a result is worse than eager autocast allows, has another dtype, or is another one from a warm cache.
    """
    options = with_files(row, folder, device)
    with contextlib.nullcontext() if generate else op_by_op():
        cold = compiled(row, options, device)
        if (device, row["numerics"], row["profile"], row["policy"]) == ("cpu", "eager", "off", "autocast"):
            _check_bits(row, cold)
    eager = session(row, lambda model: model, AXES["autocast"][row["autocast"]], device=device)
    got, wanted = ([[value.dtype for value in _tensors(seen)] for seen in run] for run in (cold, eager))
    assert got == wanted, f"outputs, gradients and buffers have dtypes {got}, eagerly {wanted}"
    check_accuracy(row, cold, device)
    if not generate:
        return
    counters.clear()
    warm = compiled(row, options, device)
    # graphs that Inductor freezes are not cached
    assert counters["aot_autograd"]["autograd_cache_saved"] == 0, "compiled again with a warm cache"
    for step, again, found in zip(STEPS, warm, cold, strict=True):
        pairs = zip(_tensors(again), _tensors(found), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), f"{step}: another result from a warm cache"


def check_accuracy(row: Row, ours: Sequence[Seen], device: str = "cpu") -> None:
    """Holds a session against fp64, beside eager autocast."""
    autocast, exact = (
        session(row, lambda model: model, _low_dtype(row), device=device),
        session(row, lambda model: model, dtype=torch.float64, device=device),
    )
    for step, found, theirs, wanted in zip(STEPS, ours, autocast, exact, strict=True):
        errors, others = distances(found, wanted), distances(theirs, wanted)
        for part, error in errors.items():
            allowed = _allowed(row, others[part])
            assert error <= allowed, f"{step}: {part} are off by {error:.2e}, allowed {allowed:.2e}"


def compiled(row: Row, options: Mapping[str, Any], device: str = "cpu") -> list[Seen]:
    """The session through amp_fx, compiled anew; options are those of :func:`with_files`."""
    torch._dynamo.reset()
    dynamic = AXES["dynamic"][row["dynamic"]]

    def prepare(model: Model) -> Callable[..., Any]:
        return torch.compile(model, backend="amp_fx", options=dict(options), dynamic=dynamic)

    return session(row, prepare, AXES["autocast"][row["autocast"]], device=device)


def session(
    row: Row, prepare: Prepare, autocast: Any = None, dtype: Any = torch.float32, device: str = "cpu"
) -> list[Seen]:
    """Calls a model at every step of :data:`STEPS`; its weights change after each call."""
    training = row["gradients"] == "train"
    model = make(row["model"]).to(device, dtype).train(training)
    program, enabled = prepare(model), _low_dtype(row) is torch.float16
    # without a scaler in the graph, fp16 has the one that every loop has
    scaler = torch.amp.GradScaler(device, init_scale=_SCALE, enabled=enabled)
    if dtype is torch.float32 and row["scaler"] == "default":
        scaler = amp_fx.GradScaler(device, init_scale=_SCALE)
    optimizer = torch.optim.SGD(model.parameters(), lr=model.rate)
    seen = []
    for step, size in enumerate(STEPS.values()):
        batch = model.batch(size, seed=size).to(device)
        batch = batch.to(dtype) if batch.is_floating_point() else batch
        with AXES["gradients"][row["gradients"]](), autocast_in(autocast, device):
            outputs = program(batch)
            loss = outputs.to(dtype).square().mean()
        if training:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        seen.append(_look(outputs, model))
        if training:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        else:
            _write(model, through_data=step > 0)
    return seen


def with_files(row: Row, folder: Path, device: str = "cpu") -> dict[str, Any]:
    """The options of a row, with a device profile and a plan in files."""
    options = options_of(row)
    if options.get("profile") == "a file" and device == "cuda":
        # it has fp8
        options["profile"] = "off"
    elif options.get("profile") == "a file":
        options["profile"] = str(folder / "profile.json")
        (FP8_CPU if row["profile"] == "with fp8" else INT8_CPU).save(options["profile"])
    if options.pop("plan", None) is not None:
        model, path = make(row["model"]).to(device).train(row["gradients"] == "train"), folder / "plan.json"
        torch._dynamo.reset()
        with autocast_in(AXES["autocast"][row["autocast"]], device):
            if row["plan"] == "measured":
                _calibrated(model, options).save(path)
            else:
                with AXES["gradients"][row["gradients"]]():
                    amp_fx.explain(model, model.batch(4, seed=0).to(device), options=options).save(path)
        options["plan"] = str(path)
    return options


def _calibrated(model: Model, options: Mapping[str, Any]) -> amp_fx.CalibratedPlan:
    """A plan with as much in int8 as may be, whose scales hold what weights will have become in a session."""
    for _ in range(len(STEPS) - 1):
        _write(model, through_data=False)
    device = next(model.parameters()).device
    batches = [model.batch(size, seed=size).to(device) for size in STEPS.values()]
    given: dict[str, Any] = {"profile": "off", **options}
    given = {name: given[name] for name in ("policy", "dtype", "profile") if name in given}
    return amp_fx.calibrate(model, batches, of="outputs", **given).plan(budget=1000, verify=False)


def distances(seen: Seen, exact: Seen) -> dict[str, float]:
    """Relative distance, in L2, of outputs, gradients and buffers."""
    parts = ("outputs", "gradients", "buffers")
    return {part: _distance(getattr(seen, part), getattr(exact, part)) for part in parts}


def _check_bits(row: Row, ours: Sequence[Seen]) -> None:
    """Where nothing but the casts differs: beside Inductor's own autocast, which rounds as eager autocast does."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"emulate_precision_casts": True}
    dynamic = AXES["dynamic"][row["dynamic"]]
    run = functools.partial(torch.compile, options=options, dynamic=dynamic)
    stock = session(row, run, _low_dtype(row))
    # the backward, which is traced under autocast there, is another one
    got, wanted = ours[0].outputs[0].float(), stock[0].outputs[0].float()
    assert torch.equal(got, wanted), f"outputs differ from Inductor's by {(got - wanted).abs().max()}"


def _low_dtype(row: Row) -> torch.dtype:
    """What is low in a row: the program's own autocast comes first."""
    ambient = AXES["autocast"][row["autocast"]]
    return ambient or (torch.float16 if row["dtype"] == "float16" else torch.bfloat16)


def _write(model: nn.Module, *, through_data: bool) -> None:
    """Changes everything that is read, in place."""
    with torch.no_grad():
        for value in filter(torch.is_floating_point, [*model.parameters(), *model.buffers()]):
            (value.data if through_data else value).mul_(1.25)


def _look(outputs: Tensor, model: nn.Module) -> Seen:
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return Seen([outputs.detach().clone()], gradients, [value.clone() for value in model.buffers()])


def _allowed(row: Row, autocast_error: float) -> float:
    """Rounding falls differently in two programs; policies fast, fp8 and int8 round more than autocast does."""
    if row["policy"].startswith("fp8") and row["profile"] == "with fp8":
        return 0.15
    if row["policy"].startswith("int8") and row["gradients"] != "train":
        return 0.05
    return (2.0 if row["policy"].startswith("fast") else 1.25) * autocast_error + 2e-3


def _distance(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    pairs = [(value.double(), wanted.double()) for value, wanted in zip(values, exact, strict=True)]
    wrong = sum((value - wanted).square().sum().item() for value, wanted in pairs)
    norm = sum(wanted.square().sum().item() for _, wanted in pairs)
    return (wrong / norm) ** 0.5 if norm else wrong


def _tensors(seen: Seen) -> list[Tensor]:
    return [*seen.outputs, *seen.gradients, *seen.buffers]
