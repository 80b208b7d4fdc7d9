"""Options are plain data; what is wrong with them is said by name, with the nearest valid one."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx import OptionsError, Plan, PlanError, Policy, Rule
from amp_fx.compiler.settings import LEVEL_OPTIONS, NUMERICS, WEIGHTS, OptionNames, Options
from amp_fx.passes import OPTIONAL, PASSES, PLANNED
from amp_fx.precision.placement.devices import builtin
from amp_fx.precision.placement.profile import ProfileError
from amp_fx.precision.plans.sensitivity import Sensitivity
from amp_fx.precision.policy.levels import AUTO, levels_of
from support.checks.option_pairs import AXES
from support.document_blocks import ROOT

BF16, FP16 = torch.bfloat16, torch.float16


def test_the_defaults_and_spellings_of_the_dtype() -> None:
    options = Options.parse()
    assert options == Options.parse(None, {}) == Options()
    found = options.dtype, options.policy, options.numerics, options.weights, options.scaler, options.strict
    assert found == (None, Policy(), "compiled", "auto", None, False)
    assert options.inductor == {}
    assert Options.parse(None, {"scaler": "default"}).scaler == "default"
    spellings: dict[torch.dtype | None, tuple[object, ...]] = {
        None: ("auto",),
        BF16: ("bfloat16", "bf16", "torch.bfloat16", torch.bfloat16),
        FP16: ("float16", "fp16", "half", "torch.float16", torch.float16, torch.half),
    }
    for dtype, names in spellings.items():
        assert {Options.parse(None, {"dtype": name}).dtype for name in names} == {dtype}


WIDE = {"op": "mm", "precision": "low", "result": "fp32"}

#: neither of the two low dtypes
BAD_DTYPES = ("fp32", "float32", torch.float32, torch.float64, "float8_e4m3fn", 16, None, "")


def test_another_dtype_of_torch_is_no_misspelling_of_a_low_one() -> None:
    for value, hint in ((torch.float64, ""), ("float32", ""), ("bfloat61", "Did you mean 'bfloat16'?")):
        with pytest.raises(OptionsError, match="valid: 'auto', 'bfloat16', 'float16'") as caught:
            Options.parse(None, {"dtype": value})
        assert str(caught.value).partition("torch.float16.")[2].strip() == hint


def test_auto_is_what_the_gpu_has_or_sensitivity_was_measured_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options.parse().low_dtype("cpu") is BF16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for native, dtype in ((True, BF16), (False, FP16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", mock.Mock(return_value=native))
        assert Options.parse().low_dtype("cuda") is dtype
    measured = Sensitivity("Net", FP16)
    assert Options(sensitivity=measured).low_dtype("cpu") is FP16
    assert Options(dtype=BF16, sensitivity=measured).low_dtype("cpu") is BF16
    # a name holds on every device
    options = Options.parse(None, {"dtype": "float16"})
    assert {options.low_dtype(device) for device in ("cpu", "cuda", "xpu")} == {FP16}


def test_policies_by_name_by_object_and_as_json_text_and_plans_of_forwards_alone() -> None:
    forward, backward = Plan("0/0"), Plan("0/0", phase="backward")
    assert Options.parse(None, {"plan": [forward, backward]}).plan == (forward,)
    data = {"base": "autocast", "rules": [{"op": "softmax", "precision": "fp32"}]}
    expected = Policy("autocast", (Rule("fp32", op="softmax"),))
    for form in (data, json.dumps(data), expected):
        assert Options.parse(None, {"policy": form}).policy == expected
    assert Options.parse(None, {"policy": "autocast"}).policy == Policy()


def test_numerics_eager_switches_on_inductors_rounding() -> None:
    rounding = {"emulate_precision_casts": True}
    assert Options.parse(None, {"numerics": "eager"}).inductor == rounding
    assert Options.parse(None, {"numerics": "eager", **rounding}).inductor == rounding
    assert Options.parse(None, {"numerics": "compiled"}).inductor == {}
    with pytest.raises(OptionsError, match=r"emulate_precision_casts.*numerics='eager'"):
        Options.parse(None, {"numerics": "eager", "emulate_precision_casts": False})


def test_inductor_options_by_their_own_names_and_those_of_modes() -> None:
    options = Options.parse(None, {"max_autotune": True, "triton.cudagraphs": False, "shape-padding": True})
    assert options.inductor == {"max_autotune": True, "triton.cudagraphs": False, "shape_padding": True}
    assert Options.parse("default").inductor == {}
    assert Options.parse("reduce-overhead").inductor == {"triton.cudagraphs": True}
    # over a mode
    cudagraphs = {"triton.cudagraphs": False}
    assert Options.parse("reduce-overhead", cudagraphs).inductor == cudagraphs


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"polcy": "autocast"}, r"'polcy' .*'policy'"),
        ({"dytpe": "bf16"}, r"'dytpe' .*'dtype'"),
        ({"stric": True}, r"'stric' .*'strict'"),
        # as near to an option of Inductor as to ours
        ({"scalers": "default"}, r"Did you mean 'scaler'"),
        ({"max_autotun": True}, r"'max_autotun' .*'max_autotune'"),
        ({"zzzzzz": 1}, r"'zzzzzz'.*dtype, .*fp8, .*numerics, .*strict, .*torch\._inductor\.config"),
        ({"inductor": {}}, r"'inductor'"),
        ({"numerics": "eagre"}, r"'eagre'.*'compiled', 'eager'.*'eager'"),
        ({"numerics": True}, r"numerics True"),
        *(({"strict": bad}, rf"strict .*True.*False.*{bad!r}") for bad in ("yes", 1)),
        ({"dtype": "bloat16"}, r"'bloat16'.*'bfloat16'"),
        ({"policy": "autocats"}, r"'autocats'.*'autocast'.*'autocast'"),
        ({"policy": 3}, r"policy .*'autocast'.*base, dtype, rules, sensitivity, budget.*3"),
        ({"policy": "fp9"}, r"'fp9'.*'autocast', 'fast', 'fp8'.*'fp8'"),
        ({"policy": "fp8", "fp8": "rowise"}, r"'rowise'.*'auto', 'rowwise', .*, 'mxfp8'.*'rowwise'"),
        ({"fp8": "rowwise"}, r"fp8='rowwise'.*'autocast'.*policy='fp8'"),
        ({"policy": "fast", "fp8": "tensorwise"}, r"fp8='tensorwise'.*'fp8'.*'fast'"),
        ({"policy": "fp8", "numerics": "eager"}, r"'fp8'.*numerics='eager'"),
        ({"weights": "freeze", "numerics": "eager"}, r"weights='freeze'.*numerics='eager'"),
        ({"fp88": "auto"}, r"'fp88' .*'fp8'"),
        ({"policy": "{oops"}, r"'{oops'"),
        ({"policy": {"bse": "autocast"}}, r"'bse'.*'base'"),
        ({"policy": {"rules": {"op": "mm"}}}, r"'rules'.*list"),
        *(({name: ["eager"]}, rf"{name} \['eager'\]") for name in ("numerics", "dtype", "fp8")),
        ({3: True}, "3"),
        ({"dtype": "bfloat16", "scaler": "default"}, "dtype='bfloat16'"),
        *(({"dtype": "float16", "scaler": bad}, f"amp_fx.GradScaler.*{bad!r}") for bad in (3, "")),
        *(({"plan": bad}, r"plan .*amp_fx\.Plan") for bad in (3, [3], {"nodes": []}, object())),
        ({"weights": "cached"}, r"'cached'.*'auto'.*'cache'"),
        *(({"disable_passes": bad}, f"list of names.*{bad!r}") for bad in ("fuse-casts", 3, None)),
        *(({"disable_passes": [bad]}, rf"{bad!r}.*'fuse-casts'") for bad in ("FuseCasts", "fuse", 3, "")),
        ({"disable_passes": ["gemm-epilog"]}, r"Did you mean 'gemm-epilogue'"),
        *(
            ({"disable_passes": ["fuse-casts", name]}, rf"'{name}'.*without.*'fuse-casts'")
            for name in sorted(PASSES.keys() - OPTIONAL)
        ),
        *(({"disable_passes": [name], "plan": Plan("0/0")}, f"'{name}'.*plan") for name in PLANNED),
        ({"disable_passes": ["gemm-epilogue"], "policy": {"rules": [WIDE]}}, r"'gemm-epilogue'.*'result'"),
        ({"profile": 3}, "profile .*'auto', 'off'.*3"),
        *(({"dtype": bad}, rf"{re.escape(repr(bad))}.*'auto', 'bfloat16', 'float16'") for bad in BAD_DTYPES),
    ],
)
def test_what_is_wrong_is_named_with_what_is_right(options: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionsError, match=named):
        Options.parse(None, options)


def test_options_survive_copying_and_pickling_and_policies_print_the_form_that_they_parse() -> None:
    options = Options.parse("reduce-overhead", {"policy": {"rules": [{"op": "mm", "precision": "fp32"}]}})
    assert copy.deepcopy(options) == options
    assert pickle.loads(pickle.dumps(options)) == options
    options = Options.parse(None, {"policy": "fp8", "fp8": "rowwise_gw_hp"})
    assert (str(options.policy), options.level) == ("fp8", "rowwise_gw_hp")
    assert set(LEVEL_OPTIONS["fp8"]) == {AUTO, *levels_of("fp8")}
    rules = {"base": "fp8", "dtype": "float16", "rules": [{"module": "head", "precision": "low"}]}
    assert Policy.parse(str(Policy.parse(rules))) == Policy.parse(rules)
    assert Options.parse(None, {"fp8": "auto"}).level == "auto"


def test_passes_are_disabled_by_name_also_with_a_plan_that_decides_nothing_of_them() -> None:
    assert Options.parse(None, {"disable_passes": OPTIONAL}).disable_passes == {*OPTIONAL}
    given = {"disable_passes": ["fuse-casts"], "plan": Plan("0/0")}
    assert Options.parse(None, given).disable_passes == {"fuse-casts"}


# ---- amp_fx.options and amp_fx.compile ----


WRONG: list[dict[str, Any]] = [{"inductor": bad} for bad in ({"max_autotun": True}, {"weights": "freeze"}, 3)]
WRONG += [{"weihgts": "freeze"}, {"policy": {"rules": [{"op": "softmaxx", "precision": "fp32"}]}}]


@pytest.mark.parametrize("given", WRONG, ids=str)
def test_errors_come_where_options_are_written(given: dict[str, Any]) -> None:
    with pytest.raises(OptionsError):
        amp_fx.options(**given)
    with pytest.raises(OptionsError):
        amp_fx.compile(nn.Linear(2, 2), **given)
    with pytest.raises(OptionsError, match=r"'max-autotun'.*max-autotune") as info:
        amp_fx.compile(nn.Linear(2, 2), mode="max-autotun")
    assert isinstance(info.value.__cause__, RuntimeError)


def test_files_that_options_name_are_read_where_options_are_written(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    for option, kind in (("profile", ProfileError), ("plan", PlanError)):
        path.unlink(missing_ok=True)
        for _ in ("it is missing", "it is none"):
            given: dict[str, Any] = {option: str(path)}
            with pytest.raises(kind, match=path.name):
                amp_fx.options(**given)
            with pytest.raises(kind, match=path.name):
                amp_fx.compile(nn.Linear(2, 2), **given)
            path.write_text("{}")
    builtin("cpu").save(path)
    assert amp_fx.options(profile=str(path)) == {"profile": str(path)}


def test_keywords_the_page_and_the_combinations_have_every_option_and_its_values() -> None:
    hints, page = get_type_hints(OptionNames), (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*)$", page.partition("\n## ")[0], re.MULTILINE))
    assert rows.keys() == hints.keys() - {"inductor"}
    # every row of the combinations is strict
    assert hints.keys() - AXES.keys() == {"inductor", "int8", "strict"}
    for name, valid in {"numerics": NUMERICS, "weights": WEIGHTS, **LEVEL_OPTIONS}.items():
        assert set(hints[name].__args__) == set(valid)
        assert [value for value in valid if f'"{value}"' not in rows[name]] == []
    for base, about in {"fp8": "fp8.md", "int8": "quantised.md"}.items():
        text = (ROOT / "docs" / about).read_text(encoding="utf-8")
        assert [name for name in levels_of(base) if f"`{name}`" not in text and f'"{name}"' not in text] == []
    for name in rows:
        with pytest.raises(OptionsError, match=name):
            Options.parse(None, {name: object()})


def test_options_are_what_torch_compile_takes_and_compile_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert amp_fx.options() == {}
    found = amp_fx.options(dtype="float16", weights="freeze", inductor={"max_autotune": False})
    assert found == {"dtype": "float16", "weights": "freeze", "max_autotune": False}
    seen: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda model, **given: seen.update(given) or model)
    own = {"coordinate_descent_tuning": False}
    mode = "max-autotune-no-cudagraphs"
    amp_fx.compile(nn.Linear(2, 2), policy="fast", mode=mode, inductor=own, dynamic=False)
    assert {"policy": "fast", "max_autotune": True, **own}.items() <= seen.pop("options").items()
    assert seen == {"backend": "amp_fx", "dynamic": False, "fullgraph": False}
