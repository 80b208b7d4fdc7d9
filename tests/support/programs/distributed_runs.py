"""Programs that run on several processes with gloo, and :func:`on_processes`, which runs them from a test."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from amp_fx import GradScaler, record
from support.models import zoo
from support.tracing.captured_graphs import DEFAULTS, plans, without_inductor

BF16 = {**DEFAULTS, "dtype": "bfloat16"}
SCALED = {**DEFAULTS, "dtype": "float16", "scaler": "default"}
#: rows of the global batch and their width
ROWS, WIDTH = 8, 256


def on_processes(count: int, program: Callable[..., Any], folder: Path, *args: Any) -> list[dict[str, Any]]:
    """Runs a program of this file in processes that meet in a folder; returns what each returned, by rank."""
    spawn(_process, (count, str(folder), program, args), nprocs=count)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _process(rank: int, count: int, folder: str, program: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # the loopback interface: a machine without a network has no other
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    try:
        torch.save(program(*args), Path(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Blocks(nn.Module):
    """Three equal blocks: compiled one by one they share one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def global_batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(steps)]


def my_rows(batch: Tensor) -> Tensor:
    """What this process has of a global batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def new_model() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


def wrapped(kind: str, model: Blocks, options: dict[str, Any]) -> nn.Module:
    """The model as the README says to compile it for ``"ddp"`` or ``"fsdp2"``."""
    if kind == "ddp":
        # a bucket a block: Dynamo cuts the graph there
        ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        return torch.compile(ddp, backend="amp_fx", options=options)  # type: ignore[return-value]
    return sharded(model, options, MixedPrecisionPolicy(reduce_dtype=torch.float32))


def sharded(model: Blocks, options: dict[str, Any], precision: MixedPrecisionPolicy) -> Blocks:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        block.compile(backend="amp_fx", options=options)
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def whole(parameter: Tensor) -> Tensor:
    """A parameter as it was before sharding."""
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()  # type: ignore[attr-defined]


def state(model: nn.Module) -> dict[str, Any]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    parameters = {name: whole(p) for name, p in model.named_parameters()}
    return {"parameters": parameters, "dtypes": {p.dtype for p in (*model.parameters(), *gradients)}}


def scaled_training(kind: str, bad_step: int) -> dict[str, Any]:
    """Four steps in fp16; in one of them process 1 alone has an overflow."""
    model = new_model()
    net = wrapped(kind, model, SCALED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=1024.0)
    seen: dict[str, list[Any]] = {"taken": [], "scales": [], "reductions": [], "names": []}
    graphs = 0
    for step, batch in enumerate(global_batches(4)):
        x = my_rows(batch)
        if step == bad_step and dist.get_rank() == 1:
            x = x * float("inf")
        optimizer.zero_grad()
        with record() as recording:
            scaler.scale(net(x).square().mean()).backward()
        graphs += len(recording.plans)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            scaler.step(optimizer)
        sizes = [call.args[0].nbytes for call in all_reduce.call_args_list]
        scaler.update()
        now = (scaler.step_taken(optimizer), scaler.get_scale(), sizes, scaler.first_nonfinite())
        for values, value in zip(seen.values(), now, strict=True):
            values.append(value)
    return {"graphs": graphs, **seen, **state(model)}


def take_step(optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor]) -> float:
    """Takes a step; its loss, averaged over processes."""
    optimizer.zero_grad()
    loss = loss_of()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.data)
    return loss.item() / dist.get_world_size()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> list[float]:
    """Losses of the global batches. The last one is uneven: process 0 has three rows in four."""
    losses = []
    for step, batch in enumerate(batches):
        rows = my_rows(batch)
        if step == len(batches) - 1:
            rows = (batch[: ROWS * 3 // 4], batch[ROWS * 3 // 4 :])[dist.get_rank()]
        # gradients are averaged over processes; rows count alike whoever has them
        share = dist.get_world_size() / batch.numel()
        losses.append(take_step(optimizer, lambda rows=rows, by=share: net(rows).square().sum() * by))
    return losses


def trained_and_resumed(kind: str) -> dict[str, Any]:
    """Four steps in bf16; the last two again, from a checkpoint; and what else the kind has."""
    batches = global_batches(4)
    model = new_model()
    net = wrapped(kind, model, BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = train(net, optimizer, batches[:2])
    # FSDP2's state dict has the shards of this process; a checkpoint on disk is torch's business
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses += train(net, optimizer, batches[2:])
    other = new_model()
    net = wrapped(kind, other, BF16)
    other.load_state_dict(saved[0])
    resumed_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    resumed_optimizer.load_state_dict(saved[1])
    resumed = train(net, resumed_optimizer, batches[2:])
    others = compressed() if kind == "ddp" else owned_by_fsdp()
    return {"losses": losses, "resumed": resumed, "other": others, **state(model)}


# not annotated: DDP compares annotations with its types, and they are texts in this file
def in_bf16(process_group, bucket):
    """A communication hook that sends gradients in bf16, as torch's own does where it has NCCL."""
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(sent, group=process_group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


def compressed() -> dict[str, Any]:
    model = new_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    ddp.register_comm_hook(None, in_bf16)
    net = torch.compile(ddp, backend="amp_fx", options=BF16)
    losses = train(net, torch.optim.AdamW(model.parameters(), lr=1e-3), global_batches(3))  # type: ignore[arg-type]
    return {"losses": losses}


def owned_by_fsdp() -> dict[str, Any]:
    """FSDP2 with a ``param_dtype`` of its own: weights come into the graphs in bf16."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(new_model(), BF16, precision)
    with record() as recording:
        losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), global_batches(3))
    inputs = [given for plan in recording.plans for given in plan.inputs if given.parameter]
    return {
        "losses": losses,
        "weights": {given.dtype for given in inputs},
        "casts": [cast.value for plan in recording.plans for cast in plan.casts],
    }


#: attention as two products around a softmax, whatever this CPU's rates are
PRODUCTS = {"op": "scaled_dot_product_attention", "precision": "low", "implementation": "products"}
ATTENDING = {**BF16, "policy": {"base": "autocast", "rules": [PRODUCTS]}}


def new_gpt2() -> Any:
    """A GPT-2 of two layers that computes its blocks once more in the backward."""
    model: Any = copy.deepcopy(zoo.make("gpt2").model)
    model.activation_checkpointing_enable()
    return model.train()


def global_tokens(steps: int) -> list[Tensor]:
    """The same ones in each step: there is nothing else to learn of random tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(128, (ROWS, 32), generator=generator)] * steps


