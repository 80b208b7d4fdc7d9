"""Each parameter's gradient is judged by itself: where all are one vector, a small one that is lost moves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import amp_fx
from amp_fx.instruments.step import Step, relative_error, zeroed
from support.checks.step_errors import Run, far_off, wrong_gradients
from support.models.small import UpDown


def gradients() -> dict[str, Tensor]:
    """One large, one small, and what is left where all of a gradient cancels."""
    exact = {
        "large": torch.randn(64, 64),
        "small": 1e-2 * torch.randn(16),
        "cancelled": 1e-8 * torch.randn(16),
    }
    return {name: value.double() for name, value in exact.items()}


def test_a_gradient_that_is_lost_is_named_though_all_together_are_near() -> None:
    exact = gradients()
    found = {**exact, "small": torch.zeros(16), "cancelled": torch.zeros(16)}
    assert relative_error(found, exact) < 1e-3
    assert zeroed(found, exact) == ["small"]
    assert zeroed(exact, found) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda value: 0 * value,
        lambda value: -value,
        lambda value: 1.1 * value,
        lambda value: value * torch.nan,
    ],
)
def test_one_gradient_that_is_worse_than_another_runs_is_named(change: Callable[[Tensor], Tensor]) -> None:
    exact = gradients()
    theirs = {name: value.bfloat16().double() for name, value in exact.items()}
    assert list(wrong_gradients({**theirs, "small": change(exact["small"])}, theirs, exact)) == ["small"]


def test_a_gradient_that_cancels_or_that_the_other_run_has_lost_too_is_not_wrong() -> None:
    exact = gradients()
    theirs = {name: value.bfloat16().double() for name, value in exact.items()}
    assert not wrong_gradients({**theirs, "cancelled": torch.zeros(16)}, theirs, exact)
    lost = {**theirs, "small": torch.zeros(16)}
    assert not wrong_gradients(lost, lost, exact)


def test_a_bias_in_front_of_a_norm_is_judged_by_the_gradient_of_its_weight() -> None:
    # in fp64 nothing but rounding is left of it
    exact = {**gradients(), "weight": torch.ones(256).double(), "bias": torch.full((16,), 1e-17).double()}
    theirs = {name: value.bfloat16().double() for name, value in exact.items()}
    for error, wrong in ((1e-3, []), (1.0, ["bias"])):
        assert list(wrong_gradients({**theirs, "bias": torch.full((16,), error)}, theirs, exact)) == wrong
    # one that is not zero is judged by itself
    exact["bias"] *= 1e13
    assert list(wrong_gradients({**theirs, "bias": torch.full((16,), 1e-1)}, theirs, exact)) == ["bias"]


@pytest.mark.parametrize("change", [lambda value: 0 * value, lambda value: -value])
@pytest.mark.parametrize("name", ["large", "small", "tiny"])
def test_one_gradient_that_is_wrong_in_one_of_several_batches_is_named(
    name: str, change: Callable[[Tensor], Tensor]
) -> None:
    exact = [{**gradients(), "tiny": torch.full((2,), 3e-4).double()} for _ in range(3)]
    theirs = [{name: value.bfloat16().double() for name, value in each.items()} for each in exact]

    def judged(ours: list[dict[str, Tensor]]) -> dict[str, Any]:
        runs = ([Run(0.0, {}, each, {}, {}) for each in run] for run in (ours, exact, theirs))
        return far_off(*runs)

    assert not judged(theirs)
    spoiled = {**theirs[1], name: change(theirs[1][name])}
    (named,) = (
        each for part, each in judged([theirs[0], spoiled, theirs[2]]).items() if part.startswith("1 of")
    )
    assert list(named) == [name]


@pytest.mark.usefixtures("without_inductor")
def test_compare_names_parameters_whose_gradient_has_become_zero() -> None:
    whole = Step.results

    def spoiled(step: Step, *given: Any) -> dict[str, Tensor]:
        return {
            name: each * (name not in ("up.weight", "up.bias")) for name, each in whole(step, *given).items()
        }

    with mock.patch.object(Step, "results", spoiled):
        found = amp_fx.compare(
            UpDown(), torch.randn(4, 8), loss=lambda y: y.square().mean(), options={"profile": "off"}
        )
    assert not found.healthy
    assert all(each in found.verdict for each in ("up.weight", "1 more", "zero"))
