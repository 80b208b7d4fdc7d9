"""Numbers that stand in the text of pages, made from benchmarks/results: the phrases that must be found there.

Tables are written by ``benchmarks.page``. A phrase of a sentence is written by hand, and ``tests/fake/test_numbers.py``
compares it with what is made here, and names each number of a page that nothing here makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from benchmarks.page import RESULTS
from benchmarks.results import TimingRow, read_timings, relative

#: case -> arm -> what was timed
_Cases: TypeAlias = Mapping[str, Mapping[str, TimingRow]]


def quotes(folder: Path = RESULTS) -> dict[str, list[str]]:
    """Page -> phrases."""
    trained = _cases(folder, "trained_cpu_x86_64_xeon_amx")
    xeon = _cases(folder, "engines_cpu_x86_64_sapphire_rapids_2026-11-26.jsonl")
    zen5 = _cases(folder, "engines_packages_cpu_x86_64_zen5_2026-11-28.jsonl")
    two_threads = _cases(folder, "timings_cpu_x86_64_avx512_bf16_2026-11-23_h_two_threads")
    h200 = {
        **_cases(folder, "timings_cuda_h200_2026-11-26"),
        **_cases(folder, "timings_cuda_h200_2026-11-27"),
    }
    gpt2, bert = h200["gpt2"], h200["bert"]
    training = [_time(case, "amp_fx") for case in h200.values() if case["autocast"].mode == "training"]
    minilm, linears, row = trained["trained_minilm"], two_threads["linears_batch1"], xeon["engines_linears_1"]
    of_minilm = 1 / _time(minilm, "int8_calibrated"), _error(minilm, "int8_calibrated")
    fp8 = f"{_time(gpt2, 'fp8'):.2f} of autocast's time", f"at {_memory(gpt2, 'fp8'):.2f} of its peak memory"
    token = f"a token of a small Llama {_time(h200['llama_decode'], 'fp8'):.2f}"
    # OpenVINO's time, of amp_fx's
    efficientnet, fcpe = (
        _time(trained[f"trained_{name}"], "openvino", "amp_fx") for name in ("efficientnet", "fcpe")
    )
    onnxruntime = _ms(row, "onnxruntime_int8")
    torchao, int8, int8_all = (_time(linears, arm) for arm in ("torchao_dynamic", "int8", "int8_all"))
    return {
        "README.md": [
            f"{_faster(trained, 'amp_fx')} times as fast as `torch.compile` under `torch.autocast`",
            f"at {_span([_error(case, 'amp_fx') for case in trained.values()])} of its error",
            f"plan {of_minilm[0]:.1f} times, at {of_minilm[1]:.2f} of its error",
            f"training time on a GPU alone (0 to {100 * (1 - min(training)):.0f} % by default)",
        ],
        "docs/benchmarks.md": [
            f"amp_fx is {_faster(trained, 'amp_fx')} times as fast as autocast",
            f"its packages {_faster(trained, 'package')}, OpenVINO in bf16 {_faster(trained, 'openvino')}.",
            f"GPT-2's step takes {fp8[0]}, {fp8[1]}",
            token,
            f"packages take {_ratios(zen5, 'package', 'openvino')} of OpenVINO's time there",
            f"in static int8 {_ratios(zen5, 'package_int8', 'openvino_int8')}",
            f"compiled model takes {_ratios(xeon, 'amp_fx', 'openvino')} of OpenVINO's time in bf16",
            f"and {_ratios(xeon, 'int8_measured', 'openvino_int8')} in static int8",
            f"faster in {_lost(xeon, 'int8_measured', 'openvino_int8')} of {len(xeon)} int8 rows",
        ],
        "docs/when-not.md": [
            f"takes {efficientnet:.2f} of amp_fx's time for an EfficientNet-Lite0 and {fcpe:.2f} for FCPE",
            f"{_ms(row, 'int8_measured')} ms, OpenVINO {_ms(row, 'openvino_int8')}, ONNX Runtime {onnxruntime}",
            f"torchao {torchao:.2f}, policy `int8` {int8:.2f}, {int8_all:.2f} with the last",
            f"GPT-2 takes {_time(gpt2, 'amp_fx'):.2f} of autocast's time, of BERT {_time(bert, 'amp_fx'):.2f}",
            f"GPT-2's step takes {fp8[0]}, {fp8[1]}",
            token,
        ],
        "docs/engines.md": [],
    }


def _cases(folder: Path, name: str) -> _Cases:
    [path] = folder.glob(f"{name}*")
    found: dict[str, dict[str, TimingRow]] = {}
    for row in read_timings(path)[1]:
        if row.times:
            found.setdefault(row.workload, {})[row.arm] = row
    return found


def _time(case: Mapping[str, TimingRow], arm: str, reference: str = "autocast") -> float:
    return relative([*case.values()], arm, reference).median


def _ms(case: Mapping[str, TimingRow], arm: str) -> str:
    return f"{1e3 * case[arm].time.median:.2f}"


def _error(case: Mapping[str, TimingRow], arm: str) -> float:
    """Of autocast's."""
    ours, theirs = case[arm].error, case["autocast"].error
    if ours is None or not theirs:
        raise ValueError(f"{case[arm].workload} has no error of {arm} and autocast")
    return ours / theirs


def _memory(case: Mapping[str, TimingRow], arm: str) -> float:
    """The peak, of autocast's."""
    ours, theirs = case[arm].peak_bytes, case["autocast"].peak_bytes
    if ours is None or not theirs:
        raise ValueError(f"{case[arm].workload} has no peak of {arm} and autocast")
    return ours / theirs


def _span(values: list[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _faster(cases: _Cases, arm: str) -> str:
    """How many times as fast as autocast."""
    return _span([1 / _time(case, arm) for case in cases.values()], 1)


def _ratios(cases: _Cases, arm: str, reference: str) -> str:
    return _span([_time(case, arm, reference) for case in cases.values()])


def _lost(cases: _Cases, arm: str, reference: str) -> int:
    """In how many cases the reference takes less time."""
    return sum(_time(case, arm, reference) > 1 for case in cases.values())
