"""A user's mistakes reach the caller in amp_fx's own types, and name what to do."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_an_input_that_no_kernel_takes_beside_the_weights_is_named_before_anything_is_compiled(
    dtype: torch.dtype,
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, signal: torch.Tensor) -> torch.Tensor:
            return self.first(signal.reshape(-1, 4))

    model = torch.compile(Model(), backend="amp_fx")
    given = torch.ones(2, 4, dtype=dtype)
    with pytest.raises(amp_fx.InputError, match=rf"input 'signal' has dtype {dtype}.*torch\.float32"):
        model(given)
    with without_inductor():
        # as the message says
        assert model(given.to(torch.float32)).dtype is torch.float32
        assert torch.compile(Model().double(), backend="amp_fx")(given.double()).dtype is torch.float64


def test_parameters_in_the_other_16_bit_dtype_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    amp_fx.reset()
    for dtype in (torch.bfloat16, torch.float16):
        with without_inductor(), torch.no_grad():
            model = nn.Linear(4, 4).to(dtype)
            given: dict[str, Any] = {"dtype": "bfloat16", "profile": "off"}
            torch.compile(model, backend="amp_fx", options=given)(torch.randn(2, 4))
    (said,) = [row.getMessage() for row in caplog.records if "parameters are" in row.getMessage()]
    assert "2 parameters are float16" in said
    assert "{'dtype': 'float16'}" in said


def test_a_model_in_fp16_that_is_called_in_fp16_is_told_that_it_stays_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    amp_fx.reset()
    with without_inductor(), torch.no_grad():
        compiled = torch.compile(nn.Linear(4, 4).half(), backend="amp_fx", options={"dtype": "bfloat16"})
        assert compiled(torch.randn(2, 4).half()).dtype is torch.float16
    (said,) = [row.getMessage() for row in caplog.records if "parameters are" in row.getMessage()]
    assert "2 parameters are float16" in said
    assert "Load the model in fp32" in said


def test_a_plan_of_int8_is_refused_in_training_and_followed_without_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(32, 64)
    policy = {"base": "int8", "rules": [{"op": "linear", "precision": "int8"}]}
    with torch.no_grad():
        plan = amp_fx.explain(model, x, options={"policy": policy, "profile": "off"}).plan
    assert all(row.levels_below for row in plan.matmuls)
    compiled = amp_fx.compile(model, plan=plan)
    with pytest.raises(amp_fx.PlanError, match="int8, which have no gradients"):
        compiled(x)
    with without_inductor(), torch.no_grad():
        assert compiled(x).shape == (32, 64)


def test_a_file_of_another_kind_says_what_it_is_and_what_reads_it(tmp_path: Path) -> None:
    report = amp_fx.explain(nn.Linear(4, 4), torch.randn(2, 4))
    report.save(tmp_path / "report.json")
    report.plan.save(tmp_path / "plan.json")
    assert amp_fx.Plan.load(tmp_path / "plan.json") == report.plan
    with pytest.raises(amp_fx.PlanError, match=r"not a plan, but a report.*Report\.load"):
        amp_fx.Plan.load(tmp_path / "report.json")
    with pytest.raises(amp_fx.AmpFxError, match=r"not a report, but a plan.*Plan\.load"):
        amp_fx.Report.load(tmp_path / "plan.json")
    with pytest.raises(amp_fx.PlanError, match=r"there is no file '.*absent\.json'"):
        amp_fx.Plan.load(tmp_path / "absent.json")


SHAPES: list[tuple[torch.Tensor, Any, str]] = [
    (torch.ones(4, 4), ({2: torch.export.Dim("b")},), r"dimension 2 of input 'input'.*\(4, 4\)"),
    (torch.ones(4, 4), {"input": (None, None, torch.export.Dim("b"))}, "dimension 2 of input 'input'"),
    (torch.ones(1, 4), ({0: torch.export.Dim("b")},), r"\(1, 4\).*at least 2"),
    (torch.ones(1, 4), ({0: torch.export.Dim.DYNAMIC},), "at least 2"),
]


@pytest.mark.parametrize(("example", "shapes", "named"), SHAPES)
def test_dynamic_shapes_that_an_input_cannot_have_are_told_by_its_name(
    example: torch.Tensor, shapes: Any, named: str
) -> None:
    with pytest.raises(amp_fx.ExportError, match=named):
        amp_fx.export(nn.Linear(4, 4), (example,), dynamic_shapes=shapes)


def test_a_compiled_model_is_exported_by_its_own_names() -> None:
    compiled: Any = torch.compile(nn.Linear(4, 4))
    program = amp_fx.export(compiled, (torch.ones(2, 4),))
    assert [*program.state_dict] == ["weight", "bias"]
    # no size of 0 or 1 is refused where nothing is dynamic
    amp_fx.export(nn.Linear(4, 4), (torch.ones(1, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},))


def test_an_onnx_file_of_another_suffix_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(amp_fx.ExportError, match=r"ends in \.onnx; got '.*a\.pt2'"):
        amp_fx.export_onnx(nn.Linear(4, 4), (torch.ones(2, 4),), tmp_path / "a.pt2")
    assert not [*tmp_path.iterdir()]


def test_a_file_in_bfloat16_that_onnxruntime_has_no_kernels_for_names_the_dtype_to_give(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library)
    # one that is compiled is compared as it was before
    model: Any = torch.compile(nn.Linear(4, 4).eval(), backend=lambda *_: pytest.fail("compiled"))
    amp_fx.export_onnx(model, (torch.ones(2, 4),), tmp_path / "model.onnx")
    assert "dtype='float16'" in caplog.text


@pytest.mark.parametrize(
    ("chance", "training", "told"), [(0.5, True, "'1'"), (0.5, False, ""), (0.0, True, "")]
)
def test_a_model_that_is_exported_in_training_mode_is_told(
    chance: float, training: bool, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(chance)).train(training)
    amp_fx.export(model, (torch.ones(2, 4),))
    found = [row.getMessage() for row in caplog.records if "training mode" in row.getMessage()]
    assert len(found) == bool(told)
    assert all(told in text and "model.eval()" in text for text in found)


def test_a_comparison_without_a_loss_says_that_gradients_are_missing() -> None:
    with without_inductor():
        text = str(amp_fx.compare(nn.Linear(4, 4), torch.randn(2, 4)))
        assert "not compared: gradients" in text
        assert "Nothing is wrong with results" in text
        found = amp_fx.compare(nn.Linear(4, 4), torch.randn(2, 4), loss=torch.sum)
    assert "not compared" not in str(found)
    assert "Nothing is wrong:" in str(found)


def test_a_budget_that_lowers_nothing_says_so_and_names_an_error_that_gains() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    measured = amp_fx.calibrate(model, torch.randn(32, 64), torch.sum, profile="off")
    plan = measured.plan(budget=1e-9, verify=False)
    assert plan.lowered == (0, 0)
    found = re.search(r"nothing is gained; the next plan gains, at plan\(error=(.*)\)", str(plan))
    assert found
    assert any(measured.plan(error=float(found[1]), verify=False).lowered)
    assert measured.plan(verify=False).least is None
