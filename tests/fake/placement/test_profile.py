"""Device profiles: the tables, the files, the option, and the command that measures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from amp_fx._torch import FakeTensorMode
from amp_fx.cli import main
from amp_fx.precision.placement import devices as tables
from amp_fx.precision.placement import measuring
from amp_fx.precision.placement.devices import builtin, cuda_profile, resolve
from amp_fx.precision.placement.gpus import GPUS, NOMINAL, ROCM, gpu_row
from amp_fx.precision.placement.measuring import measure
from amp_fx.precision.placement.profile import DEVICE_TYPES, DTYPES, FLOAT8, INT8, DeviceProfile, ProfileError

A_PROFILE = DeviceProfile("a name", "cpu", {"float32": 2e11, "bfloat16": 4e11}, 3e10, 5e-6)
CPUS = {row.name: row for row in tables.CPUS}
WITHOUT_BF16_INSTRUCTIONS = ("avx512 vnni", "avx512", "avx2 vnni", "avx2", "apple", "arm", "generic")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "cpu.json"
    A_PROFILE.save(path)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "99"),
        ({"format": "a cake"}, "'a cake'"),
        ({"launch": 0}, "launch .*0"),
        ({"bandwidth": float("nan")}, "bandwidth .*nan"),
        ({"bandwidth": float("inf")}, "bandwidth .*inf"),
        ({"peak": {"bfloat16": 1.0}}, "'bfloat16'.*float32"),
        ({"peak": {"float32": 1.0, "bfloat": 1.0}}, "'bfloat'.*'bfloat16'"),
        ({"peak": {"float32": -1.0}}, "peak.float32 .*-1.0"),
        ({"calls": {"flash_blok": 1.0}}, "'flash_blok'.*'flash_block'"),
        ({"device_type": "cdua"}, "'cdua'.*'cpu', 'cuda'.*'cuda'"),
        ({"bandwith": 1.0}, "bandwith .*'bandwidth'"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        DeviceProfile.from_dict({**A_PROFILE.to_dict(), **change})


@pytest.mark.parametrize(
    ("content", "message"), [(b"{", "JSON"), (b"{}", "None"), (b" " * 70_000, "65536"), (b"\xff", "utf-8")]
)
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=rf"broken\.json.*{message}"):
        resolve(str(path), "cpu")


def test_the_option_is_a_word_or_a_file_for_this_device(saved: Path) -> None:
    assert resolve("off", "cpu") is None
    assert resolve("auto", "cpu") == builtin("cpu")
    assert resolve(str(saved), "cpu") == A_PROFILE
    # a device type without a table
    assert resolve("auto", "xpu") is None
    with pytest.raises(ProfileError, match=r"'xpu'.*'cpu', 'cuda'"):
        builtin("xpu")
    with pytest.raises(ProfileError, match=r"'cpu'.*'cuda'.*--device cuda"):
        resolve(str(saved), "cuda")


def test_a_wrong_word_or_file_is_answered_with_the_nearest_one(saved: Path) -> None:
    near = str(saved.with_name("cpuu.json"))
    for spec, meant in (("atuo", "auto"), ("of", "off"), ("Auto", "auto"), (near, str(saved))):
        with pytest.raises(ProfileError, match=f"{spec!r}.*Did you mean {meant!r}?"):
            resolve(spec, "cpu")


# --- the tables ---


def test_every_row_is_a_valid_profile_for_all_dtypes() -> None:
    cpus = [tables.cpu_profile(row, threads) for row in tables.CPUS for threads in (1, 64)]
    for profile in (*cpus, *(cuda_profile("x", row) for row in (*GPUS, ROCM))):
        assert DeviceProfile.from_dict(json.loads(profile.to_json())) == profile
        assert profile.peak.keys() - {FLOAT8, INT8} == DTYPES.keys()
        assert profile.peak.get(INT8, 0) < 4.1 * max(profile.peak["bfloat16"], profile.peak["float32"])
        # no CPU has it, and no card before Ada and Hopper
        assert profile.device_type == "cuda" or FLOAT8 not in profile.peak
        assert profile.peak.get(FLOAT8, 0) < 2.1 * profile.peak["bfloat16"]
        assert 1e9 < profile.peak["float32"] < 1e15
        assert 1e9 < profile.bandwidth < 2e13
        assert 1e-7 < profile.launch < 1e-4


@pytest.mark.parametrize("name", CPUS)
def test_a_cpu_gains_by_low_precision_if_it_has_instructions_for_bf16(name: str) -> None:
    peak = tables.cpu_profile(CPUS[name], 4).peak
    if name in WITHOUT_BF16_INSTRUCTIONS:
        assert peak["bfloat16"] < peak["float32"] > peak["float16"]
    else:
        assert peak["bfloat16"] >= 2 * peak["float32"]


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("avx2 avx512_bw avx512_bf16 avx512_fp16 amx_bf16 amx_fp16", "amx_fp16"),
        ("avx2 avx512_bw avx512_bf16 avx512_fp16 amx_bf16", "amx_bf16"),
        ("avx2 avx512_bw avx512_bf16 avx512_fp16", "avx512_bf16 avx512_fp16"),
        ("avx2 avx512_bw avx512_bf16", "avx512_bf16"),
        ("avx2 avx512_bw avx512_bf16 avx512_vp2intersect", "avx512_bf16 zen5"),
        ("avx2 avx512_bw avx512_vnni", "avx512 vnni"),
        ("avx2 avx512_bw", "avx512"),
        ("avx2 avx_vnni", "avx2 vnni"),
        ("avx2 avx512_f", "avx2"),
        ("avx2 darwin", "avx2"),
        ("neon bf16 darwin", "apple"),
        ("neon bf16", "arm_bf16"),
        ("neon", "arm"),
        ("sse2", "generic"),
    ],
)
def test_instruction_flags_choose_the_row(flags: str, name: str) -> None:
    assert tables.cpu_row(frozenset(flags.split())).name == name


@pytest.mark.parametrize(
    ("capability", "name", "row"),
    [
        ((3, 5), "", "M40"), ((5, 2), "", "M40"), ((8, 7), "", "RTX 3090"), ((99, 0), "", "RTX 5090"),
        ((9, 0), "NVIDIA H200", "H200"), ((9, 0), "NVIDIA GH200 480GB", "H100"), ((8, 9), "NVIDIA L4", "L4"),
        ((8, 9), "NVIDIA L4000", "RTX 4090"), ((8, 9), "NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)  # fmt: skip
def test_a_card_has_the_row_of_its_name_or_the_first_of_the_capability_below(
    capability: tuple[int, int], name: str, row: str
) -> None:
    assert gpu_row(capability, name).name == row


def test_low_precision_gains_only_where_there_are_tensor_cores() -> None:
    for row in GPUS:
        assert (row.float16 > row.float32) is (row.capability >= (7, 0))
        assert (row.bfloat16 > row.float32) is (row.capability >= (8, 0))


def test_every_type_of_device_with_rates_has_a_profile_of_its_own() -> None:
    assert [builtin(device).device_type for device in DEVICE_TYPES] == [*DEVICE_TYPES]
    # without a profile, matmuls are worth what an H100 moves meanwhile
    assert NOMINAL.flops_a_byte("float32") == pytest.approx(20, rel=0.01)
    assert NOMINAL.flops_a_byte("bfloat16") == pytest.approx(295, rel=0.01)


def test_the_built_in_profile_knows_the_thread_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    one = builtin("cpu").peak["float32"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert builtin("cpu").peak["float32"] == 4 * one


@pytest.fixture
def allow() -> Iterator[Callable[[str], None]]:
    """Sets what fp32 matmuls may be computed in."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def test_less_than_fp32_counts_where_the_user_allows_it(allow: Callable[[str], None]) -> None:
    def peaks(allowed: str) -> dict[str, Mapping[str, float]]:
        allow(allowed)
        cpus = {name: tables.cpu_profile(row, 1).peak for name, row in CPUS.items()}
        return {"A100": cuda_profile("x", gpu_row((8, 0))).peak, **cpus}

    exact, high, medium = map(peaks, ("highest", "high", "medium"))
    assert exact["A100"]["float32"] == pytest.approx(19.5e12 * 0.8)
    assert exact["A100"]["bfloat16"] == pytest.approx(312e12 * 0.8)
    assert high["A100"]["float32"] == pytest.approx(156e12 * 0.8)
    relaxed = medium["avx512_bf16"]
    assert exact["avx512_bf16"]["float32"] < relaxed["float32"] < relaxed["bfloat16"]
    assert exact["avx2"] == medium["avx2"]


