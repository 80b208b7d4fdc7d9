"""Code that Dynamo leaves to eager: it is told once, and ``amp_fx.compile(..., outside="autocast")`` lowers it."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx import OptionsError
from support.models.graph_breaks import COMPILED, LEFT, Between

X = torch.randn(2, 4, 8)
OFF: dict[str, Any] = {"profile": "off", "strict": True}
pytestmark = pytest.mark.usefixtures("without_inductor")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    rows = [row.getMessage() for row in caplog.records if row.levelno == logging.WARNING]
    return [text for text in rows if text.startswith("Dynamo leaves code")]


def run(model: Any, *args: Any, **options: Any) -> Any:
    return torch.compile(model, backend="amp_fx", options={**OFF, **options})(*(args or (X,)))


@pytest.mark.quick_rows("disabled", "recurrent", "in_context")
@pytest.mark.parametrize("part", LEFT)
def test_it_is_told_once_with_what_lowers_it(part: str, caplog: pytest.LogCaptureFixture) -> None:
    # as in a process in which something else was compiled
    run(nn.Linear(8, 8), X)
    for _ in range(2):
        run(Between(part))
        torch._dynamo.reset()
    (text,) = told(caplog)
    assert "inside torch.autocast('cpu', torch.bfloat16)" in text
    assert "amp_fx.compile(model, outside='autocast')" in text


@pytest.mark.quick_rows("broken")
@pytest.mark.parametrize("part", COMPILED)
def test_breaks_on_both_sides_of_which_all_is_compiled_are_not_told(part: str, caplog: Any) -> None:
    for _ in range(2):
        run(Between(part))
        torch._dynamo.reset()
    assert told(caplog) == []


def test_an_error_that_reaches_the_user_is_none_that_leaves_code_to_eager(caplog: Any) -> None:
    run(nn.Linear(8, 8), X)
    with pytest.raises(OptionsError):
        torch.compile(Between("whole"), backend="amp_fx", options={"strict": 3})(X)
    run(Between("whole"))
    assert told(caplog) == []


@pytest.mark.parametrize("why", ["autocast", "autocast is off", "slower", "in bf16", "explained"])
def test_it_is_not_told_where_there_is_nothing_to_lower(why: str, caplog: Any, monkeypatch: Any) -> None:
    model, x = Between("disabled"), X
    around: Any = contextlib.nullcontext()
    if why == "slower":
        monkeypatch.setattr("amp_fx.compiler.settings.Options.is_slower_low", lambda *_: True)
    elif why == "in bf16":
        model, x = model.bfloat16(), x.bfloat16()
    elif why.startswith("autocast"):
        around = torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast")
    with around:
        amp_fx.explain(model, x, options=OFF) if why == "explained" else run(model, x)
    assert told(caplog) == []


# ---- amp_fx.compile(..., outside="autocast") ----


class Seen(nn.Linear):
    """Remembers in which dtype it has computed, without a graph."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.seen: list[torch.dtype] = []

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        self.seen.append(result.dtype)
        return result


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.apart = nn.Linear(8, 8), Seen()

    def forward(self, x: Tensor) -> Tensor:
        return self.apart(self.first(x).relu())


def within(model: Any, **options: Any) -> Any:
    return amp_fx.compile(model, outside="autocast", **{**OFF, **options})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_eager_code_runs_in_the_low_dtype_and_graphs_as_amp_fx_places_them(dtype: str, caplog: Any) -> None:
    model, rule = Around(), {"rules": [{"module": "first", "precision": "fp32"}]}
    with amp_fx.record() as recording:
        result = within(model, dtype=dtype, policy=rule)(X)
        result.float().sum().backward()
    low = getattr(torch, dtype)
    assert (model.apart.seen, result.dtype) == ([low], low)
    # autocast knows no rules
    assert [row.dtype for plan in recording.plans for row in plan.matmuls] == [torch.float32]
    assert not torch.is_autocast_enabled("cpu")
    assert told(caplog) == []


def test_without_it_eager_code_stays_in_fp32() -> None:
    model = Around()
    assert amp_fx.compile(model, **OFF)(X).dtype is torch.float32
    assert model.apart.seen == [torch.float32]


def test_functions_copies_and_pickled_models_have_it_and_modules_inside_other_graphs_do_not() -> None:
    model = Around()
    assert within(lambda x: model(x))(X).dtype is torch.bfloat16
    compiled = within(model)
    assert type(compiled) is type(torch.compile(model))
    for other in (compiled, copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert other(X).dtype is torch.bfloat16
    # the outer call says how
    whole = torch.compile(within(nn.Linear(8, 8)), backend="amp_fx", options=OFF, fullgraph=True)
    assert whole(X).dtype is torch.float32
    inner = within(nn.Linear(8, 8))
    assert run(lambda x: inner(x) + 1).dtype is torch.float32


def test_autocast_is_off_again_after_an_error_and_in_a_call_within_a_call() -> None:
    def again(x: Tensor, deep: bool) -> Tensor:
        torch._dynamo.graph_break()
        return compiled(x, False) if deep else x @ x.mT

    compiled = within(again)
    assert compiled(X, True).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(RuntimeError):
        within(Around())(torch.randn(2, 3))
    assert not torch.is_autocast_enabled("cpu")


def test_where_graphs_stay_in_fp32_as_that_is_faster_so_does_eager_code(monkeypatch: Any) -> None:
    monkeypatch.setattr("amp_fx.compiler.settings.Options.is_slower_low", lambda *_: True)
    model = Around()
    assert within(model)(X).dtype is torch.float32
    assert model.apart.seen == [torch.float32]


def test_a_device_without_an_op_list_is_left_alone() -> None:
    assert within(nn.Linear(8, 8, device="meta"))(X.to("meta")).dtype is torch.float32


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"outside": "autocats"}, r"outside 'autocats'.*'autocast'.*Did you mean 'autocast'"),
        ({"outside": True}, r"outside True.*'autocast'"),
        ({"outside": "autocast", "scaler": "default"}, r"outside='autocast'.*scaler='default'"),
    ],
)
def test_what_is_wrong_with_it_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionsError, match=named):
        amp_fx.compile(nn.Linear(8, 8), dtype="float16", **given)


def test_among_the_options_of_torch_compile_it_is_an_error_that_says_where_it_belongs() -> None:
    given: dict[str, Any] = {"outside": "autocast"}
    with pytest.raises(OptionsError, match=r"'outside'.*argument of amp_fx\.compile"):
        amp_fx.options(**given)
