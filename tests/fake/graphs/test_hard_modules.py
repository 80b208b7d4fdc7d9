"""Modules that break graph-level tools, held against eager execution and fp64 as in ``test_hard_graphs.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from amp_fx import Plan, record
from amp_fx._torch import onednn_computes
from amp_fx.graphs.calls import LAYOUTS
from support.checks.whole_program import DOWN, UP, agree, check
from support.models.small import Parts
from support.tracing.captured_graphs import DEFAULTS, plans, without_inductor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
#: bounds the error of fp32 arithmetic behind one rounding to a 16-bit dtype, where autocast has no answer
ONE_ROUNDING = 1e-2

plain_and_autocast = pytest.mark.parametrize("ambient", [None, BF16], ids=["plain", "autocast"])


def low(found: list[Plan], op: str) -> bool:
    """True if every call of an op runs in a low dtype, and there is one."""
    rows = [row for plan in found for row in plans(plan, op)]
    return bool(rows) and all(row.dtype in (BF16, FP16) for row in rows)


def cached(dtype: torch.dtype) -> nn.Module:
    """Attention over a static cache that is written in place, one position per call."""

    def forward(m: Any, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = m.qkv(x).chunk(3, -1)
        m.keys.index_copy_(1, position, k.to(m.keys.dtype))
        m.values[:, position] = v.to(m.values.dtype)
        mask = torch.arange(6) <= position
        return F.scaled_dot_product_attention(q, m.keys.to(q.dtype), m.values.to(q.dtype), attn_mask=mask)

    empty = torch.zeros(2, 6, 8, dtype=dtype)
    return Parts(forward, qkv=nn.Linear(8, 24), keys=empty, values=empty.clone())


def counting() -> nn.Module:
    """Batch norm, and a buffer of the user's that is updated."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.norm(m.linear(x))
        m.seen.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h * m.seen

    return Parts(forward, linear=nn.Linear(4, 8), norm=nn.BatchNorm1d(8), seen=torch.zeros(8))


def int8() -> nn.Module:
    """An int8 weight that the program dequantises."""
    weight = torch.randint(-127, 127, (8, 4), dtype=torch.int8)
    return Parts(lambda m, x: F.linear(x, m.weight * m.scale), weight=weight, scale=torch.rand(8, 1) / 127)


def multi_head(training: bool) -> nn.Module:
    return Parts(
        lambda m, x, padded: m.attention(x, x, x, key_padding_mask=padded, need_weights=not training),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
    ).train(training)


def partly_low(dtype: torch.dtype) -> nn.Module:
    return Parts(
        lambda m, x: m.last(m.first(x.to(m.first.weight.dtype)).float()),
        first=nn.Linear(4, 8).to(dtype),
        last=nn.Linear(8, 4),
    )


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))


PADDED = torch.tensor([[False, False, True], [False, True, True]])
ROUNDED = {"tolerance": ONE_ROUNDING}
NAMES_DTYPES = {"reference": FP32, "tolerance": ONE_ROUNDING}


#: name -> makes the model, its arguments, the op that has to run low, gradients, what else ``agree`` is told
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], str, bool, dict[str, Any]]] = {
    **{
        f"embedding bag, {mode}": (
            lambda mode=mode: nn.Sequential(nn.EmbeddingBag(16, 8, mode=mode), nn.Linear(8, 4)),
            lambda: (torch.randint(16, (3, 5)),), "linear", True, {},
        )
        for mode in ("sum", "mean", "max")
    },
    "attention in training": (partial(multi_head, True), lambda: (torch.randn(2, 3, 8), PADDED), "", True, {}),
    "attention in evaluation": (partial(multi_head, False), lambda: (torch.randn(2, 3, 8), PADDED), "", True, {}),
    "transformer layer in evaluation": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval(),
        lambda: (torch.randn(2, 3, 8),), "", False, ROUNDED,
    ),
    "a buffer that is updated": (counting, lambda: (torch.randn(6, 4),), "", True, ROUNDED),
    **{
        f"parameters in {dtype}": (partial(partly_low, dtype), lambda: (torch.randn(2, 4),), "", True, NAMES_DTYPES)
        for dtype in (BF16, FP16)
    },
    **{
        f"a cache in {dtype}": (
            partial(cached, dtype), lambda: (torch.randn(2, 1, 8), torch.tensor([3])), "linear", False, NAMES_DTYPES,
        )
        for dtype in (FP32, BF16)
    },
    "a batch of size zero": (normed, lambda: (torch.randn(0, 4),), "linear", True, {}),
    "a batch of size zero in autocast": (normed, lambda: (torch.randn(0, 4),), "linear", True, {"ambient": BF16}),
    "a batch of any size": (
        lambda: Parts(lambda m, x: m.linear(x.mT).relu(), linear=nn.Linear(8, 16)),
        lambda: (torch.randn(2, 8, 3),), "linear", True, {"dynamic": True},
    ),
    "int8 weights": (int8, lambda: (torch.randn(2, 4),), "linear", True, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_module_is_what_it_is_eagerly(name: str) -> None:
    make, given, op, gradients, settings = MODELS[name]
    with torch.set_grad_enabled(gradients):
        found = agree(make(), *given(), **settings)
    assert not op or low(found, op)


def recurrent(layer: Callable[..., nn.Module]) -> nn.Module:
    return Parts(lambda m, x: m.head(m.rnn(x)[0]), rnn=layer(4, 8, batch_first=True), head=nn.Linear(8, 4))


@plain_and_autocast
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda layer: layer.__name__)
def test_recurrent_layers_compile_whole(layer: Any, ambient: torch.dtype | None) -> None:
    if layer is nn.LSTM and ambient is not None and not onednn_computes(ambient):
        pytest.skip("nn.LSTM under autocast raises on this CPU")
    # torch.compile cannot train an LSTM on CPU, with any backend: oneDNN's workspace is no tensor that can be saved
    with torch._dynamo.config.patch(allow_rnn=True), torch.set_grad_enabled(layer is not nn.LSTM):
        found = agree(recurrent(layer), torch.randn(2, 3, 4), ambient=ambient, tolerance=ONE_ROUNDING)
    assert low(found, "linear")


