"""A fixed budget of random programs; thousands more by ``python tests/fuzz.py``. Found bugs are tests elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor

import amp_fx.compiler.rewriting
import fuzz
from amp_fx import Plan
from support.ops.random_options import DrawnOptions
from support.ops.random_programs import Input, Program, programs

FP32, BF16 = torch.float32, torch.bfloat16
BUDGET = hypothesis.settings(
    max_examples=30,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[*hypothesis.HealthCheck],  # pyright: ignore
)


@BUDGET
@hypothesis.given(programs())
def test_random_programs_do_what_they_do_eagerly(program: Program) -> None:
    try:
        fuzz.compare(program)
    except fuzz.UNTRACED:
        # Dynamo does not trace it, so that it never reaches a backend
        hypothesis.reject()


def two(*lines: str, **more: Any) -> Program:
    """A program of two fp32 matrices."""
    matrices = Input((4, 4), FP32, False), Input((4, 4), FP32, True)
    return Program(matrices, lines, **{"outputs": ("y2",), "ambient": None, **more})


def test_programs_are_compiled_with_the_options_that_were_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite, plans = amp_fx.compiler.rewriting.rewrite, list[Plan]()

    def noted(*args: object, **kwargs: object) -> object:
        gm, plan = rewrite(*args, **kwargs)  # type: ignore[arg-type]
        plans.append(plan)
        return gm, plan

    monkeypatch.setattr(amp_fx.compiler.rewriting, "rewrite", noted)
    options = DrawnOptions(low=torch.float16, base="fast", rules=(("mul", "low"),), replayed=True)
    fuzz.compare(two("y2 = x0 * x1", options=options))
    # once by the policy and once by the plan, for both numerics
    assert [plan.node("mul").dtype for plan in plans] == [torch.float16] * 4
    assert {plan.policy for plan in plans} == {str(options.options("compiled").policy)}


#: what is wrong -> how, the program, and the words about it
WRONG: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, Any], str]] = {
    "dtype": (lambda value: value.to(BF16), {}, "bfloat16"),
    "value": (lambda value: 1.5 * value, {}, "off by"),
    "value in autocast": (lambda value: 1.5 * value, {"ambient": BF16}, "numerics='eager'"),
    "alias": (Tensor.clone, {"outputs": ("y2", "y3")}, "aliases are"),
}


@pytest.mark.parametrize("wrong_in", WRONG)
def test_what_is_wrong_is_found(wrong_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite, (spoil, given, found) = amp_fx.compiler.rewriting.rewrite, WRONG[wrong_in]

    def wrong(*args: object, **kwargs: object) -> object:
        gm, plan = rewrite(*args, **kwargs)  # type: ignore[arg-type]
        return (lambda *given: tuple(map(spoil, gm(*given)))), plan

    monkeypatch.setattr(amp_fx.compiler.rewriting, "rewrite", wrong)
    with pytest.raises(fuzz.DisagreementError, match=found):
        fuzz.compare(two("y2 = x0 @ x1", "y3 = y2.view(-1)", **given))