def attending_training(kind: str) -> dict[str, Any]:
    """Three steps of that GPT-2, compiled whole inside of DDP, or block by block inside of FSDP2."""
    model = new_gpt2()
    net: Any = model
    if kind == "ddp":
        # Dynamo does not cut a graph with recomputed blocks into DDP's buckets
        torch._dynamo.config.optimize_ddp = False
        net = torch.compile(DistributedDataParallel(model), backend="amp_fx", options=ATTENDING)
    else:
        for block in model.transformer.h:
            block.compile(backend="amp_fx", options=ATTENDING)
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with record() as recording:
        rows = [my_rows(batch) for batch in global_tokens(3)]
        losses = [take_step(optimizer, lambda x=x: net(input_ids=x, labels=x).loss) for x in rows]
    attention = [row for plan in recording.plans for row in plans(plan, "scaled_dot_product_attention")]
    return {
        "losses": losses,
        "products": [row.computed_by == "products" for row in attention],
        "fallbacks": [plan.fallback for plan in recording.plans],
        **state(model),
    }


def parallel_training(kind: str) -> dict[str, Any]:
    """Three steps with tensor parallelism: over all processes (``"tp"``), or over pairs and FSDP2 across.

    Without Inductor: what is asked is what amp_fx places, and what the collectives make of it.
    """
    model = new_model()
    shards = {"tp": 1, "fsdp2 + tp": 2}[kind]
    mesh = init_device_mesh("cpu", (shards, dist.get_world_size() // shards), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        block.compile(backend="amp_fx", options=BF16, fullgraph=True)
        if shards > 1:
            fully_shard(block, mesh=mesh["dp"])
    if shards > 1:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rows = [batch.chunk(shards)[mesh["dp"].get_local_rank()] for batch in global_batches(3)]
    with without_inductor(), record() as recording:
        losses = [take_step(optimizer, lambda x=x: model(x).square().mean()) for x in rows]
    return {
        "losses": losses,
        "linears": {row.dtype for plan in recording.plans for row in plans(plan, "linear")},
        "sums": {row.dtype for plan in recording.plans for row in plans(plan, "redistribute")},
        "graphs": len(recording.plans),
        "fallbacks": [plan.fallback for plan in recording.plans],
        **state(model),
    }
