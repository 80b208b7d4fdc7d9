"""``amp_fx.explain(..., target=...)``: the report of a GPU that is not there, and the process that compiles for it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx.cli import main
from amp_fx.errors import AmpFxError, MissingLibraryError, TargetError
from amp_fx.instruments.reports.report import Report
from amp_fx.instruments.targets import find_target
from amp_fx.instruments.targets._torch import enter
from amp_fx.instruments.targets.process import TargetProcess
from amp_fx.precision.plans.plan import NodePlan
from amp_fx.viz.model import drawing
from support.models.small import Mixture, Parts
from support.programs.target_process import OFF, needs_a_target, process, quick_ones

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]


class Net(nn.Module):
    """A local class, a dictionary and a graph break, as in a notebook."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 4096)
        self.down = nn.Linear(4096, 64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, target: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.up(x).relu()
        torch._dynamo.graph_break()
        self.calls += 1
        y = self.down(hidden)
        return {"y": y, "loss": nn.functional.mse_loss(y, x if target is None else target)}


@pytest.fixture(scope="module")
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def report(model: Net) -> Report:
    return explained(model)


def explained(model: nn.Module, *args: Any, **options: Any) -> Report:
    x = args or (torch.randn(256, 64),)
    return amp_fx.explain(model, *x, options=options or OFF, target="cuda:h100")


def linears(report: Report) -> list[NodePlan]:
    return [row for plan in report.plans for row in plan.nodes if row.op == "linear"]


def moved(report: Report, by: str = "amp_fx") -> int:
    return report.costs[by].moved or 0


def test_the_report_has_plans_and_costs_of_forward_and_backward(report: Report) -> None:
    assert report.title == "Net on cuda:h100"
    assert sorted(plan.phase for plan in report.plans) == ["backward", "backward", "forward", "forward"]
    assert {row.dtype for row in linears(report)} == {torch.bfloat16}
    assert 0 < moved(report) < moved(report, "torch.autocast")


def test_every_cast_kernel_that_is_left_has_a_reason(report: Report) -> None:
    of_plans = sum(cast.kernel is True for plan in report.plans for cast in plan.casts)
    assert sum(map(len, report.kept.values())) == of_plans > 0
    assert all(report.kept)
    sizes = [sum(cast.bytes for cast in casts) for casts in report.kept.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert f"{next(iter(report.kept))}, {sizes[0] / 1e6:.3g} MB" in str(report)


def test_under_inference_mode_low_copies_of_weights_are_read_as_on_the_card() -> None:
    model = Net().eval()
    found = {}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found[mode] = explained(model)
    each_call, kept = found[torch.no_grad], found[torch.inference_mode]
    assert not each_call.held
    assert len(kept.held) == 4
    assert moved(kept) < moved(each_call)
    assert len(kept.kept) < len(each_call.kept)


def test_a_default_plan_that_moves_more_bytes_than_autocast_says_why() -> None:
    # too small to repay the starts of the kernels that cast weights and gradients
    layers = (nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64))
    model = Parts(lambda m, x: m.layers(x).square().mean(), layers=nn.Sequential(*layers))
    report = amp_fx.explain(model, torch.randn(16, 64, 16, 16), target="cuda:h100")
    assert moved(report) > moved(report, "torch.autocast")
    assert "2 of 2" in drawing(report).more
    # the report breaks lines
    assert drawing(report).more in " ".join(str(report).split())


def test_the_report_names_graph_breaks_modules_and_source_lines(report: Report) -> None:
    assert ["graph_break" in each for each in report.graph_breaks] == [True]
    up, down = linears(report)
    assert (up.module_path, down.module_path) == ("up", "down")
    assert "test_explain.py" in up.source


@pytest.mark.usefixtures("report")
def test_the_model_is_left_as_it_was(model: Net) -> None:
    torch.manual_seed(0)
    for value, before in zip(model.state_dict().values(), Net().state_dict().values(), strict=True):
        assert torch.equal(value, before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.cuda.is_available()


def test_a_model_on_the_meta_device_has_the_same_report(report: Report) -> None:
    with torch.device("meta"):
        model, x = Net(), torch.empty(256, 64)
    found = explained(model, x)
    assert found.costs == report.costs
    assert [plan.nodes for plan in found.plans] == [plan.nodes for plan in report.plans]
    assert all(parameter.is_meta for parameter in model.parameters())


SMALL = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
DECODER = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 128}
#: class -> settings of its config
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Llama", "Qwen2", "Mistral"), DECODER),
    "Mixtral": {**DECODER, "num_local_experts": 4},
    "Gemma": {**DECODER, "head_dim": 16},
    "GPTNeoX": {**SMALL, "intermediate_size": 128},
    "GPT2": SMALL,
    "T5": {**SMALL, "d_kv": 16, "d_ff": 128, "decoder_start_token_id": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_ones(LANGUAGE_MODELS, "Llama"))
def test_a_language_model_with_its_default_cache_is_explained(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    heads = {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration"}
    model = getattr(transformers, heads.get(name, f"{name}ForCausalLM"))(
        getattr(transformers, f"{name}Config")(**LANGUAGE_MODELS[name])
    )
    tokens = torch.randint(128, (2, 16))
    given = {"input_ids": tokens, **({"labels": tokens} if name == "T5" else {})}
    found = amp_fx.explain(model, **given, options=OFF, target="cuda:h100")
    assert not found.graph_breaks
    assert [plan.fallback for plan in found.plans] == ["", ""]
    # the attention's four and the head at least
    assert sum(row.dtype is torch.bfloat16 for row in found.plan.nodes if row.flops) > 4


def test_products_of_experts_and_their_gradients_run_low() -> None:
    found = explained(Mixture(), torch.randn(24, 16), torch.tensor([5, 5, 16, 24], dtype=torch.int32))
    assert [plan.fallback for plan in found.plans] == ["", ""]
    forward, backward = ([row for row in plan.nodes if row.op == "_grouped_mm"] for plan in found.plans)
    assert [row.dtype for row in forward + backward] == [torch.bfloat16] * 6
    assert sum(row.flops for row in backward) == 2 * sum(row.flops for row in forward) > 0


def build() -> tuple[nn.Module, tuple[Tensor]]:
    """Bound by the start of kernels on an H100, by arithmetic where fp32 is three times slower."""
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)), (torch.randn(512, 256),)


def test_the_rates_are_those_of_the_target(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    assert main(["explain", "test_explain:build", "--target", "cuda:h100", "--json"]) == 0
    fast = Report.from_dict(json.loads(capsys.readouterr().out))
    assert fast.title == "Sequential on cuda:h100"
    find_target("cuda:a100").profile.save(tmp_path / "a100.json")
    model, args = build()
    slow = explained(model, *args, profile=str(tmp_path / "a100.json"))
    found = [[row.dtype for row in linears(report)] for report in (fast, slow)]
    assert found == [[torch.float32] * 2, [torch.bfloat16] * 2]


def test_a_tensor_is_the_argument_of_the_model_that_is_called_target() -> None:
    x = torch.randn(8, 64)
    assert amp_fx.explain(Net(), x, target=torch.zeros(8, 64), options=OFF).title == "Net"


# ---- the process: nothing is patched in the one that asks ----


def test_errors_arrive_with_their_class_and_with_the_traceback_of_the_process() -> None:
    with pytest.raises(AmpFxError, match="a reason") as raised:
        process().call("support.programs.target_process:fail", "a reason")
    assert "in fail" in str(raised.value.__cause__)


class Unreadable:
    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


def test_what_cannot_be_sent_or_handed_back_is_an_error_of_that_call_alone() -> None:
    with pytest.raises(ValueError, match="no number"):
        process().call("operator:add", Unreadable(), 3)
    with pytest.raises(TargetError, match="TypeError"):
        process().call("threading:Lock")
    assert process().call("operator:add", 2, 3) == 5


def test_one_process_has_one_target_which_is_known_before_anything_is_started() -> None:
    with pytest.raises(TargetError, match="'cuda:h100'"):
        TargetProcess("cuda:h1000")
    with pytest.raises(TargetError, match=r"cuda:h100.*cuda:a100"):
        process().call("amp_fx.instruments.targets._torch:enter", "cuda:a100")
    assert process().call("amp_fx.instruments.targets._torch:enter", "cuda:h100") is None
    # the asking process stays as it is
    assert not torch.cuda.is_available()


@pytest.mark.slow
def test_a_process_that_dies_says_what_it_wrote_last() -> None:
    message = "ended with code 3: what C\\+\\+ wrote"
    with contextlib.closing(TargetProcess("cuda:h100")) as dying, pytest.raises(TargetError, match=message):
        dying.call("support.programs.target_process:die")


def test_a_machine_without_triton_or_a_compiler_says_in_one_line_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(TargetError, match=r"^compiling for an absent GPU takes a C.. compiler.*install g"):
        enter("cuda:h100")
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: False)
    with pytest.raises(
        MissingLibraryError, match=r"^compiling for CUDA takes Triton: pip install '\.\[targets\]'"
    ):
        enter("cuda:h100")
