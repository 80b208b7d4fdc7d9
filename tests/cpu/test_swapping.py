"""Parameters change places with others after they were compiled: torch allows it, and so does amp_fx."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from amp_fx import CaptureError, FallbackWarning, GradScaler
from support.checks.held_memory import Held
from support.models.small import Parts
from support.tracing.captured_graphs import DEFAULTS

SCALER = "swapping"


def net() -> nn.Module:
    parts = {"tokens": nn.Embedding(16, 32), "up": nn.Linear(32, 64), "norm": nn.LayerNorm(64)}
    return Parts(lambda m, i: m.down(m.norm(m.up(m.tokens(i)).relu())), **parts, down=nn.Linear(64, 8))


def trained(model: Callable[..., Tensor], i: Tensor) -> Tensor:
    loss = model(i).square().mean()
    loss.backward()
    return loss.detach()


def asked(model: Callable[..., Tensor], i: Tensor) -> Tensor:
    return model(i).clone()


#: how a program uses a model, and the options
USES: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "training": (trained, {}),
    "training in fp16": (trained, {"dtype": "float16", "scaler": SCALER}),
    "training after a fallback": (trained, {"strict": False}),
    "cached weights": (torch.no_grad()(asked), {"weights": "cache", "numerics": "eager"}),
    "by default": (torch.inference_mode()(asked), {}),
    "frozen": (torch.no_grad()(asked), {"weights": "freeze", "strict": False}),
}


def fail(*_: Any, **__: Any) -> NoReturn:
    raise CaptureError("on purpose")


class Used(NamedTuple):
    model: nn.Module
    call: Callable[[], Tensor]
    eagerly: Callable[[], Tensor]  # what the call should give, by autocast

    def follows(self, change: Callable[[], object]) -> bool:
        """True if the next call after a change of the parameters gives what they say, and not what it gave before."""
        before = self.call()
        self.model.zero_grad()
        change()
        now = self.call()
        torch.testing.assert_close(now, self.eagerly(), rtol=0.03, atol=0.03)
        return not torch.allclose(now, before, rtol=0.1, atol=0.1)


@pytest.fixture(params=USES)
def used(request: pytest.FixtureRequest, op_by_op: None) -> Iterator[Used]:
    use, options = USES[request.param]
    # a graph finds it by its name
    scaler = GradScaler("cpu", name=SCALER)
    model, i, low = net(), torch.arange(16), getattr(torch, options.get("dtype", "bfloat16"))
    compiled = torch.compile(model, backend="amp_fx", options={**DEFAULTS, **options})

    def eagerly() -> Tensor:
        with torch.autocast("cpu", low):
            return use(model, i).float()

    with contextlib.ExitStack() as stack:
        if "fallback" in request.param:
            # a mock would keep the graphs
            stack.enter_context(mock.patch("amp_fx.compiler.backend.rewrite", fail))
            stack.enter_context(pytest.warns(FallbackWarning))
        for _ in range(2):
            use(compiled, i)
        yield Used(model, lambda: use(compiled, i), eagerly)
    del scaler


def double(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)


@pytest.mark.quick_rows("by default", "frozen")
def test_two_models_exchange_their_parameters_and_change_them_back(used: Used) -> None:
    assert [p for p in used.model.parameters() if weakref.getweakrefs(p)] == []
    used.model.zero_grad()
    held, others = Held(), [copy.deepcopy(used.model)]
    double(others[0])

    def exchange() -> None:
        for mine, theirs in zip(used.model.parameters(), others[0].parameters(), strict=True):
            torch.utils.swap_tensors(mine, theirs)

    assert used.follows(exchange)
    assert used.follows(exchange)
    others.clear()
    gc.collect()
    # what was made of the others went with them
    assert held.bytes() == 0


def test_a_module_is_moved_by_swapping(used: Used) -> None:
    def move() -> None:
        with mock.patch("torch.__future__._swap_module_params_on_conversion", True):
            used.model.double()
            double(used.model)
            used.model.float()

    assert used.follows(move)
