"""Casts stand where the placement implies them, once per value and dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_fx.graphs.keys import CAST_META
from amp_fx.passes import InsertCasts
from checks import check, checked
from graphs import casts_of, rewrite, run_until
from small_models import Parts

aten = torch.ops.aten
BF16 = torch.bfloat16
DOWN, UP = ("float32", "bfloat16"), ("bfloat16", "float32")


def square() -> Tensor:
    return torch.randn(8, 8)


def test_one_cast_serves_all_readers_of_a_value() -> None:
    linears = {name: nn.Linear(8, 8, bias=False) for name in "qkv"}
    attention = Parts(lambda m, x: F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x)), **linears)
    x = torch.randn(2, 4, 8, requires_grad=True)
    rewritten = check(attention, x, casts={DOWN: 4, UP: 1}, dtypes={"linear": "bfloat16"})
    (of_x,) = [cast for cast in rewritten.plan.casts if len(cast.users) == 3]
    assert of_x.users == ("linear", "linear_1", "linear_2")
    assert of_x.bytes == x.numel() * (4 + 2)


def test_the_pass_itself_makes_one_cast_of_a_value() -> None:
    def program(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return x @ q, x @ k

    # later, equal casts are fused
    gm = run_until(InsertCasts, program, square(), square(), square()).gm
    assert casts_of(gm) == {DOWN: 3, UP: 2}


@checked(square(), square(), casts={DOWN: 3, UP: 2}, dtypes={"add_": "float32"})
def test_a_cast_is_not_shared_across_a_write_to_its_source(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    state = x * 1.0
    before = torch.matmul(state, w)
    state.add_(1)
    return before, torch.matmul(state, w)


@checked(square(), square(), casts={DOWN: 3, UP: 2})
def test_a_cast_is_not_shared_across_a_write_through_a_view(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    state = x * 1.0
    before = torch.matmul(state, w)
    state[0].zero_()
    return before, torch.matmul(state, w)


@checked(square(), square(), casts={DOWN: 2, UP: 1})
def test_a_cast_is_shared_across_a_write_to_something_else(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    other = x * 1.0
    before = torch.matmul(x, w)
    other.add_(1)
    return before + other, torch.matmul(x, w.mT)


@checked(square(), square(), square(), casts={DOWN: 3, UP: 2})
def test_an_input_that_is_written_is_cast_again(
    buffer: Tensor, x: Tensor, w: Tensor
) -> tuple[Tensor, Tensor]:
    before = torch.matmul(buffer, w)
    buffer.copy_(x)
    return before, torch.matmul(buffer, w)


def test_arguments_with_a_dtype_of_their_own_are_not_cast() -> None:
    rewritten = check(
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)),
        torch.randn(2, 8, requires_grad=True),
        casts={DOWN: 5, UP: 1},
        dtypes={"layer_norm": "bfloat16"},
    )
    (norm,) = rewritten.gm.graph.find_nodes(op="call_function", target=aten.layer_norm.default)
    assert [arg.meta["val"].dtype for arg in norm.all_input_nodes] == [BF16, torch.float32, torch.float32]


def test_on_cuda_the_norm_and_its_weights_are_in_fp32() -> None:
    def program(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return torch.matmul(F.layer_norm(torch.matmul(x, w), (8,), scale), w)

    rewritten = rewrite(program, square(), square(), torch.ones(8), device="cuda")
    assert rewritten.dtypes("layer_norm") == ["float32"]
    assert casts_of(rewritten.gm) == {DOWN: 3, UP: 2}


NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "layer_norm": lambda x, scale: F.layer_norm(x, (8,), scale),
    "native_layer_norm": lambda x, scale: torch.native_layer_norm(x, (8,), scale, scale, 1e-5)[0],
    "group_norm": lambda x, scale: F.group_norm(x, 2, scale, scale),
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_low_norm_on_cuda_widens_its_input_and_rounds_its_result(norm: str) -> None:
    def program(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        hidden = NORMS[norm](torch.matmul(x, w), scale).relu()
        return torch.matmul(hidden, w), hidden

    rewritten = rewrite(program, square(), square(), torch.ones(8), device="cuda", options={"policy": "fast"})
    (call,) = [n for n in rewritten.gm.graph.nodes if getattr(n.target, "_opname", "") == norm]
    given = [source.meta["val"].dtype for source in call.all_input_nodes]
    assert set(given) == {torch.float32}
    assert {source.meta["val"].dtype for source in call.all_input_nodes[0].all_input_nodes} == {BF16}
    # the plan says what is stored
    assert rewritten.dtypes(norm) == ["bfloat16"]
    assert rewritten.dtypes("relu") == ["bfloat16"]


def test_a_low_norm_on_cuda_without_weights_takes_its_input_as_it_is() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(F.layer_norm(torch.matmul(x, w), (8,)), w)

    rewritten = rewrite(program, square(), square(), device="cuda", options={"policy": "fast"})
    assert casts_of(rewritten.gm) == {DOWN: 2, UP: 1}


# autocast raises: lerp is on no list of it
@checked(square(), square(), casts={DOWN: 2, UP: 1}, dtypes={"lerp": "float32"}, tolerance=1e-2)
def test_inputs_of_a_kernel_that_does_not_widen_are_cast(x: Tensor, w: Tensor) -> Tensor:
    return torch.lerp(x, torch.matmul(x, w), 0.5)


def test_a_zero_dimensional_tensor_needs_no_cast_in_arithmetic() -> None:
    def program(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return torch.matmul(torch.matmul(x, w) * scale, w)

    scale = torch.tensor(0.37, requires_grad=True)
    check(program, square(), square(), scale, casts={DOWN: 2, UP: 1}, dtypes={"mul": "bfloat16"})


@checked(square(), square(), casts={DOWN: 2, UP: 1})
def test_outputs_return_to_their_traced_dtypes(x: Tensor, w: Tensor) -> dict[str, object]:
    h = torch.matmul(x, w)
    return {"h": h, "low": h.to(BF16), "nested": [(h.argmax(), h.double())], "size": h.shape[0]}


@checked(square(), square(), ambient=BF16, casts={DOWN: 2}, dtypes={"add": "float32"})
def test_under_an_ambient_autocast_low_outputs_stay_low(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.matmul(x, w)
    return h, h + x


@checked(
    square(),
    torch.randint(8, (4, 4)),
    torch.ones(4, dtype=torch.bool),
    torch.randn(4, 4, dtype=torch.float64),
    casts={},
    reference=torch.float32,
)
def test_integers_booleans_and_fp64_are_never_cast(
    x: Tensor, n: Tensor, mask: Tensor, wide: Tensor
) -> tuple[Tensor, ...]:
    return torch.matmul(n, n), torch.matmul(wide, wide), mask & mask, F.embedding(n, x)


# autocast raises: inside the island h is bf16 and w is not
@checked(
    square(),
    square(),
    casts={DOWN: 3, UP: 2},
    dtypes={"matmul": ["bfloat16", "float32", "bfloat16"]},
    tolerance=1e-2,
)
def test_an_island_gets_what_it_was_traced_with(x: Tensor, w: Tensor) -> Tensor:
    h = torch.matmul(x, w)
    with torch.autocast("cpu", enabled=False):
        h = torch.matmul(h, w)
    return torch.matmul(h, w)


def test_inserted_casts_carry_the_users_source_line_and_a_mark() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        scaled = x * 3.0
        return torch.matmul(scaled, w)

    rewritten = rewrite(program, square(), square())
    casts = rewritten.gm.graph.find_nodes(op="call_function", target=aten.to.dtype)
    assert len(casts) == 3
    assert all(cast.meta[CAST_META] for cast in casts)
    (of_scaled,) = [cast for cast in rewritten.plan.casts if cast.value == "mul"]
    assert of_scaled.inserted
    assert of_scaled.source.endswith("scaled = x * 3.0")


def test_a_cast_is_not_shared_out_of_no_grad() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x @ w).amax()
        return (x @ w) * scale

    args = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    check(program, *args, casts={DOWN: 4, UP: 1})


def test_tied_weights_are_cast_once_and_collect_both_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(F.gelu(self.head(self.embed(tokens))) @ self.embed.weight)

    check(Tied(), torch.randint(16, (2, 5)), casts={DOWN: 1, UP: 1}, dtypes={"linear": "bfloat16"})


@checked(
    square(),
    square(),
    casts={("float32", "float16"): 2, ("float16", "float32"): 1, DOWN: 2, UP: 1},
    dtypes={"matmul": ["float16", "bfloat16"]},
    reference=torch.float32,
)
def test_two_low_dtypes_in_one_program_each_get_their_casts(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        h = torch.matmul(x, w)
    return torch.matmul(h.float(), w)
