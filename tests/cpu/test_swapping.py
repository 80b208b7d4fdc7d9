"""Parameters change places with others after they were compiled: torch allows it, and so does amp_fx."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from amp_fx import CaptureError, FallbackWarning, GradScaler
from graphs import DEFAULTS
from holding import Held
from small_models import Parts

SCALER = "swapping"


def net() -> nn.Module:
    parts = {"tokens": nn.Embedding(16, 32), "up": nn.Linear(32, 64), "norm": nn.LayerNorm(64)}
    return Parts(lambda m, i: m.down(m.norm(m.up(m.tokens(i)).relu())), **parts, down=nn.Linear(64, 8))


def trained(model: Callable[..., Tensor], i: Tensor) -> Tensor:
    loss = model(i).square().mean()
    loss.backward()
    return loss.detach()


def asked(model: Callable[..., Tensor], i: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(i).clone()


def asked_without_gradients(model: Callable[..., Tensor], i: Tensor) -> Tensor:
    with torch.no_grad():
        return model(i)


#: how a program uses a model, and the options
USES: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "training": (trained, {}),
    "training in fp16": (trained, {"dtype": "float16", "scaler": SCALER}),
    "training after a fallback": (trained, {"strict": False}),
    "cached weights": (asked_without_gradients, {"weights": "cache", "numerics": "eager"}),
    "by default": (asked, {}),
    "frozen": (asked_without_gradients, {"weights": "freeze", "strict": False}),
}


def fail(*_: Any, **__: Any) -> NoReturn:
    raise CaptureError("on purpose")


@dataclass
class Used:
    """A model that was compiled and called.

    Attributes:
        model: the model.
        call: calls it once more.
        eagerly: what the call should give, by autocast.
    """

    model: nn.Module
    call: Callable[[], Tensor]
    eagerly: Callable[[], Tensor]


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
            stack.enter_context(mock.patch("amp_fx.backend.rewrite", fail))
            stack.enter_context(pytest.warns(FallbackWarning))
        for _ in range(2):
            use(compiled, i)
        model.zero_grad()
        yield Used(model, lambda: use(compiled, i), eagerly)
    del scaler


def follows(used: Used, before: Tensor) -> bool:
    now = used.call()
    torch.testing.assert_close(now, used.eagerly(), rtol=0.03, atol=0.03)
    return not torch.allclose(now, before, rtol=0.1, atol=0.1)


def test_parameters_are_swapped(used: Used) -> None:
    assert [p for p in used.model.parameters() if weakref.getweakrefs(p)] == []
    held, before = Held(), used.call()
    used.model.zero_grad()
    for mine in used.model.parameters():
        torch.utils.swap_tensors(mine, nn.Parameter(2 * mine.detach()))
    assert follows(used, before)
    gc.collect()
    # what was made of the old ones went with them
    assert held.bytes() == 0


def test_a_module_is_moved_by_swapping(used: Used) -> None:
    before = used.call()
    used.model.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        used.model.double()
        with torch.no_grad():
            for parameter in used.model.parameters():
                parameter.mul_(2.0)
        used.model.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert follows(used, before)


def test_two_models_exchange_their_parameters(used: Used) -> None:
    other, before = copy.deepcopy(used.model), used.call()
    used.model.zero_grad()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2.0)
    expected = used.eagerly()
    used.model.zero_grad()
    for mine, theirs in zip(used.model.parameters(), other.parameters(), strict=True):
        torch.utils.swap_tensors(mine, theirs)
    assert follows(used, before)
    used.model.zero_grad()
    for mine, theirs in zip(used.model.parameters(), other.parameters(), strict=True):
        torch.utils.swap_tensors(mine, theirs)
    torch.testing.assert_close(used.call(), expected, rtol=0.03, atol=0.03)