@plain_and_autocast
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell], ids=lambda cell: cell.__name__)
def test_products_inside_recurrent_cells_are_low(cell: Any, ambient: torch.dtype | None) -> None:
    found = agree(cell(4, 8), torch.randn(2, 4, requires_grad=True), ambient=ambient)
    assert not any(plans(plan, f"{kind}_cell") for plan in found for kind in ("lstm", "gru"))
    assert low(found, "rnn_tanh_cell" if cell is nn.RNNCell else "linear")


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU], ids=lambda layer: layer.__name__)
def test_recurrent_layers_that_dynamo_leaves_to_eager_stay_fp32(layer: Any) -> None:
    with torch._dynamo.config.patch(allow_rnn=False):
        found = agree(recurrent(layer), torch.randn(2, 3, 4), fullgraph=False, tolerance=ONE_ROUNDING)
    assert not any(plans(plan, layer.__name__.lower()) for plan in found)


def test_a_checkpointed_block_is_recomputed_with_the_same_numbers() -> None:
    def block(m: Any, x: Tensor) -> Tensor:
        return x + m.down(F.dropout(F.gelu(m.up(m.norm(x))), 0.5, training=True))

    model = Parts(block, norm=nn.LayerNorm(8), up=nn.Linear(8, 16), down=nn.Linear(16, 8))

    def gradients(through: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2), requires_grad=True)
        through = torch.compile(through, backend="amp_fx", options=dict(DEFAULTS), fullgraph=True)
        return list(torch.autograd.grad(through(x).square().sum(), (x, *model.parameters())))

    with without_inductor():
        plain = gradients(lambda x: model(x))
        recomputed = gradients(lambda x: checkpoint(model, x, use_reentrant=False))
    assert all(map(torch.equal, recomputed, plain))


def test_a_parameter_of_a_tensor_subclass_runs_in_its_own_dtype() -> None:
    model = Parts(lambda m, x: torch.matmul(m.plain(x), m.weight), plain=nn.Linear(4, 4))
    model.register_parameter("weight", nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4))))
    x = torch.randn(2, 4)
    with without_inductor():
        got = torch.compile(model, backend="amp_fx", options=dict(DEFAULTS))(x)
    expected = model(x)
    assert type(got) is type(expected)
    assert got.dtype is FP32
    assert (got.a - expected.a).norm() <= ONE_ROUNDING * expected.a.norm()


@pytest.fixture
def group_of_two() -> Iterator[None]:
    """A process group whose other process is made up: what it sends is undefined."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_two")
def test_dtensors_are_captured_as_plain_tensors_placed_and_run_as_dtensors_again() -> None:
    block = Parts(lambda m, x: x + m.down(F.gelu(m.up(x))), up=nn.Linear(64, 128), down=nn.Linear(128, 64))
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with without_inductor(), record() as recording:
        result = torch.compile(block, backend="amp_fx", options=dict(DEFAULTS))(torch.randn(4, 64))
    assert result.dtype is FP32
    (plan,) = recording.plans
    assert [row.dtype for row in plans(plan, "linear")] == [BF16, BF16]
    # what is sent is low; gradients of the input, which processes add up, stay in fp32
    moved = [(row.op, row.dtype) for row in plan.nodes if row.op in LAYOUTS and row.dtype is not None]
    assert moved == [
        (op, BF16 if at else FP32) for at, op in enumerate(2 * ("from_local", "redistribute", "to_local"))
    ]
    result.sum().backward()
    for name, parameter in block.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        assert parameter.grad.dtype is FP32
    # nothing is kept of shards, and without gradients all that is sent is low
    with without_inductor(), record() as recording, torch.inference_mode():
        result = torch.compile(block, backend="amp_fx", options=dict(DEFAULTS))(torch.randn(4, 64))
    assert result.dtype is FP32
    assert {row.dtype for row in recording.plans[0].nodes if row.op in LAYOUTS} == {BF16}


# ---- what writes to what it is given, and is not ATen ----


class Bumped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(y := x.add_(1).clone())
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        return gradient + 0 * y


@torch.library.custom_op("amp_fx_hard_modules::bump", mutates_args=("x",))
def bump(x: Tensor, by: Tensor) -> None:
    # as a kernel that is written for one dtype
    x.copy_(x.lerp(by, 0.5))


WRITERS: dict[str, Callable[[Tensor], object]] = {
    "checkpoint": lambda h: checkpoint(lambda t: t.add_(1).sum(), h, use_reentrant=False),
    "a view": lambda h: checkpoint(lambda t: t.add_(1).sum(), h[1:], use_reentrant=False),
    "vmap": lambda h: torch.vmap(lambda t: t.add_(1))(h),
    "autograd.Function": lambda h: Bumped.apply(h),
    "custom op": lambda h: bump(h, h.sigmoid()),
}


# Dynamo does that
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_not_ours_writes_to_the_value_itself_in_its_traced_dtype(writer: str) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        h = torch.matmul(x, w)
        WRITERS[writer](h)
        return h * 2

    # only what has a gradient has a body of its own in an autograd.Function
    given = torch.randn(4, 4, requires_grad=writer == "autograd.Function")
    check(program, given, torch.randn(4, 4), casts={DOWN: 2, UP: 1}, dtypes={"mul": "float32"})
