"""Programs that break graph-level tools: compiled by the backend, with AOTAutograd in place of Inductor.

Each is held against eager execution (dtypes, aliases, mutations) and fp64 (values and gradients).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.invoke_subgraph import mark_compile_region
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from amp_fx import Plan
from amp_fx._torch import has_low_lstm
from amp_fx.plans.label import Kind
from graphs import agree, plans, rewrite, without_inductor

BF16, FP16 = torch.bfloat16, torch.float16
FP32_MIN = torch.finfo(torch.float32).min
#: bounds the error of fp32 arithmetic behind one rounding to a 16-bit dtype, where autocast has no answer
ONE_ROUNDING = 1e-2


def low(found: list[Plan], op: str) -> bool:
    """True if every call of an op runs in a low dtype, and there is one; functorch regions left out."""
    rows = [row for plan in found for row in plans(plan, op) if not row.is_because(Kind.NOT_ATEN)]
    return bool(rows) and all(row.dtype in (BF16, FP16) for row in rows)


def square(requires_grad: bool = False) -> Tensor:
    return torch.randn(4, 4, requires_grad=requires_grad)


# ---- layers ----


@pytest.mark.parametrize("ambient", [None, BF16], ids=["plain", "autocast"])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda layer: layer.__name__)
def test_recurrent_layers_compile_whole(
    layer: Callable[..., nn.RNNBase], ambient: torch.dtype | None
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = layer(4, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0])

    if layer is nn.LSTM and ambient is not None and not has_low_lstm(ambient):
        pytest.skip("nn.LSTM under autocast raises on this CPU")
    # torch.compile cannot train an LSTM on CPU, with any backend: oneDNN's workspace is no tensor that can be saved
    with torch._dynamo.config.patch(allow_rnn=True), torch.set_grad_enabled(layer is not nn.LSTM):
        found = agree(Model(), torch.randn(2, 3, 4), ambient=ambient, tolerance=ONE_ROUNDING)
    assert low(found, "linear")


@pytest.mark.parametrize("ambient", [None, BF16], ids=["plain", "autocast"])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell], ids=lambda cell: cell.__name__)
def test_products_inside_recurrent_cells_are_low(
    cell: Callable[..., nn.RNNCellBase], ambient: torch.dtype | None
) -> None:
    found = agree(cell(4, 8), torch.randn(2, 4, requires_grad=True), ambient=ambient)
    assert not any(plans(plan, f"{kind}_cell") for plan in found for kind in ("lstm", "gru"))
    assert low(found, "rnn_tanh_cell" if cell is nn.RNNCell else "linear")


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU], ids=lambda layer: layer.__name__)
def test_recurrent_layers_that_dynamo_leaves_to_eager_stay_fp32(layer: Callable[..., nn.RNNBase]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = layer(4, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0])

    with torch._dynamo.config.patch(allow_rnn=False):
        found = agree(Model(), torch.randn(2, 3, 4), fullgraph=False, tolerance=ONE_ROUNDING)
    assert not any(plans(plan, layer.__name__.lower()) for plan in found)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags(mode: str) -> None:
    model = nn.Sequential(nn.EmbeddingBag(16, 8, mode=mode), nn.Linear(8, 4))
    assert low(agree(model, torch.randint(16, (3, 5))), "linear")


def test_einsum_with_several_operands() -> None:
    def program(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.einsum("bij,jk,bkl->bil", a, b, c)

    agree(program, torch.randn(2, 4, 5), torch.randn(5, 6), torch.randn(2, 6, 3, requires_grad=True))


def test_einsum_that_is_no_matrix_product_stays_fp32_under_autocast() -> None:
    # found by fuzzing: sizes that broadcast are multiplied and summed, and nothing in that is on autocast's list
    def program(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.einsum("ij,jk->ik", a @ b, c)

    options = {"numerics": "eager"}
    found = agree(program, square(), square(), torch.randn(1, 4), ambient=BF16, options=options)
    assert plans(found[0], "einsum")[0].dtype is torch.float32


@pytest.mark.parametrize("ambient", [None, BF16], ids=["plain", "autocast"])
@pytest.mark.parametrize(
    ("product", "shapes", "rounds"),
    [
        (torch.inner, ((8,), (8,)), False),
        (torch.inner, ((), (8,)), False),
        (torch.inner, ((3, 8), (8,)), True),
        (lambda a, b: torch.tensordot(a, b, 1), ((8,), (8,)), False),
        (lambda a, b: torch.tensordot(a, b, 1), ((3, 8), (8, 3)), True),
        (lambda a, b: torch.linalg.matrix_power(a, 1) + b, ((8, 8), (8,)), False),
        (lambda a, b: torch.linalg.matrix_power(a, 3) + b, ((8, 8), (8,)), True),
        (lambda a, b: torch.einsum("i,j->ij", a, b), ((8,), (8,)), False),
        (lambda a, b: torch.einsum("i,i->", a, b), ((8,), (8,)), True),
    ],
    ids=["dot", "number", "inner", "tensordot-dot", "tensordot", "power-1", "power-3", "outer", "einsum-dot"],
)
def test_products_are_rounded_where_autocast_rounds_them(
    product: Callable[..., Tensor],
    shapes: tuple[tuple[int, ...], ...],
    rounds: bool,
    ambient: torch.dtype | None,
) -> None:
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape in shapes]
    (plan,) = agree(product, *given, ambient=ambient)
    computed = [
        row for row in plan.nodes if row.op_class.value in ("low", "promote") and row.op != "add.Tensor"
    ]
    assert [row.dtype for row in computed] == [BF16 if rounds else torch.float32]


@pytest.mark.parametrize("training", [True, False])
def test_multi_head_attention(training: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, padded: Tensor) -> tuple[Tensor, Tensor | None]:
            return self.attention(x, x, x, key_padding_mask=padded, need_weights=not training)

    padded = torch.tensor([[False, False, True], [False, True, True]])
    agree(Model().train(training), torch.randn(2, 3, 8), padded)


def test_a_transformer_layer_in_evaluation_without_gradients() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    with torch.no_grad():
        agree(model, torch.randn(2, 3, 8), tolerance=ONE_ROUNDING)


def test_batch_norm_and_a_buffer_of_the_users_are_updated() -> None:
    class Model(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.linear(x))
            self.seen.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            return h * self.seen

    agree(Model(), torch.randn(6, 4), tolerance=ONE_ROUNDING)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_parameters_that_the_user_made_low_stay_as_they_are(dtype: torch.dtype) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 8).to(dtype), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x.to(self.first.weight.dtype)).float())

    agree(Mixed(), torch.randn(2, 4), reference=torch.float32, tolerance=ONE_ROUNDING)


# ---- checkpointing, and other higher-order ops ----


class Block(nn.Module):
    """A residual block with dropout that is on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.5, training=True))


