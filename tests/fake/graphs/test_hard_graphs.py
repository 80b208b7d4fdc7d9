"""Programs that break graph-level tools: compiled by the backend, with AOTAutograd in place of Inductor.

Each is held against eager execution (dtypes, aliases, mutations) and fp64 (values and gradients). Modules:
``test_hard_modules.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.invoke_subgraph import mark_compile_region
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from amp_fx.precision.plans.label import ReasonKind
from support.checks.whole_program import agree
from support.tracing.captured_graphs import plans, rewrite

BF16, FP32 = torch.bfloat16, torch.float32
FP32_MIN = torch.finfo(FP32).min
#: bounds the error of fp32 arithmetic behind one rounding to a 16-bit dtype, where autocast has no answer
ONE_ROUNDING = 1e-2
normal: Callable[..., Callable[[], Tensor]] = partial(partial, torch.randn)
SQUARE, TRAINED = normal(4, 4), normal(4, 4, requires_grad=True)
BOTH = (None, BF16)

CASES: list[Any] = []


def case(
    *given: Callable[[], Tensor],
    low: str = "",
    calls: Mapping[str, list[torch.dtype]] | None = None,
    ambients: tuple[torch.dtype | None, ...] = (None,),
    warning: str = "",
    **settings: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a program: makers of its arguments, the op that has to run low, but for functorch regions, dtypes of other
    calls, autocast of the user's, what eager execution warns of, and what else ``agree`` is told.
    """

    def add(program: Callable[..., Any]) -> Callable[..., Any]:
        for ambient in ambients:
            suffix = "" if len(ambients) == 1 else "-autocast" if ambient else "-plain"
            marks = [pytest.mark.filterwarnings(f"ignore:{warning}")] if warning else []
            each = {**settings, "ambient": ambient}
            name = program.__name__ + suffix
            CASES.append(pytest.param((program, given, low, calls or {}, each), id=name, marks=marks))
        return program

    return add


