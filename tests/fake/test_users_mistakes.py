"""A mistake in the options reaches the caller of ``torch.compile`` in amp_fx's own type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import amp_fx
from amp_fx.compiler import backend
from support.tracing.captured_graphs import without_inductor

MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"policyy": 1}, amp_fx.OptionsError, "policyy"),
    ({"dtype": "int3"}, amp_fx.OptionsError, "int3"),
    ({"policy": "bf8"}, amp_fx.OptionsError, "bf8"),
    ({"weights": "thaw"}, amp_fx.OptionsError, "thaw"),
    ({"numerics": "lazy"}, amp_fx.OptionsError, "lazy"),
    ({"plan": "absent.json"}, amp_fx.PlanError, r"absent\.json"),
]


@pytest.mark.parametrize(("options", "kind", "named"), MISTAKES)
def test_a_mistake_is_caught_as_what_it_is(
    options: dict[str, Any], kind: type[Exception], named: str
) -> None:
    model = torch.compile(nn.Linear(4, 4), backend="amp_fx", options=options)
    with pytest.raises(amp_fx.AmpFxError, match=named) as info:
        model(torch.randn(2, 4))
    assert isinstance(info.value, kind)
    assert not isinstance(info.value, BackendCompilerFailed)
    # of Dynamo's own text, which sends the user to PyTorch
    assert not any(
        word in str(info.value) for word in ("TORCHDYNAMO_VERBOSE", "TORCH_LOGS", "from user code")
    )


def test_a_package_of_a_file_that_is_not_there_or_holds_something_else_names_it(tmp_path: Path) -> None:
    with pytest.raises(amp_fx.ExportError, match=r"no file '.*absent\.pt2'"):
        amp_fx.package(tmp_path / "absent.pt2", "package.pt2")
    (tmp_path / "other.pt2").write_bytes(b"no program")
    with pytest.raises(amp_fx.ExportError, match=r"cannot read '.*other\.pt2'"):
        amp_fx.package(tmp_path / "other.pt2", "package.pt2")


@pytest.mark.parametrize("measure", [amp_fx.calibrate, amp_fx.compare, amp_fx.histogram])
@pytest.mark.parametrize("part", ["weight", "running_mean"])
def test_a_model_that_was_made_under_inference_mode_is_named(measure: Any, part: str) -> None:
    model = nn.BatchNorm1d(4)
    with torch.inference_mode():
        made = nn.BatchNorm1d(4)
    setattr(model, part, getattr(made, part))
    with pytest.raises(amp_fx.InputError, match=rf"{part} was made under torch\.inference_mode"):
        measure(model, torch.randn(2, 4), loss=torch.sum)


def test_a_frozen_model_that_was_made_under_inference_mode_is_compared() -> None:
    with torch.inference_mode():
        model = nn.Linear(4, 4).requires_grad_(False)
    with without_inductor():
        assert amp_fx.compare(model, torch.randn(2, 4)).healthy


def test_fp16_that_a_rule_keeps_in_fp32_is_not_said_to_gain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(backend, "say_wide", said.append)
    low: dict[str, Any] = {"dtype": "float16", "profile": "off"}
    ruled = {**low, "policy": {"rules": [{"op": "linear", "precision": "fp32"}]}}
    for options in (low, ruled):
        torch._dynamo.reset()
        with without_inductor(), torch.no_grad():
            torch.compile(nn.Linear(4, 4), backend="amp_fx", options=options)(torch.randn(2, 4))
    assert said == []
