"""What `python -m benchmarks` makes of its timings, and its counters on what can be worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import compile_fx, config

from benchmarks import campaign, counts, page, peaks, running
from benchmarks.__main__ import case_table, main
from benchmarks.arms import ARMS, MODES, arms_for
from benchmarks.campaign import Step, steps
from benchmarks.cases import CASES
from benchmarks.counts import Counter, Counts, Row, counting
from benchmarks.results import Spread, TimingRow, describe, read, read_timings, relative, spread, write
from benchmarks.scaler import beside, launches
from benchmarks.workloads import WORKLOADS, Workload
from support.models.small import UpDown

QUIET = (1.0, 1.01, 0.99, 1.0, 1.02)
WHERE = {
    "hardware": "toy",
    "processor": "abacus",
    "torch": "9",
    "threads": 3,
    "clock": "wall",
    "commit": "c0ffee",
    "date": "2026-01-02",
}


def row(arm: str, times: tuple[float, ...], workload: str = "mlp", **others: object) -> TimingRow:
    return TimingRow(workload, "mlp", "training", arm, {"batch": 8}, times, **others)  # type: ignore[arg-type]


def scaled(factor: float) -> tuple[float, ...]:
    return tuple(factor * time for time in QUIET)


def test_ratios_are_quartiles_over_the_rounds_that_both_arms_have() -> None:
    assert spread([5, 1, 4, 2, 3]) == Spread(2, 3, 4)
    assert spread([7]).low == spread([7]).high == 7
    # a drift that all arms share leaves the ratio alone
    drifting = (1.0, 2.0, 4.0, 8.0)
    rows = [row("autocast", drifting), row("amp_fx", tuple(0.5 * time for time in drifting))]
    assert relative(rows, "amp_fx") == Spread(0.5, 0.5, 0.5)
    # one has stopped early, and one at once
    rows = [row("autocast", (1.0, 1.0, 100.0)), row("amp_fx", (2.0, 2.0)), row("fp32", ())]
    assert relative(rows, "amp_fx").high == 2
    assert math.isnan(relative(rows, "fp32").median)


def test_a_table_has_a_line_per_arm_and_the_reasons_of_those_that_are_missing() -> None:
    failed = row("freezing", (), notes=("failed: ValueError",))
    rows = [row("autocast", QUIET), row("amp_fx", scaled(0.5), peak_bytes=1_500_000), failed]
    lines = case_table(rows).splitlines()
    assert lines[0] == "mlp, training: batch 8"
    [ours] = [line.split() for line in lines if line.startswith("amp_fx")]
    assert ours == ["amp_fx", "500.00", "(500.00-505.00)", "0.50", "(0.50-0.50)", "-", "1.5"]
    assert lines[-1] == "note: freezing: failed: ValueError"


def test_where_openvino_ran_errors_and_ratios_to_it_are_shown() -> None:
    rows = [row("openvino", QUIET, error=4e-3), row("amp_fx", scaled(1.25), error=None)]
    _, *lines = [" ".join(line.split()[-3:]) for line in case_table(rows).splitlines()]
    assert lines == ["error x openvino", "4.0e-03 1.00 (1.00-1.00)", "- 1.25 (1.25-1.25)"]
    assert page.beside(WHERE, rows).endswith("| 1250.00, nan | 1000.00, 4e-03 | 1.25 |")


def test_results_survive_the_way_through_a_file(tmp_path: Path) -> None:
    rows = [row("amp_fx", QUIET, notes=("a", "b")), row("fp32", ())]
    write(tmp_path / "r.jsonl", describe("cpu"), rows)
    header, found = read_timings(tmp_path / "r.jsonl")
    assert found == rows
    assert {"hardware", "processor", "torch", "python", "commit", "date", "threads", "load"} <= header.keys()


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.name)
def test_a_page_says_what_the_results_say(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert page.written(text, page.PAGES[path](page.RESULTS)) == text


def test_a_page_without_a_place_for_a_section_is_refused() -> None:
    with pytest.raises(ValueError, match="<!-- speed:begin -->"):
        page.written("<!-- errors:begin --><!-- errors:end -->", {"errors": "", "speed": ""})


def test_sections_have_ratios_and_memory_and_no_case_that_was_cut_short() -> None:
    autocast, ours = (
        row("autocast", QUIET, peak_bytes=50_000_000),
        row("amp_fx", scaled(0.5), peak_bytes=60_000_000),
    )
    text = page.speed(WHERE, [autocast, ours, row("fp32", scaled(2))])
    assert "toy" in text
    assert "commit c0ffee, 2026-01-02" in text
    assert "| mlp | 1000.0, 50 MB | 2.00 | 0.50, 1.20 |" in text
    rows = [row("autocast", QUIET, notes=("time was up before round 6",)), row("amp_fx", QUIET)]
    assert "| mlp" not in page.speed(WHERE, rows)


def test_files_are_joined_by_run_and_a_case_has_one_run_on_a_machine(tmp_path: Path) -> None:
    for name, arms in (("a", {"autocast"}), ("b", {"amp_fx"})):
        write(tmp_path / f"timings_{name}.jsonl", WHERE, [row(arm, QUIET) for arm in arms])
    others = ("gpt2", {"clock": "cpu"}), ("vit", {"commit": "f00"}), ("bert", {"date": "2026-01-03"})
    for name, (case, other) in zip("cde", others, strict=True):
        write(tmp_path / f"timings_{name}.jsonl", {**WHERE, **other}, [row("autocast", QUIET, case)])
    arms = [[some.arm for some in rows] for _, rows in page.joined(sorted(tmp_path.iterdir()))]
    assert arms == [["autocast", "amp_fx"], ["autocast"], ["autocast"], ["autocast"]]
    # the same arm twice in a run, and a case in a second run
    for where, named in ((WHERE, "amp_fx"), ({**WHERE, "commit": "bad"}, "mlp")):
        write(tmp_path / "timings_f.jsonl", where, [row("amp_fx", QUIET)])
        with pytest.raises(ValueError, match=rf"timings_f\.jsonl .*'{named}'"):
            page.joined(sorted(tmp_path.iterdir()))


def test_every_case_can_be_built_at_some_size_and_has_arms() -> None:
    for case in CASES.values():
        assert case.mode in MODES
        assert case.sizes
        assert set(case.sizes) <= {"cpu", "cuda"}
        assert set(case.arms) <= set(ARMS)
        relatives = [each for each in CASES.values() if each.family == case.family]
        assert case.family == case.name or len(relatives) > 1
        assert {"autocast", "amp_fx"} <= set(arms_for(case.mode, "cpu"))


def test_arms_take_turns_and_none_always_follows_the_same() -> None:
    asked: list[str] = []

    def worker(name: str) -> Any:
        def ask(do: str, **arguments: object) -> dict[str, list[float]]:
            asked.append(name)
            return {"seconds": [1.0]}

        return SimpleNamespace(ask=ask, steps=1, times=[], notes=[])

    running.take_turns([worker("a"), worker("b")], range(2), running.Settings())
    assert asked == ["a", "b", "b", "a"]


def test_an_unknown_case_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "mlpp"])
    assert "unknown case 'mlpp'; valid: gpt2, mlp" in capsys.readouterr().err


WRITE = "-c", "import sys; open(sys.argv[1], 'w').write(sys.argv[2])", "{out}"
STEPS = [
    Step("first.txt", (*WRITE, "one")),
    Step("second.txt", (*WRITE, "two")),
    Step("third.txt", (*WRITE, "three"), needs=("no_such_package",)),
    Step("fourth.txt", ("-c", "raise SystemExit(3)")),
]


def test_steps_leave_files_in_time_and_a_second_call_does_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "steps", lambda device, minutes: STEPS)
    call = ["--device", "cpu", "--out", str(tmp_path)]
    assert campaign.main([*call, "--minutes", "0"]) == 0
    assert not list(tmp_path.glob("*.txt"))
    assert "3 steps are left: run it again" in capsys.readouterr().out
    (tmp_path / "first.txt").write_text("from an earlier call")
    assert campaign.main(call) == 0
    assert (tmp_path / "first.txt").read_text() == "from an earlier call"
    assert (tmp_path / "second.txt").read_text() == "two"
    said = capsys.readouterr().out
    assert "first.txt" not in said
    assert "third.txt: skipped, as there is no no_such_package" in said
    assert "fourth.txt: failed with code 3" in said


def test_a_step_that_takes_too_long_is_ended_and_leaves_no_file(tmp_path: Path) -> None:
    step = Step("slow.txt", ("-c", "import time; time.sleep(60)"))
    assert "took longer than 1 s" in campaign.run(step, tmp_path, 1.0)
    assert not (tmp_path / "slow.txt").exists()


def test_the_campaign_of_a_gpu_has_its_tests_its_rates_every_case_and_every_model() -> None:
    found = {step.name: step for step in steps("cuda", 9.0)}
    assert list(found)[:2] == ["tests.xml", "profile.json"]
    timings = {f"timings_{c.name}.jsonl" for c in CASES.values() if "cuda" in c.sizes}
    models = {f"{kind}_{name}.jsonl" for kind in ("errors", "counts") for name in WORKLOADS}
    assert set(found) == {"tests.xml", "profile.json"} | timings | models
    needs = {name: step.needs for name, step in found.items()}
    assert needs["timings_bert_inference.jsonl"] == needs["errors_llama.jsonl"] == ("transformers",)
    assert needs["timings_mlp.jsonl"] == needs["counts_gpt_512.jsonl"] == ()


# --- counters ---

ROWS, INNER, COLUMNS = 64, 32, 16
#: elements of the operands and of the result of the product that most tests use
LEFT, RIGHT, RESULT = ROWS * INNER, INNER * COLUMNS, ROWS * COLUMNS
FP32, BF16 = 4, 2


def ran(function: Callable[..., Tensor], *args: Tensor, autocast: bool = False, **settings: Any) -> Counter:
    """Compiles and runs, with the backward if something wants a gradient."""
    with counting() as counter:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = torch.compile(function, **settings)(*args)
        if result.requires_grad:
            result.sum().backward()
    return counter


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def operands(requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    left, right = torch.randn(ROWS, INNER), torch.randn(INNER, COLUMNS)
    return left.requires_grad_(requires_grad), right.requires_grad_(requires_grad)


def test_a_product_under_autocast_casts_both_operands() -> None:
    counter = ran(product, *operands(), autocast=True)
    cast_bytes = (LEFT + RIGHT) * (FP32 + BF16)
    product_bytes = (LEFT + RIGHT + RESULT) * BF16
    kinds = {"conversions": 2, "casts": 2, "generated_kernels": 2, "extern_kernels": 1}
    casts = {"conversion_bytes": cast_bytes, "cast_bytes": cast_bytes}
    assert counter.total == Counts(**kinds, **casts, bytes_moved=cast_bytes + product_bytes)


def test_amp_fx_is_counted_by_the_same_hook_and_widens_its_result() -> None:
    counter = ran(product, *operands(), backend="amp_fx", options={"profile": "off"})
    assert counter.total.casts == 3
    assert counter.total.cast_bytes == (LEFT + RIGHT + RESULT) * (FP32 + BF16)


def test_a_fused_cast_is_a_conversion_and_no_cast() -> None:
    counter = ran(lambda x: (x.sin().bfloat16().relu().float() + 1).to(torch.int32), torch.randn(1000))
    # nor is a conversion to an integer one between floating dtypes
    kinds = {"conversions": 2, "generated_kernels": 1}
    moved = {"bytes_moved": 2 * 1000 * FP32, "conversion_bytes": 2 * 1000 * (FP32 + BF16)}
    assert counter.total == Counts(**kinds, **moved)


def gated(x: Tensor, w: Tensor) -> Tensor:
    first, second = (x @ w).chunk(2, dim=-1)
    return first.sin() * second


def broken(x: Tensor, w: Tensor) -> Tensor:
    y = F.gelu(x @ w)
    torch._dynamo.graph_break()
    return F.gelu(y @ w.t())


#: name -> the program, the bytes it saves, products in its forward and backward
SAVED: dict[str, tuple[Callable[..., Tensor], int, tuple[int, int]]] = {
    "gelu": (lambda x, w: F.gelu(x @ w), RESULT * FP32, (1, 2)),
    "relu": (lambda x, w: F.relu(x @ w), RESULT, (1, 2)),  # a mask
    "autocast": (product, (LEFT + RIGHT) * BF16, (1, 2)),  # the narrowed operands
    "chunks": (gated, RESULT * FP32, (1, 2)),  # one storage, twice
    # inputs and their views are there anyway
    "views": (lambda x, w: F.gelu(x[: ROWS // 2].view(-1)).sin(), 0, (0, 0)),
    "break": (broken, (RESULT + LEFT) * FP32, (2, 4)),  # the second graph gets y as an input
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_bytes_are_what_the_backward_reads_and_inputs_are_not(name: str) -> None:
    (function, saved, products), autocast = SAVED[name], name == "autocast"
    x, w = operands(requires_grad=True)
    counter = ran(function, x, w, autocast=autocast)
    assert counter.total.saved_bytes == saved
    assert {kind for kind, _ in counter.graphs} == {"forward", "backward"}
    assert (counter.forward.extern_kernels, counter.backward.extern_kernels) == products
    if not autocast:
        # what is counted still computes
        (expected,) = torch.autograd.grad(function(x, w).sum(), x)
        torch.testing.assert_close(x.grad, expected)


def test_a_constant_in_the_graph_survives() -> None:
    assert ran(lambda x: x.sin() * torch.tensor([3.0, 4.0]), torch.randn(8, 2)).total.generated_kernels == 1


def test_nothing_stays_replaced() -> None:
    before = compile_fx.compile_fx, config.force_disable_caches
    ran(torch.sin, torch.randn(4))
    assert (compile_fx.compile_fx, config.force_disable_caches) == before


def test_a_workload_is_counted_in_each_arm() -> None:
    model = UpDown(16, 16, out=1)
    workload = Workload("tiny", model, {"x": torch.randn(1, 16)})
    first, second = (counts.count(workload, ARMS["autocast"], "training")[0] for _ in range(2))
    assert first == second
    assert first.total.casts > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    _, counter = counts.count(workload, ARMS["bf16"], "inference")
    inputs = counter.graphs[0][1].before.graph.find_nodes(op="placeholder")
    assert {node.meta["val"].dtype for node in inputs} == {torch.bfloat16}
    # amp_fx compiles one graph for each mode; the input, weights and biases are narrowed in it
    row, counter = counts.count(workload, ARMS["off"], "inference")
    assert len(counter.graphs) == 1
    assert row.total.conversions >= 3


def test_a_table_has_ratios_to_autocast() -> None:
    def row(arm: str, casts: int) -> Row:
        return Row("toy", arm, "training", Counts(casts=casts, bytes_moved=1000), Counts())

    text = counts.table([row("bf16", 9), row("autocast", 4), row("amp_fx", 5)], "training")
    assert all(ratio in text for ratio in ("5 1.250", "9 2.250"))


def test_what_the_program_returns_is_not_counted_as_saved() -> None:
    # the backward of sin reads the product
    with counting() as returned:
        torch.compile(lambda x, w: (y := x @ w, y.sin().sum()))(*operands(requires_grad=True))[1].backward()
    assert returned.total.saved_bytes == 0
    saved = ran(lambda x, w: (x @ w).sin().sum(), *operands(requires_grad=True))
    assert saved.total.saved_bytes == RESULT * FP32


#: 320 blocks of so many elements fill a launch
CHUNK = 65536

#: a tensor that goes on in the next launch is one of its tensors, too
LAUNCHES = [
    ([], 0), ([1], 1), ([8] * 110, 1), ([8] * 111, 2), ([320 * CHUNK], 1), ([320 * CHUNK + 1], 2),
    ([319 * CHUNK, CHUNK, CHUNK], 2), ([321 * CHUNK] + [8] * 109, 2), ([321 * CHUNK] + [8] * 110, 3),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "count"), LAUNCHES)
def test_a_launch_takes_so_many_tensors_and_blocks(sizes: list[int], count: int) -> None:
    assert launches(sizes) == count


@pytest.mark.parametrize("sizes", [[64 * 64, 64] * 3, [4096 * 4096] * 30], ids=["small", "large"])
def test_a_step_takes_no_more_kernels_than_torchs_scaler_and_half_the_bytes(sizes: list[int]) -> None:
    (our_kernels, our_bytes), (kernels, moved) = beside(True, sizes), beside(False, sizes)
    assert our_kernels <= kernels
    # every gradient is read once, and one number for each; torch writes them, too
    assert our_bytes == 4 * sum(sizes) + 8 * len(sizes)
    assert moved == 8 * sum(sizes)


def test_peaks_are_beside_the_first_arm_and_models_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def peak(workload: Workload, arm: Any) -> int:
        seen.append((workload.name, arm.name, workload.model.training))
        return 1_000_000 if arm.name == "autocast" else 1_500_000

    monkeypatch.setattr(peaks, "peak", peak)
    path = tmp_path / "peaks.json"
    assert (
        main(["peaks", "--only", "opt", "mistral", "--arms", "autocast", "amp_fx", "--json", str(path)]) == 0
    )
    assert seen == [(name, arm, True) for name in ("opt", "mistral") for arm in ("autocast", "amp_fx")]
    assert capsys.readouterr().out.splitlines()[-1].split() == ["mistral", "1.00", "1.000", "1.50", "1.500"]
    _, rows = read(path)
    assert rows[1] == {"model": "opt", "arm": "amp_fx", "peak_bytes": 1_500_000}


def test_the_peak_of_a_step_has_its_gradients_and_what_it_keeps() -> None:
    class Loss(UpDown):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    rows, width, hidden = 512, 8, 256
    model = Loss(width, hidden)
    found = peaks.peak(Workload("toy", model, {"x": torch.randn(rows, width)}), ARMS["eager_autocast"])
    gradients = 4 * sum(parameter.numel() for parameter in model.parameters())
    # the result of the first linear and that of the ReLU, in bf16, and a gradient of the same size
    kept = 2 * 2 * rows * hidden
    assert gradients + kept < found < gradients + 3 * kept