@case(SQUARE, SQUARE, low="matmul", ambients=BOTH, reference=FP32)
def a_while_loop_runs_its_body_low_and_carries_fp32(x: Tensor, w: Tensor) -> Tensor:
    def step(i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.matmul(h, w).float().tanh()

    return while_loop(lambda i, h: i < 3, step, (torch.tensor(0), x))[1]


@case(SQUARE, SQUARE, low="matmul")
def a_scan_carries_fp32(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.matmul(carry, w) + row
        return h, h.tanh()

    return scan(step, x[0], x)


@case(normal(32, 16), normal(16, 16), low="matmul", warning="flex_attention called without:UserWarning")
def flex_attention_gets_what_it_was_traced_with(x: Tensor, w: Tensor) -> Tensor:
    q = (x @ w).view(1, 2, 16, 16)
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score - (i - j).abs())  # pyright: ignore[reportReturnType]


@case(SQUARE, SQUARE, low="matmul", options={"dtype": "float16"}, tolerance=ONE_ROUNDING)
def a_mask_made_by_vmap_as_hugging_face_does(x: Tensor, w: Tensor) -> Tensor:
    rows = torch.arange(4)
    mask = torch.vmap(torch.vmap(lambda i, j: j <= i, (None, 0)), (0, None))(rows, rows)
    return (x @ w).masked_fill(~mask, FP32_MIN).softmax(-1)


# found by fuzzing: once y is bf16, y.to(bf16) would be y itself, and the write would reach it
@case(SQUARE, SQUARE)
def a_conversion_that_copied_stays_a_copy(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    z = y.to(BF16)
    z.fill_(0.25)
    return z, y * 2


@case(SQUARE, SQUARE)
def two_conversions_that_are_returned_share_no_storage(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x @ w
    return y.to(BF16), y.bfloat16(), y


# found by fuzzing: the cast of the diagonal is contiguous, which made contiguous() return it
@case(SQUARE, SQUARE)
def a_diagonal_made_contiguous_is_no_view_of_it(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    diagonal = (x @ w).diagonal()
    return diagonal.contiguous(), diagonal


# found by fuzzing: F.l1_loss broadcasts, and so returned its argument itself as a value without gradient
@case(SQUARE, TRAINED, SQUARE, ambients=BOTH, tolerance=ONE_ROUNDING)
def a_metric_without_gradients_takes_none_from_the_loss(x: Tensor, w: Tensor, target: Tensor) -> Any:
    y = x @ w
    with torch.no_grad():
        metric = F.l1_loss(y, target)
    return y * 2, metric


@case(normal(4, 8), normal(8, 16), ambients=BOTH, tolerance=ONE_ROUNDING)
def shapes_that_change_in_place(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = x @ w + 1
    y.t_()
    z = (y @ x).unsqueeze_(0).transpose_(1, 2)
    z.squeeze_(0)
    return y, z @ w.T


@case(SQUARE, SQUARE, reference=FP32, tolerance=5 * ONE_ROUNDING)
def complex_and_fp64_islands_are_left_alone(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = x @ w
    rotated = torch.view_as_real(torch.view_as_complex(h.float().view(4, 2, 2)) * 1j)
    return rotated, torch.fft.rfft(h.float()).abs(), torch.linalg.det(h.double() @ w.double())


# the sum of 16 products of random numbers: its digits cancel
@case(
    SQUARE, SQUARE, partial(torch.tensor, 2.0, requires_grad=True), partial(torch.tensor, 0.5), tolerance=0.05
)
def tensors_without_dimensions(x: Tensor, w: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    h = (x @ w) * scale + offset
    return h, (h.sum() * scale).tanh()


@case(SQUARE, SQUARE, partial(torch.tensor, [True, False, True, True]), low="matmul")
def sizes_that_nobody_knows_before_the_run(x: Tensor, w: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    rows = x[keep.nonzero().squeeze(1)]
    count = keep.sum().item()
    return rows @ w, (x @ w)[: int(count)] * count


SECOND_ROW = torch.arange(4).unsqueeze(1).expand(4, 4) == 1


@case(SQUARE, SQUARE, SECOND_ROW.clone, options={"dtype": "float16"}, tolerance=ONE_ROUNDING)
@case(SQUARE, SQUARE, SECOND_ROW.clone, options={"dtype": "bfloat16"}, tolerance=ONE_ROUNDING)
def rows_that_are_masked_whole_are_finite(x: Tensor, w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    scores = x @ w
    return scores.masked_fill(mask, FP32_MIN).softmax(-1), (scores + mask * FP32_MIN).softmax(-1)


# found by fuzzing: a literal of the program was no fake tensor, and its cast came from another fake mode
@case(SQUARE, SQUARE, lambda: SQUARE().half(), ambients=(BF16,), reference=FP32)
def a_number_written_into_a_low_input_in_autocast(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    y[y > 0] = 0.5
    return y, x @ w


@mark_compile_region  # pyright: ignore[reportArgumentType]
def layer(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(torch.matmul(x, w))


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


@torch.library.custom_op("amp_fx_hard::scaled", mutates_args=())
def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


scaled.register_fake(lambda x, by: torch.empty_like(x))


#: programs of one expression -> makers of their arguments, what ``case`` is told
EXPRESSIONS: dict[str, tuple[Callable[..., Any], tuple[Callable[[], Tensor], ...], dict[str, Any]]] = {
    "einsum with several operands": (
        lambda a, b, c: torch.einsum("bij,jk,bkl->bil", a, b, c),
        (normal(2, 4, 5), normal(5, 6), normal(2, 6, 3, requires_grad=True)), {},
    ),
    # found by fuzzing: sizes that broadcast are multiplied and summed, and nothing in that is on autocast's list
    "einsum that is no matrix product stays in fp32": (
        lambda a, b, c: torch.einsum("ij,jk->ik", a @ b, c), (SQUARE, SQUARE, normal(1, 4)),
        {"calls": {"einsum": [FP32]}, "ambients": (BF16,), "options": {"numerics": "eager"}},
    ),
    "cond under autocast returns what autocast does": (
        lambda x, w: torch.cond(x.sum() > 0, lambda a, b: a @ b, lambda a, b: b @ a, (x, w)), (SQUARE, SQUARE),
        {"low": "matmul", "ambients": (BF16,)},
    ),
    "a gradient taken inside the program": (
        lambda x, w: torch.func.grad(lambda y: (y @ w).tanh().sum())(x) @ w, (SQUARE, SQUARE),
        {"low": "matmul", "tolerance": ONE_ROUNDING},
    ),
    "per-sample gradients": (
        lambda x, w: torch.vmap(torch.func.grad(lambda row: (row @ w).square().sum()))(x) @ w, (SQUARE, SQUARE),
        {"low": "matmul"},
    ),
    "attention to keys that a batch shares": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k), (normal(2, 2, 4, 8), normal(1, 2, 4, 8)),
        {"low": "scaled_dot_product_attention"},
    ),
    # found by fuzzing: what broadcast_tensors returns was rounded to the dtype of the other tensor
    "a loss against a number does not round it": (
        lambda x, w, target: F.l1_loss(target.exp(), x @ w), (SQUARE, SQUARE, partial(torch.tensor, 6.834)),
        {"ambients": (BF16,), "warning": ".*target size:UserWarning", "options": {"numerics": "eager"}, "tolerance": 0},
    ),
    "attention over nothing": (
        lambda q, k, mask: F.scaled_dot_product_attention(q, k, k, attn_mask=mask).nan_to_num(),
        (normal(1, 2, 4, 8), normal(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril(-1).clone), {},
    ),
    "a region to compile once becomes part of the graph": (
        lambda x, w: layer(layer(x, w), w),  # pyright: ignore[reportCallIssue]
        (TRAINED, TRAINED), {"calls": {"matmul": [BF16, BF16]}},
    ),
    "an autograd function runs as traced between low matmuls": (
        lambda x, w: Double.apply(x @ w, w) @ w, (TRAINED, TRAINED),
        {
            "calls": {"matmul": [BF16, BF16]}, "warning": ".*should not be instantiated:DeprecationWarning",
            "tolerance": ONE_ROUNDING,
        },
    ),
    "custom ops get the dtypes they were traced with": (
        lambda x, w: scaled(x @ w, 2.0) @ w, (SQUARE, SQUARE),
        {"low": "matmul", "calls": {"amp_fx_hard::scaled": [FP32]}},
    ),
}  # fmt: skip

for name, (expression, given, expected) in EXPRESSIONS.items():
    expression.__name__ = name
    case(*given, **expected)(expression)


@torch.library.custom_op("amp_fx_hard::add_to", mutates_args=("total",))
def add_to(total: Tensor, x: Tensor) -> None:
    total.add_(x)


@case(SQUARE, SQUARE, SQUARE)
def custom_ops_that_write_reach_their_argument(total: Tensor, x: Tensor, w: Tensor) -> Tensor:
    add_to(total, x @ w)
    h = x @ w
    add_to(h, x)
    return h @ w


@pytest.mark.parametrize("of", CASES)
def test_a_program_is_what_it_is_eagerly(of: tuple[Any, ...]) -> None:
    program, given, op, calls, settings = of
    unknown_sizes = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    has_gradients = program is not flex_attention_gets_what_it_was_traced_with
    with torch._dynamo.config.patch(unknown_sizes), torch.set_grad_enabled(has_gradients):
        found = agree(program, *(make() for make in given), **settings)
    rows = [row for plan in found for row in plans(plan, op) if not row.is_because(ReasonKind.NOT_ATEN)]
    assert bool(rows) == bool(op)
    assert all(row.dtype in (BF16, torch.float16) for row in rows)
    for name, dtypes in calls.items():
        assert [row.dtype for row in plans(found[0], name)] == dtypes


def test_one_conversion_that_is_returned_is_no_copy() -> None:
    gm = rewrite(lambda x, w: (x @ w).to(BF16), SQUARE(), SQUARE()).gm
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


#: name -> product, shapes of its arguments, whether it rounds
PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], bool]] = {
    "dot": (torch.inner, ((8,), (8,)), False),
    "number": (torch.inner, ((), (8,)), False),
    "inner": (torch.inner, ((3, 8), (8,)), True),
    "tensordot-dot": (lambda a, b: torch.tensordot(a, b, 1), ((8,), (8,)), False),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), ((3, 8), (8, 3)), True),
    "power-1": (lambda a, b: torch.linalg.matrix_power(a, 1) + b, ((8, 8), (8,)), False),
    "power-3": (lambda a, b: torch.linalg.matrix_power(a, 3) + b, ((8, 8), (8,)), True),
    "outer": (lambda a, b: torch.einsum("i,j->ij", a, b), ((8,), (8,)), False),
    "einsum-dot": (lambda a, b: torch.einsum("i,i->", a, b), ((8,), (8,)), True),
}


@pytest.mark.parametrize("ambient", BOTH, ids=["plain", "autocast"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_rounded_where_autocast_rounds_them(name: str, ambient: torch.dtype | None) -> None:
    product, shapes, rounds = PRODUCTS[name]
    (plan,) = agree(product, *map(torch.randn, shapes), ambient=ambient)
    rows = [row for row in plan.nodes if row.op_class.value in ("low", "promote") and row.op != "add.Tensor"]
    assert [row.dtype for row in rows] == [BF16 if rounds else FP32]
