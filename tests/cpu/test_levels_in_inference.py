"""Inference in fp8 on a CPU, which emulates it: where weights live, and what changes them."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import amp_fx
import zoo
from graphs import op_by_op, without_inductor
from holding import Held
from levels import error, options

FP8 = torch.float8_e4m3fn


class Net(nn.Module):
    """Linears that share what they read, one whose columns are multiplied, a residual, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.up = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.columns = nn.Parameter(torch.randn(64, 64) / 8)
        self.bias, self.head = nn.Parameter(torch.randn(64)), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        x = x + F.silu(self.gate(x)) * self.up(x)
        x = x + torch.addmm(self.bias, x.view(-1, 64), self.columns).view(x.shape)
        return self.head(x)


#: bytes of the weights of Net's matmuls in fp8, and of their factors
IN_FP8, FACTORS = 32 * 64 + 3 * 64 * 64, 4 * 4 * 64


@pytest.fixture(scope="module")
def model() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(1))


def compiled(model: nn.Module, folder: Path, recipe: str, weights: str, **settings: Any) -> Any:
    torch._dynamo.reset()
    # strict, what is frozen may not change
    given = options(folder, recipe, weights=weights, strict=weights != "freeze")
    return torch.compile(model, backend="amp_fx", options=given, **settings)


def exact(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).double()(x.double())


@pytest.fixture(scope="module")
def cast(model: Net, x: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    with torch.no_grad(), op_by_op():
        return compiled(model, tmp_path_factory.mktemp("cast"), "rowwise", "cast")(x)


def test_results_are_as_near_to_fp64_as_e4m3_lets_them(model: Net, x: Tensor, cast: Tensor) -> None:
    with torch.no_grad(), torch.autocast("cpu"):
        low = model(x)
    wrong, wrong_low = (error([result], [exact(model, x)]) for result in (cast, low))
    assert 3 * wrong_low < wrong < 0.04


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(("weights", "mode"), [("cache", torch.no_grad), ("auto", torch.inference_mode)])
def test_copies_of_weights_take_half_of_what_they_take_in_bf16_and_follow_their_weights(
    model: Net,
    x: Tensor,
    cast: Tensor,
    tmp_path: Path,
    weights: str,
    mode: type[AbstractContextManager[None]],
) -> None:
    model, held = copy.deepcopy(model), Held()
    run, in_each_call = (compiled(model, tmp_path, "rowwise", each) for each in (weights, "cast"))
    with mode():
        assert torch.equal(run(x), cast)
        # biases and the head's weight are bf16
        others = 2 * (4 * 64 + 16 + 16 * 64)
        assert held.bytes() == IN_FP8 + FACTORS + others
        # how else weights change is test_weights.py's
        for weight in (model.gate.weight, model.columns):
            before = run(x).clone()
            weight.data.mul_(4)
            found = run(x)
            assert torch.equal(found, in_each_call(x))
            assert not torch.equal(found, before)
    assert held.bytes() == IN_FP8 + FACTORS + others


@pytest.mark.usefixtures("op_by_op")
def test_frozen_weights_are_folded_and_folded_again(model: Net, x: Tensor, tmp_path: Path) -> None:
    model = copy.deepcopy(model)
    run, in_each_call = (compiled(model, tmp_path, "rowwise", each) for each in ("freeze", "cast"))
    with torch.no_grad():
        assert torch.equal(run(x), in_each_call(x))
        for weight in (model.gate.weight, model.columns):
            weight.data.mul_(4)
            assert torch.equal(run(x), in_each_call(x))


@pytest.mark.usefixtures("op_by_op")
def test_one_graph_takes_any_number_of_rows_with_one_scale_for_them(
    model: Net, x: Tensor, tmp_path: Path
) -> None:
    with torch.no_grad(), amp_fx.record() as recording:
        run = compiled(model, tmp_path, "tensorwise", "cache", dynamic=True, fullgraph=True)
        for rows in (x, x[:3], x[:2, :5].contiguous()):
            assert error([run(rows)], [exact(model, rows)]) < 0.04
    (plan,) = recording.plans
    assert plan.meaning == "tensorwise"
    assert [row.computed is FP8 for row in plan.nodes if row.flops] == [True] * 4 + [False]


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_public_architectures_are_as_near_to_fp32_as_e4m3_lets_them(name: str, tmp_path: Path) -> None:
    case = zoo.make(name)
    model, batch = copy.deepcopy(case.model).eval(), case.inputs(0)
    errors = []
    with torch.no_grad():
        wide = _floating(case.run(model, batch))
        for given in ({"profile": "off", "weights": "cast"}, options(tmp_path, "rowwise", weights="cast")):
            torch._dynamo.reset()
            with without_inductor():
                compiled: Any = torch.compile(model, backend="amp_fx", options={**given, "strict": True})
                found = _floating(case.run(compiled, batch))
            assert [value.dtype for value in found] == [value.dtype for value in wide]
            errors.append(error(found, [value.double() for value in wide]))
    in_bf16, in_fp8 = errors
    assert 5 * in_bf16 < in_fp8 < 0.06


def _floating(outputs: Any) -> list[Tensor]:
    return [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]