def test_a_checkpointed_block_is_recomputed_with_the_same_numbers() -> None:
    model = Block()

    def gradients(through: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(1)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2), requires_grad=True)
        options = {"profile": "off", "strict": True}
        through = torch.compile(through, backend="amp_fx", options=options, fullgraph=True)
        return list(torch.autograd.grad(through(x).square().sum(), (x, *model.parameters())))

    with without_inductor():
        plain = gradients(lambda x: model(x))
        recomputed = gradients(lambda x: checkpoint(model, x, use_reentrant=False))
    for one, other in zip(recomputed, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ambient", [None, BF16], ids=["plain", "autocast"])
def test_a_while_loop_runs_its_body_low_and_carries_fp32(ambient: torch.dtype | None) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        def more(i: Tensor, h: Tensor) -> Tensor:
            return i < 3

        def step(i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, torch.matmul(h, w).float().tanh()

        return while_loop(more, step, (torch.tensor(0), x))[1]

    assert low(agree(program, square(), square(), ambient=ambient, reference=torch.float32), "matmul")


def test_a_scan_carries_fp32() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.matmul(carry, w) + row
            return h, h.tanh()

        return scan(step, x[0], x)

    assert low(agree(program, square(), square()), "matmul")


def test_cond_under_autocast_returns_what_autocast_does() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda a, b: a @ b, lambda a, b: b @ a, (x, w))

    assert low(agree(program, square(), square(), ambient=BF16), "matmul")


def test_a_region_to_compile_once_becomes_part_of_the_graph() -> None:
    @mark_compile_region  # pyright: ignore[reportArgumentType]
    def layer(x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(torch.matmul(x, w))

    def program(x: Tensor, w: Tensor) -> Tensor:
        return layer(layer(x, w), w)  # pyright: ignore[reportCallIssue]

    found = agree(program, square(True), square(True))
    assert low(found, "matmul")
    assert len(plans(found[0], "matmul")) == 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_gets_what_it_was_traced_with() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        q = (x @ w).view(1, 2, 16, 16)

        def bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - (i - j).abs()

        return flex_attention(q, q, q, score_mod=bias)  # pyright: ignore[reportReturnType]

    with torch.no_grad():
        assert low(agree(program, torch.randn(32, 16), torch.randn(16, 16)), "matmul")


class Double(torch.autograd.Function):
    """Saves what its backward multiplies by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, w)
        return 2 * torch.matmul(x, w)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        return 2 * gradient @ w.mT, 2 * x.mT @ gradient


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_an_autograd_function_runs_as_traced_between_low_matmuls() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return Double.apply(x @ w, w) @ w

    found = agree(program, square(True), square(True), tolerance=ONE_ROUNDING)
    assert low(found, "matmul")
    assert len(plans(found[0], "matmul")) == 2


# ---- functorch ----


def test_a_gradient_taken_inside_the_program() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        slope = torch.func.grad(lambda y: (y @ w).tanh().sum())(x)
        return slope @ w

    assert low(agree(program, square(), square(), tolerance=ONE_ROUNDING), "matmul")


def test_per_sample_gradients() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        def loss(row: Tensor) -> Tensor:
            return (row @ w).square().sum()

        return torch.vmap(torch.func.grad(loss))(x) @ w

    assert low(agree(program, square(), square()), "matmul")


def test_a_mask_made_by_vmap_as_hugging_face_does() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        def causal(i: Tensor, j: Tensor) -> Tensor:
            return j <= i

        rows = torch.arange(4)
        mask = torch.vmap(torch.vmap(causal, (None, 0)), (0, None))(rows, rows)
        return (x @ w).masked_fill(~mask, FP32_MIN).softmax(-1)

    found = agree(program, square(), square(), options={"dtype": "float16"}, tolerance=ONE_ROUNDING)
    assert low(found, "matmul")


# ---- memory ----


def test_a_conversion_that_copied_stays_a_copy() -> None:
    # found by fuzzing: once y is bf16, y.to(bf16) would be y itself, and the write would reach it
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        z = y.to(BF16)
        z.fill_(0.25)
        return z, y * 2

    agree(program, square(), square())


def test_two_conversions_that_are_returned_share_no_storage() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x @ w
        return y.to(BF16), y.bfloat16(), y

    agree(program, square(), square())


def test_a_diagonal_made_contiguous_is_no_view_of_it() -> None:
    # found by fuzzing: the cast of the diagonal is contiguous, which made contiguous() return it
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        diagonal = (x @ w).diagonal()
        return diagonal.contiguous(), diagonal

    agree(program, square(), square())


def test_one_conversion_that_is_returned_is_no_copy() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).to(BF16)

    gm = rewrite(program, square(), square()).gm
    assert not [node for node in gm.graph.nodes if node.target is torch.ops.aten.clone.default]


@pytest.mark.parametrize("ambient", [None, BF16], ids=["plain", "autocast"])
def test_a_metric_without_gradients_takes_none_from_the_loss(ambient: torch.dtype | None) -> None:
    # found by fuzzing: F.l1_loss broadcasts, and so returned its argument itself as a value without gradient
    def program(x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        with torch.no_grad():
            metric = F.l1_loss(y, target)
        return y * 2, metric

    agree(program, square(), square(True), square(), ambient=ambient, tolerance=ONE_ROUNDING)


def test_a_loss_against_a_number_does_not_round_it() -> None:
    # found by fuzzing: what broadcast_tensors returns was rounded to the dtype of the other tensor
    def program(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.l1_loss(target.exp(), x @ w)

    with pytest.warns(UserWarning, match="target size"):
        agree(
            program,
            square(),
            square(),
            torch.tensor(6.834),
            ambient=BF16,
            options={"numerics": "eager"},
            tolerance=0,
        )


class Cached(nn.Module):
    """Attention over a static cache that is written in place, one position per call."""

    keys: Tensor
    values: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("keys", torch.zeros(2, 6, 8, dtype=dtype))
        self.register_buffer("values", torch.zeros(2, 6, 8, dtype=dtype))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        self.keys.index_copy_(1, position, k.to(self.keys.dtype))
        self.values[:, position] = v.to(self.values.dtype)
        mask = torch.arange(6) <= position
        keys, values = self.keys.to(q.dtype), self.values.to(q.dtype)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_a_key_value_cache_is_written_in_place(dtype: torch.dtype) -> None:
    with torch.no_grad():
        found = agree(
            Cached(dtype),
            torch.randn(2, 1, 8),
            torch.tensor([3]),
            reference=torch.float32,
            tolerance=ONE_ROUNDING,
        )
    assert low(found, "linear")


# ---- dtypes and shapes ----


@pytest.mark.parametrize("ambient", [None, BF16], ids=["plain", "autocast"])
def test_shapes_that_change_in_place(ambient: torch.dtype | None) -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w + 1
        y.t_()
        z = (y @ x).unsqueeze_(0).transpose_(1, 2)
        z.squeeze_(0)
        return y, z @ w.T

    agree(program, torch.randn(4, 8), torch.randn(8, 16), ambient=ambient, tolerance=1e-2)


def test_complex_and_fp64_islands_are_left_alone() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x @ w
        rotated = torch.view_as_real(torch.view_as_complex(h.float().view(4, 2, 2)) * 1j)
        return rotated, torch.fft.rfft(h.float()).abs(), torch.linalg.det(h.double() @ w.double())

    agree(program, square(), square(), reference=torch.float32, tolerance=5 * ONE_ROUNDING)


def test_tensors_without_dimensions() -> None:
    def program(x: Tensor, w: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        h = (x @ w) * scale + offset
        return h, (h.sum() * scale).tanh()

    # the sum of 16 products of random numbers: its digits cancel
    agree(
        program, square(), square(), torch.tensor(2.0, requires_grad=True), torch.tensor(0.5), tolerance=0.05
    )


@pytest.mark.parametrize("ambient", [None, BF16], ids=["plain", "autocast"])
def test_batches_of_size_zero(ambient: torch.dtype | None) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    assert low(agree(model, torch.randn(0, 4), ambient=ambient), "linear")


def test_layers_on_batches_of_any_size() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mT).relu()

    assert low(agree(Net(), torch.randn(2, 8, 3), dynamic=True), "linear")


def test_sizes_that_nobody_knows_before_the_run() -> None:
    def program(x: Tensor, w: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        rows = x[keep.nonzero().squeeze(1)]
        count = keep.sum().item()
        return rows @ w, (x @ w)[: int(count)] * count

    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        keep = torch.tensor([True, False, True, True])
        assert low(agree(program, square(), square(), keep), "matmul")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_that_are_masked_whole_are_finite(dtype: str) -> None:
    def program(x: Tensor, w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        scores = x @ w
        return scores.masked_fill(mask, FP32_MIN).softmax(-1), (scores + mask * FP32_MIN).softmax(-1)

    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1] = True
    agree(program, square(), square(), mask, options={"dtype": dtype}, tolerance=ONE_ROUNDING)


def test_attention_over_nothing_is_what_it_is_eagerly() -> None:
    def program(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask).nan_to_num()

    mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)
    agree(program, torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8), mask)


# ---- what is not a plain tensor or an ATen op ----


def test_int8_weights_that_the_program_dequantises() -> None:
    class Int8(nn.Module):
        weight: Tensor
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-127, 127, (8, 4), dtype=torch.int8))
            self.register_buffer("scale", torch.rand(8, 1) / 127)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * self.scale)

    assert low(agree(Int8(), torch.randn(2, 4)), "linear")


def test_a_parameter_of_a_tensor_subclass_runs_in_its_own_dtype() -> None:
    class Sub(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Linear(4, 4)
            self.weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))

        def forward(self, x: Tensor) -> Tensor:
            return torch.matmul(self.plain(x), self.weight)

    torch._dynamo.reset()
    model, x = Sub(), torch.randn(2, 4)
    with without_inductor():
        got = torch.compile(model, backend="amp_fx", options={"profile": "off", "strict": True})(x)
    expected = model(x)
    assert type(got) is type(expected)
    assert got.dtype is torch.float32
    assert (got.a - expected.a).norm() <= ONE_ROUNDING * expected.a.norm()


def test_custom_ops_get_the_dtypes_they_were_traced_with() -> None:
    @torch.library.custom_op("amp_fx_hard::scaled", mutates_args=())
    def scaled(x: Tensor, by: float) -> Tensor:
        return x * by

    scaled.register_fake(lambda x, by: torch.empty_like(x))

    def program(x: Tensor, w: Tensor) -> Tensor:
        return scaled(x @ w, 2.0) @ w

    found = agree(program, square(), square())
    assert low(found, "matmul")
    assert plans(found[0], "amp_fx_hard::scaled")[0].dtype is torch.float32


def test_custom_ops_that_write_reach_their_argument() -> None:
    @torch.library.custom_op("amp_fx_hard::add_to", mutates_args=("total",))
    def add_to(total: Tensor, x: Tensor) -> None:
        total.add_(x)

    def program(total: Tensor, x: Tensor, w: Tensor) -> Tensor:
        add_to(total, x @ w)
        h = x @ w
        add_to(h, x)
        return h @ w

    agree(program, square(), square(), square())


# ---- modes ----


def test_a_number_written_into_a_low_input_under_autocast() -> None:
    # found by fuzzing: a literal of the program was no fake tensor, and its cast came from another fake mode
    def program(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        y[y > 0] = 0.5
        return y, x @ w

    agree(program, square(), square(), square().half(), ambient=BF16, reference=torch.float32)
