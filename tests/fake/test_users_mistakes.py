"""A mistake in the options reaches the caller of ``torch.compile`` in amp_fx's own type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import amp_fx

MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"policyy": 1}, amp_fx.OptionsError, "policyy"),
    ({"dtype": "int3"}, amp_fx.OptionsError, "int3"),
    ({"plan": "absent.json"}, amp_fx.PlanError, r"absent\.json"),
]


@pytest.mark.parametrize(("options", "kind", "named"), MISTAKES)
def test_a_mistake_is_caught_as_what_it_is(
    options: dict[str, Any], kind: type[Exception], named: str
) -> None:
    model = torch.compile(nn.Linear(4, 4), backend="amp_fx", options=options)
    with pytest.raises(amp_fx.AmpFxError, match=named) as info:
        model(torch.randn(2, 4))
    assert isinstance(info.value, (kind, ValueError))
    assert not isinstance(info.value, BackendCompilerFailed)
