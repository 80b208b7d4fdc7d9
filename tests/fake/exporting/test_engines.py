"""The option that names the engine which serves what is exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import amp_fx
from amp_fx import OptionsError
from amp_fx.precision.policy.engines import ENGINES
from amp_fx.precision.policy.levels import AUTO, level_named
from support.models.small import UpDown

aten = torch.ops.aten


def _exported(**options: Any) -> torch.export.ExportedProgram:
    return amp_fx.export(UpDown(16, 32, 8).eval(), (torch.randn(32, 16),), **options)


def _products(ep: torch.export.ExportedProgram) -> list[tuple[str, torch.dtype]]:
    names = {aten.linear.default: "linear", aten._int_mm.default: "_int_mm"}
    return [
        (names[node.target], node.args[0].meta["val"].dtype)
        for node in ep.graph.nodes
        if node.target in names
    ]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=lambda engine: engine.name)
def test_a_row_names_kernels_that_there_are(engine: Any) -> None:
    level = level_named(engine.int8) if engine.int8 not in (None, AUTO) else None
    assert engine.int8 in (None, AUTO) or (level is not None and level.name == "int8")
    assert engine.otherwise or engine.int8 == AUTO


@pytest.mark.parametrize("engine", [None, *ENGINES])
def test_an_engine_has_a_dtype_that_it_has_kernels_for(engine: str | None) -> None:
    low = torch.bfloat16 if engine is None else ENGINES[engine].dtypes[0]
    assert _products(_exported(engine=engine)) == [("linear", low)] * 2
    asked = _exported(engine=engine, dtype="float16")
    assert _products(asked) == [("linear", torch.float16)] * 2


def test_what_onnxruntime_has_no_kernels_for_is_refused() -> None:
    with pytest.raises(OptionsError, match=r"bfloat16.*valid: float16"):
        _exported(engine="onnxruntime", dtype="bfloat16")
    with pytest.raises(OptionsError, match=r"'vino'.*openvino"):
        _exported(engine="vino")


@pytest.mark.parametrize("engine", ["tensorrt", "executorch"])
def test_an_engine_that_runs_no_form_of_int8_refuses_it_by_name(engine: str) -> None:
    with pytest.raises(OptionsError, match=f"engine='{engine}'"):
        _exported(engine=engine, policy="int8")
    with pytest.raises(OptionsError, match=f"engine='{engine}'"):
        _exported(engine=engine, plan=_planned())


def _planned() -> amp_fx.Plan:
    model, x = UpDown(16, 32, 8).eval(), torch.randn(32, 16)
    with torch.no_grad():
        return amp_fx.explain(model, x, options={"policy": "int8", "profile": "off"}).plan


def _warned(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(each.getMessage() for each in caplog.records if each.name.startswith("amp_fx"))


def test_scales_that_each_call_finds_stay_in_16_bits_for_openvino(caplog: pytest.LogCaptureFixture) -> None:
    assert _products(_exported(policy="int8"))[0][0] == "_int_mm"
    assert _products(_exported(engine="onnxruntime", policy="int8"))[0][0] == "_int_mm"
    assert not _warned(caplog)
    low = [("linear", torch.bfloat16)] * 2
    assert _products(_exported(engine="openvino", policy="int8")) == low
    assert "engine='openvino'" in _warned(caplog)
    # a plan without measured scales as well
    assert _products(_exported(engine="openvino", plan=_planned())) == low
    with pytest.raises(OptionsError, match="int8_signed"):
        _exported(engine="openvino", policy="int8", int8="int8_signed")
