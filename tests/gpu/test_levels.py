"""Policy fp8 on a device that has it: numerics of its kernels, and whether the cut chooses as a clock would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx.precision.placement.measuring import measure
from amp_fx.precision.placement.profile import FLOAT8
from amp_fx.precision.policy.levels import levels_of
from benchmarks.workloads import llama_512
from support.checks.below_16_bits import MLP, error, exact_gradients, gradients
from support.checks.held_memory import renewed
from support.models.small import GPT


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


needs_fp8 = pytest.mark.skipif(_capability() < (8, 9), reason="needs a CUDA device with fp8")
pytestmark = [pytest.mark.gpu, needs_fp8]

BF16 = {"profile": "off", "strict": True}

LEVELS = levels_of("fp8")


def in_fp8(recipe: str) -> dict[str, Any]:
    """Options under which all that may runs in fp8; skips where the library has no such kernels."""
    if recipe == "mxfp8" and _capability() not in ((10, 0), (10, 3)):
        pytest.skip("scales of blocks are for sm_100 and sm_103")
    if recipe.startswith("rowwise") and _capability() == (12, 0):
        pytest.skip("pytorch#192707: no scales of rows on sm_120")
    return {**BF16, "policy": "fp8", "fp8": recipe}


def gpt() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = GPT(layers=4, width=256, heads=4, vocab=320, length=128)
    tokens = torch.randint(320, (4, 129), device="cuda")
    return _drawn(model), [tokens[:, :-1], tokens[:, 1:]]


def llama() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model, batch = llama_512(batch=4, length=128, layers=4, width=256, hidden=640, vocab=320)
    return _drawn(model), [value.cuda() for value in batch.values()]


def _drawn(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=0.04)
    return model.cuda()


#: model -> the most error with scales of rows, and with one for each operand
BOUNDS = {gpt: (0.115, 0.14), llama: (0.17, 0.20)}


@pytest.mark.parametrize("make", BOUNDS)
@pytest.mark.parametrize("recipe", LEVELS)
def test_gradients_are_as_near_to_fp64_as_e4m3_lets_them(make: Callable[..., Any], recipe: str) -> None:
    options, (by_row, whole) = in_fp8(recipe), BOUNDS[make]
    model, args = make()
    exact = exact_gradients(model, args)
    low = error(gradients(model, args, BF16, generate=True), exact)
    found = error(gradients(model, args, options, generate=True), exact)
    assert 3 * low < found < (by_row if LEVELS[recipe].by_row else whole)


def fp8_error(model: nn.Module, x: Tensor, recipe: str) -> float:
    exact = exact_gradients(model, [x])
    return error(gradients(model, [x], in_fp8(recipe), generate=True), exact)


@pytest.mark.parametrize("recipe", LEVELS)
def test_sizes_that_fill_no_tile_are_multiplied_right(recipe: str) -> None:
    # 48 and 80 columns, 96 rows: none is a multiple of 128, as scales of blocks are laid out in
    assert fp8_error(MLP(96, 160, 160, 80, 32).cuda(), torch.randn(96, 96, device="cuda"), recipe) < 0.12


@pytest.mark.parametrize("recipe", LEVELS)
def test_values_of_very_different_magnitude_find_their_own_scales(recipe: str) -> None:
    x = torch.randn(256, 256, device="cuda")
    if LEVELS[recipe].by_row:
        # rows only: what the gradient of a weight contracts has a scale for each column
        x *= torch.exp2(torch.arange(256, device="cuda") % 16 - 8.0)[:, None]
    assert fp8_error(MLP(256, 256, 256, 32).cuda(), x, recipe) < 0.12


@pytest.mark.parametrize("recipe", LEVELS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen_and_zeros_stay_zeros(recipe: str, bad: float) -> None:
    options = in_fp8(recipe)
    model, x = MLP(32, 64, 64, 16).cuda(), torch.randn(32, 32, device="cuda")
    assert not gradients(model, [torch.zeros_like(x)], options, generate=True)[0].any()
    x[3, 5] = bad
    exact = exact_gradients(model, [x])
    for ours, theirs in zip(gradients(model, [x], options, generate=True), exact, strict=True):
        assert not ours[~theirs.isfinite()].isfinite().any()


@pytest.mark.parametrize("recipe", [name for name in LEVELS if not name.startswith("rowwise")])
def test_gradients_of_weights_are_not_rounded_to_16_bits(recipe: str) -> None:
    options = in_fp8(recipe)
    model, x = MLP(64, 128, 128, 32).cuda(), torch.randn(64, 64, device="cuda")
    weight = gradients(model, [x], options, generate=True)[2]
    assert weight.shape == (128, 128)
    assert not torch.equal(weight, weight.bfloat16().float())


def test_the_profile_of_the_device_has_a_rate_for_fp8() -> None:
    peak = measure("cuda", 2.0).peak
    assert peak[FLOAT8] > 1.2 * peak["bfloat16"]


class Net(nn.Module):
    """Linears without gradients, one with a weight whose columns are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(256, 512), nn.Linear(512, 512), nn.Linear(512, 64)
        self.columns = nn.Parameter(torch.randn(512, 512) / 24)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.first(x))
        x = x + self.second(x).relu()
        return self.head(x + x @ self.columns)


@pytest.mark.parametrize("rows", [1, 48, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_without_gradients_copies_of_weights_give_what_casts_give(recipe: str, dtype: str, rows: int) -> None:
    model, x = Net().cuda(), torch.randn(rows, 256, device="cuda")
    found = {}
    for weights in ("cast", "cache"):
        torch._dynamo.reset()
        options = {**in_fp8(recipe), "weights": weights, "dtype": dtype}
        with torch.no_grad():
            found[weights] = torch.compile(model, backend="amp_fx", options=options)(x)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
    assert 0.005 < error([found["cast"]], [exact]) < 0.06
    # Inductor's division rounds otherwise; scales of rows are powers of two
    assert torch.equal(found["cast"], found["cache"]) or not LEVELS[recipe].by_row
    assert error([found["cache"]], [found["cast"]]) < 0.02


def test_fp8_copies_of_weights_are_renewed_without_a_wait_of_the_host() -> None:
    before, after, exact = renewed(Net().cuda(), torch.randn(48, 256, device="cuda"), in_fp8("auto"))
    assert error([after], [exact]) < 0.06
    assert error([before], [exact]) > 0.1


def test_an_exported_program_runs_in_fp8() -> None:
    model, x = Net().cuda().eval(), torch.randn(48, 256, device="cuda")
    program = amp_fx.export(model, (x,), policy="fp8")
    assert sum(value.dtype is torch.float8_e4m3fn for value in program.state_dict.values()) == 3
    with torch.no_grad():
        found, exact = program.module()(x), copy.deepcopy(model).double()(x.double())
    assert 0.005 < error([found], [exact]) < 0.06
