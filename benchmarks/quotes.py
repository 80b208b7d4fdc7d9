"""Numbers that stand in the text of pages, made from benchmarks/results: the phrases that must be found there.

Tables are written by ``benchmarks.page``. A phrase of a sentence is written by hand, and ``tests/fake/test_numbers.py``
compares it with what is made here, and names each number of a page that nothing here makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import TypeAlias

from benchmarks.long_runs import read_runs
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
    on_a_cpu = _cases(folder, "timings_cpu_x86_64_avx512_bf16_2026-11-25")
    h200 = {
        **_cases(folder, "timings_cuda_h200_2026-11-26"),
        **_cases(folder, "timings_cuda_h200_2026-11-27"),
    }
    gpt2, block, token = h200["gpt2"], h200["llama_8b_block"], h200["llama_decode"]
    training = [_time(case, "amp_fx") for case in h200.values() if case["autocast"].mode == "training"]
    minilm, one_row = trained["trained_minilm"], xeon["engines_linears_1"]
    linears = {rows: two_threads[f"linears_batch{rows}"] for rows in (1, 16, 128)}
    int8_error = f"at {_error(minilm, 'int8_calibrated'):.2f} of its error"
    efficientnet, fcpe = (
        _speed(trained[f"trained_{name}"], "openvino", "amp_fx") for name in ("efficientnet", "fcpe")
    )
    fp8_loss = (
        f"step of GPT-2 takes {_longer(gpt2, 'fp8')} % longer than with autocast, at"
        f" {_memory(gpt2, 'fp8'):.2f} of its peak memory, and a token of a small Llama {_longer(token, 'fp8')} % longer"
    )
    forced = [_speed(zen5[f"engines_{name}"], "int8_measured", "amp_fx") for name in _SERVED]
    return {
        "README.md": [
            f"{_speeds(trained, 'amp_fx')} times as fast as `torch.compile` under `torch.autocast`",
            f"at {_span([_error(case, 'amp_fx') for case in trained.values()])} of its error",
            f"plan {_speed(minilm, 'int8_calibrated')} times, {int8_error}",
            f"training time on a GPU alone (0 to {100 * (1 - min(training)):.0f} % by default)",
        ],
        "docs/benchmarks.md": [
            f"amp_fx is {_speeds(trained, 'amp_fx')} times as fast as autocast",
            f"its packages {_speeds(trained, 'package')}, OpenVINO in bf16 {_speeds(trained, 'openvino')}.",
            f"faster in {_lost(xeon, 'amp_fx', 'openvino')} of {len(xeon)} rows in bf16",
            f"and in {_lost(xeon, 'int8_measured', 'openvino_int8')} of {len(xeon)} in static int8",
            f"amp_fx is {_speeds(xeon, 'amp_fx', 'openvino')} times as fast as OpenVINO in bf16",
            f"and {_speeds(xeon, 'int8_measured', 'openvino_int8')} times in static int8",
            f"packages are {_speeds(zen5, 'package', 'openvino')} times as fast as OpenVINO in bf16",
            f"and {_speeds(zen5, 'package_int8', 'openvino_int8')} times in static int8",
            fp8_loss,
            f"{_speeds(on_a_cpu, 'amp_fx')} times as fast as with autocast",
            f"at {_span([_memory(case, 'amp_fx') for case in on_a_cpu.values()])} of its peak memory",
            f"{_accuracy(folder, 'saved_int8')} with activations in 8 bits,",
            f"{_accuracy(folder, 'amp_fx_scaler')} in fp16, {_accuracy(folder, 'fp32')} in fp32",
        ],
        "docs/when-not.md": [
            f"{efficientnet} times as fast as amp_fx for an EfficientNet-Lite0 and {fcpe} times for FCPE",
            f"{_ms(one_row, 'int8_measured')} ms, OpenVINO {_ms(one_row, 'openvino_int8')} ms",
            f"ONNX Runtime {_ms(one_row, 'onnxruntime_int8')} ms",
            f"torchao is {_speed(linears[1], 'torchao_dynamic', digits=0)} times as fast as autocast",
            f"policy `int8` {_speed(linears[1], 'int8', digits=0)} times",
            f"and {_speed(linears[1], 'int8_all', digits=0)} times with the last",
            f"GPT-2 is {_shorter(gpt2)} % shorter than with autocast, of BERT {_shorter(h200['bert'])} %",
            fp8_loss,
        ],
        "docs/quantised.md": [
            f"{_speed(minilm, 'int8_calibrated', 'amp_fx')} times as fast as amp_fx in bf16",
            f"{_speed(minilm, 'int8_calibrated')} times as fast as autocast, {int8_error}",
            f"{forced[0]} (BERT), {forced[1]} (ViT), {forced[2]} (ResNet-18) and {forced[3]} (ConvNeXt) times",
            f"{_listed(_speed(case, 'int8') for case in linears.values())} times as fast as autocast",
            f"in bf16 {_listed(_speed(case, 'amp_fx') for case in linears.values())} times",
            f"dynamic int8 is {_speeds(xeon, 'int8', 'amp_fx')} times as fast as bf16 ([all",
        ],
        "docs/fp8.md": [
            f"{1e3 * block['autocast'].time.median:.1f} ms with autocast",
            f"{_speed(block, 'fp8_rowwise')} times as fast in fp8 rowwise",
            f"and {_speed(block, 'fp8_tensorwise')} times tensorwise",
            f"at {_memory(block, 'fp8_rowwise'):.2f} and {_memory(block, 'fp8_tensorwise'):.2f} of the peak memory",
            fp8_loss,
        ],
        "docs/engines.md": [],
    }


#: models of the page about int8, in its order
_SERVED = ("bert_1x128", "vit", "resnet18", "convnext")


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


def _accuracy(folder: Path, arm: str) -> str:
    """Of the small ViT that is trained on digits: the mean of its seeds."""
    [path] = folder.glob("learning_*.jsonl")
    return f"{mean(run.result for run in read_runs(path) if (run.task, run.arm) == ('digits_vit', arm)):.4f}"


def _span(values: list[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _speed(case: Mapping[str, TimingRow], arm: str, reference: str = "autocast", digits: int = 1) -> str:
    """How many times as fast as the reference."""
    return f"{1 / _time(case, arm, reference):.{digits}f}"


def _speeds(cases: _Cases, arm: str, reference: str = "autocast") -> str:
    """The same of several cases, from the smallest to the largest."""
    return _span([1 / _time(case, arm, reference) for case in cases.values()], 1)


def _longer(case: Mapping[str, TimingRow], arm: str) -> str:
    """Percent of autocast's time that the arm takes in addition."""
    return f"{100 * (_time(case, arm) - 1):.0f}"


def _shorter(case: Mapping[str, TimingRow]) -> str:
    """Percent of autocast's time that amp_fx saves."""
    return f"{100 * (1 - _time(case, 'amp_fx')):.0f}"


def _listed(values: Iterable[str]) -> str:
    *first, last = values
    return f"{', '.join(first)} and {last}"


def _lost(cases: _Cases, arm: str, reference: str) -> int:
    """In how many cases the reference takes less time."""
    return sum(_time(case, arm, reference) > 1 for case in cases.values())