# --- measuring ---


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Parallel regions are what other processes disturb most."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.quick_rows("False")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("takes_fp8", [False, True])
def test_measuring_fills_every_field(takes_fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # a CPU emulates the call
    profile = builtin("cpu")
    profile = replace(profile, peak={**profile.peak, **({FLOAT8: 1.0} if takes_fp8 else {})})
    monkeypatch.setattr(measuring, "builtin", lambda device: profile)
    lines: list[str] = []
    measured = measure("cpu", 0.01, lines.append)
    assert DeviceProfile.from_dict(json.loads(measured.to_json())) == measured
    assert measured.peak.keys() == profile.peak.keys()
    assert min(measured.peak.values()) > 0
    assert measured.name.endswith("measured")
    *matmuls, last = lines[: len(profile.peak) + 1]
    assert ({*matmuls}, last) == ({f"matmul {name}" for name in profile.peak}, "copy")


@pytest.mark.parametrize(
    ("device", "capability", "hip", "takes"),
    [
        ("cuda", (8, 0), None, False),
        ("cuda", (8, 9), None, True),
        ("cuda", (9, 4), "6.4", False),
        ("cpu", (9, 0), None, False),
    ],
)
def test_fp8_is_measured_where_the_library_takes_it(
    device: str, capability: tuple[int, int], hip: str | None, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert (FLOAT8 in builtin(device).peak) is takes


def test_the_library_takes_what_is_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # there is no generator without the device
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(manual_seed=lambda seed: None))
    with FakeTensorMode():
        # fake CUDA tensors check their layouts as the library does
        measuring.scaled_gemm(128, "cuda").run()


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1_000_000))
    monkeypatch.setattr(measuring, "clock", lambda task, device: 1e-1 if next(calls) % 7 else 1e-3)
    lines: list[str] = []
    measure("cpu", 0.01, lines.append)
    assert lines[-1].startswith("warning: rounds differ 100.0 times, so the machine is busy")


