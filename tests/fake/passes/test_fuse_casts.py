"""Conversions that do nothing go; a rounding that the user wrote stays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from amp_fx.graphs.keys import CAST_META
from amp_fx.passes import FuseCasts, InsertCasts, PassContext
from checks import check, checked
from graphs import rewrite, run_until

aten = torch.ops.aten
BF16, FP16 = torch.bfloat16, torch.float16
DOWN, UP = ("float32", "bfloat16"), ("bfloat16", "float32")


def square() -> Tensor:
    return torch.randn(8, 8)


def inserted_of(value: str, program: object, *args: Tensor) -> list[str]:
    """Names of the inserted casts of one value that are left after fusing."""
    gm = run_until(FuseCasts, program, *args).gm  # pyright: ignore[reportArgumentType]
    casts = gm.graph.find_nodes(op="call_function", target=aten.to.dtype)
    return [cast.name for cast in casts if cast.meta.get(CAST_META) and cast.args[0].name == value]


def test_narrowing_what_was_widened_is_the_value_itself() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x.float(), w)

    x = square().to(BF16)
    rewritten = rewrite(program, x, square())
    (matmul,) = rewritten.gm.graph.find_nodes(op="call_function", target=aten.matmul.default)
    assert matmul.args[0].op == "placeholder"
    assert inserted_of("to", program, x, square()) == []


def test_narrowing_to_another_dtype_is_no_round_trip() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x.float(), w)

    x = square().to(FP16)
    check(
        program,
        x,
        square(),
        casts={("float16", "float32"): 1, DOWN: 2, UP: 1},
        dtypes={"matmul": "bfloat16"},
        reference=torch.float32,
    )


@checked(square(), square(), casts={DOWN: 2, UP: 1}, reference=torch.float32)
def test_a_cast_equal_to_one_that_the_program_made_reuses_it(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    low = x.to(BF16)
    return low.abs(), torch.matmul(x, w)


@checked(square(), casts={DOWN: 2}, reference=torch.float32)
def test_the_programs_own_casts_are_never_merged(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.to(BF16), x.to(BF16).abs()


@checked(
    square(),
    casts={("float32", "float16"): 1, ("float16", "float32"): 1},
    reference=torch.float32,
    tolerance=0,
)
def test_the_users_narrowing_is_a_barrier(x: Tensor) -> Tensor:
    return x.to(FP16).float().exp()


def test_the_users_rounding_in_front_of_a_matmul_is_kept() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x.to(BF16).float(), w)

    rewritten = check(
        program,
        square(),
        square(),
        options={"dtype": "float16"},
        casts={DOWN: 1, UP: 1, ("float32", "float16"): 2, ("float16", "float32"): 1},
        reference=torch.float32,
    )
    assert rewritten.one("matmul").dtype is FP16


def test_the_users_rounding_serves_the_matmul_where_the_dtypes_agree() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x.to(BF16).float(), w)

    rewritten = rewrite(program, square(), square())
    (matmul,) = rewritten.gm.graph.find_nodes(op="call_function", target=aten.matmul.default)
    assert matmul.args[0].args == (rewritten.gm.graph.find_nodes(op="placeholder")[0], BF16)


@checked(square().to(BF16), square(), casts={UP: 2, DOWN: 2}, reference=torch.float32)
def test_a_widened_value_that_is_written_is_not_the_original(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    wide.add_(1)
    return torch.matmul(wide, w)


@checked(square().to(BF16), square(), casts={UP: 2, DOWN: 2}, reference=torch.float32)
def test_an_original_that_is_written_later_is_not_read_instead(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    x.add_(1)
    return torch.matmul(wide, w)


def test_an_inserted_cast_that_nobody_reads_goes() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x, w)

    gm = run_until(InsertCasts, program, square(), square()).gm
    (matmul,) = gm.graph.find_nodes(op="call_function", target=aten.matmul.default)
    with gm.graph.inserting_after(matmul):
        idle = gm.graph.call_function(aten.to.dtype, (matmul, torch.float32))
    idle.meta.update(matmul.meta)
    idle.meta["val"] = matmul.meta["val"].float()
    idle.meta[CAST_META] = True
    before = len(gm.graph.nodes)
    FuseCasts().call(gm, PassContext())
    assert len(gm.graph.nodes) == before - 1


@pytest.mark.parametrize("mark", [True, False])
def test_a_cast_to_the_dtype_it_has_goes_if_it_was_inserted(mark: bool) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x, w)

    gm = run_until(InsertCasts, program, square(), square()).gm
    (matmul,) = gm.graph.find_nodes(op="call_function", target=aten.matmul.default)
    with gm.graph.inserting_after(matmul):
        same = gm.graph.call_function(aten.to.dtype, (matmul, BF16))
    matmul.replace_all_uses_with(same, delete_user_cb=lambda user: user is not same)
    same.meta["val"] = matmul.meta["val"].clone()
    if mark:
        same.meta[CAST_META] = True
    FuseCasts().call(gm, PassContext())
    assert (same in gm.graph.find_nodes(op="call_function", target=aten.to.dtype)) != mark


def test_a_cast_of_the_programs_under_no_grad_is_not_reused() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            low = x.to(torch.bfloat16)
        return low.abs(), x @ w

    args = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    check(program, *args, casts={DOWN: 3, UP: 1}, reference=torch.float32)


def test_a_round_trip_is_seen_through_a_cast_that_does_nothing() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float().float() @ w

    rewritten = check(
        program, torch.randn(8, 8), torch.randn(8, 8), casts={DOWN: 2, UP: 2}, reference=torch.float32
    )
    assert rewritten.one("matmul").dtype is torch.bfloat16
