"""A program that uses torch without amp_fx: what it computes, and what Dynamo compiles for it; prints JSON.

    python torch_alone.py alone|imported|used [backend]

``imported``: amp_fx is imported first. ``used``: models are trained and asked with amp_fx first.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.optim.optimizer as optimizers
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch._dynamo.convert_frame import ConvertFrame
from torch._dynamo.utils import counters

from support.models.small import Recurrent, UpDown

PACKAGE = Path(__file__).resolve().parents[3] / "amp_fx"


def net() -> nn.Module:
    torch.manual_seed(0)
    return UpDown(16, 32, 8, norm=True)


def batch() -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


def stepping(model: nn.Module, scaler: Any) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    """A whole step of training, and its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def gradients(model: nn.Module) -> list[float]:
    return [p.grad.double().abs().sum().item() for p in model.parameters() if p.grad is not None]


def forward(backend: str) -> list[float]:
    model, x = net(), batch()
    compiled = torch.compile(model, backend=backend)
    with torch.inference_mode():
        modes = [compiled(x).sum().item()]
    with torch.no_grad():
        return [*modes, compiled(x).sum().item()]


def backward_inside(backend: str) -> list[float]:
    model = net()

    def step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        loss.backward()
        return loss.detach()

    compiled = torch.compile(step, backend=backend)
    return [*(compiled(batch()).item() for _ in range(3)), *gradients(model)]


def whole_step(backend: str) -> list[float]:
    step, _ = stepping(net(), torch.amp.GradScaler("cpu", init_scale=4.0))
    compiled = torch.compile(step, backend=backend)
    return [compiled(batch()).item() for _ in range(3)]


def compiled_optimizer(backend: str) -> list[float]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(optimizer.step, backend=backend)
    for _ in range(2):
        loss_of(model, batch()).backward()
        compiled()
    return [p.double().sum().item() for p in model.parameters()]


def compiled_autograd(backend: str) -> list[float]:
    model = net()
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(lambda x: loss_of(model, x).backward(), backend=backend)
        for _ in range(2):
            compiled(batch())
    return gradients(model)


def distributed(backend: str) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        # the loopback interface: a machine without a network has no other
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            model = nn.parallel.DistributedDataParallel(net())
            compiled = torch.compile(model, backend=backend)
            for _ in range(2):
                loss_of(compiled, batch()).backward()
            return gradients(model)
        finally:
            dist.destroy_process_group()


def swapped(backend: str) -> list[float]:
    model, other, x = net(), net(), batch()
    compiled = torch.compile(model, backend=backend)
    loss_of(compiled, x).backward()
    model.zero_grad()
    for mine, new in zip(model.parameters(), copy.deepcopy(other).parameters(), strict=True):
        torch.utils.swap_tensors(mine, new)
    found = [loss_of(compiled, x).item()]
    with mock.patch("torch.__future__._swap_module_params_on_conversion", True):
        model.double().float()
    return [*found, loss_of(compiled, x).item()]


def exported(_: str) -> list[Any]:
    model, x = net(), batch()
    programs = [torch.export.export(model, (x,), strict=strict) for strict in (False, True)]
    return [part for ep in programs for part in (str(ep.graph), ep.module()(x).sum().item())]


def forked(backend: str) -> list[float]:
    model, x = net(), batch()
    compiled = torch.compile(model, backend=backend)
    here = loss_of(compiled, x).item()
    # in the child there is no thread that what other programs have left could wait for when it is freed
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if not child:
            gc.disable()
            # what was compiled before, and something new
            again = torch.compile(lambda x: loss_of(model, x) * 2, backend=backend)
            values = [loss_of(compiled, x).item(), again(x).item()]
            Path(folder, "child").write_text(json.dumps(values))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        return [here, status, *json.loads(Path(folder, "child").read_text())]


def recurrent(backend: str) -> list[float]:
    """A layer that Dynamo gives up, whole and behind what it compiles."""
    model, x = Recurrent(late=True), torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(2))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.125)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        found = [compiled(x).sum().item()]
    compiled(x).sum().backward()
    return [*found, *gradients(model)]


PROGRAMS: tuple[Callable[[str], list[Any]], ...] = (
    forward, backward_inside, whole_step, compiled_optimizer, compiled_autograd, distributed, swapped, exported,
    recurrent,
    # in a build for CUDA, fake tensors let autograd start threads, and no fork can do without them
    *((forked,) if torch.version.cuda is None else ()),
)  # fmt: skip


def use_amp_fx() -> list[str]:
    """Trains and asks models with amp_fx; returns what of amp_fx Dynamo has looked at.

    Afterwards every hook is in torch: there are copies of weights, and a step in fp16 that nobody scales is waited for.
    """
    import amp_fx
    from support.tracing.captured_graphs import without_inductor

    looked_at, convert = list[str](), ConvertFrame.__call__

    def spy(self: ConvertFrame, frame: Any, *args: Any, **kwargs: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            looked_at.append(f"{path.relative_to(PACKAGE)}:{frame.f_code.co_name}")
        return convert(self, frame, *args, **kwargs)

    options = {"profile": "off", "numerics": "eager", "dtype": "float16"}
    kept, x = net(), batch()
    step, optimizer = stepping(net(), amp_fx.GradScaler("cpu"))
    with without_inductor(), mock.patch.object(ConvertFrame, "__call__", spy):
        compiled = torch.compile(step, backend="amp_fx", options={**options, "scaler": "default"})
        for _ in range(3):
            compiled(x)
        compiled = torch.compile(kept, backend="amp_fx", options={**options, "weights": "cache"})
        loss_of(compiled, x).backward()
        with torch.no_grad():
            compiled(x)
    # as long as the process lives
    use_amp_fx.kept = kept, optimizer  # type: ignore[attr-defined]
    return looked_at


def hooked() -> dict[str, Any]:
    """What torch would call, besides its own."""
    handler = torch._dynamo.callback.callback_handler
    lists = handler.start_callbacks, handler.end_callbacks
    hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    skipped = [path for path in trace_rules.SKIP_DIRS if path.startswith(str(PACKAGE))]
    return {"dynamo": list(map(len, lists)), "optimizers": list(map(len, hooks)), "skipped": bool(skipped)}


def run(program: Callable[[str], list[Any]], backend: str) -> dict[str, Any]:
    """What a program computes, and what Dynamo did for it."""
    torch._dynamo.reset()
    counters.clear()
    return {
        "values": program(backend),
        "graphs": dict(counters["stats"]),
        "frames": dict(counters["frames"]),
        "breaks": sum(counters["graph_break"].values()),
    }


if __name__ == "__main__":
    first, backend = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "aot_eager"
    said: dict[str, Any] = {}
    if first == "imported":
        import amp_fx.integrations  # noqa: F401
    libraries = ("accelerate", "transformers", "lightning")
    said["libraries"] = [name for name in libraries if name in sys.modules]
    if first == "used":
        said["looked at"] = use_amp_fx()
    said["hooked"] = hooked()
    programs = PROGRAMS if backend == "aot_eager" else (backward_inside,)
    said.update({program.__name__: run(program, backend) for program in programs})
    print(json.dumps(said))