def test_nonsense_is_not_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "clock", lambda task, device: 1.0)
    with pytest.raises(ProfileError, match=r"100\.0 ms"):
        measure("cpu", 0.01)
    path = tmp_path / "here.json"
    assert main(["profile", "--device", "cpu", "--seconds", "0.01", "-o", str(path)]) == 1
    assert not path.exists()


def test_a_device_that_is_not_there_is_planned_for_but_not_measured(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert re.search("A100.*assumed|assumed.*A100", builtin("cuda").name)
    assert main(["profile", "--device", "cuda"]) == 1
    assert re.search("CUDA.*'cpu'", capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_command_writes_a_file_that_the_option_reads_or_prints_json_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["profile", "--device", "cpu", "--seconds", "0.01"]
    assert main([*command, "--json"]) == 0
    assert DeviceProfile.from_dict(json.loads(capsys.readouterr().out)).device_type == "cpu"
    assert not list(tmp_path.iterdir())
    path = tmp_path / "here.json"
    assert main([*command, "-o", str(path)]) == 0
    out = capsys.readouterr().out
    parts = f'options={{"profile": "{path}"}}', builtin("cpu").name, "x float32"
    assert [part for part in parts if part not in out] == []
    assert resolve(str(path), "cpu") == DeviceProfile.load(path)
    assert main([*command, "-o", str(tmp_path / "missing" / "here.json")]) == 1
    assert re.search("^error: .*missing.*$", capsys.readouterr().err.splitlines()[-1])
