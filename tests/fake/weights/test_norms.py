"""Norms by given statistics are folded into the weights before them: scaled in fp32 and rounded once, everywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx._torch import onednn_packs
from amp_fx.errors import OptionsError
from amp_fx.exporting import packaging
from support.checks.below_16_bits import error

pytestmark = pytest.mark.usefixtures("op_by_op")


def norm(channels: int, kind: Callable[[int], Any] = nn.BatchNorm2d) -> nn.Module:
    """As after training: variances over several powers of ten, and what is learned."""
    made = kind(channels)
    with torch.no_grad():
        made.running_mean.normal_()
        made.running_var.copy_(torch.rand(channels).mul(6.0).sub(4.0).exp())
        made.weight.uniform_(0.2, 3.0)
        made.bias.normal_()
    return made


def net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers).eval()


class Shared(nn.Module):
    """One convolution before two norms, as heads of detectors have it for each level of a pyramid."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norms = nn.Conv2d(3, 8, 3), nn.ModuleList([norm(8), norm(8)])

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[0](self.conv(x)) + self.norms[1](self.conv(x * 2.0))


def images() -> Tensor:
    return torch.randn(4, 3, 16, 16)


NETS = {
    "one after the other": (
        lambda: net(
            nn.Conv2d(3, 16, 3, bias=False), norm(16), nn.ReLU6(), nn.Conv2d(16, 16, 3, groups=16), norm(16)
        ),
        images,
    ),
    "transposed": (lambda: net(nn.ConvTranspose2d(3, 8, 3), norm(8)), images),
    "three dimensions": (
        lambda: net(nn.Conv3d(2, 8, 3), norm(8, nn.BatchNorm3d)),
        lambda: torch.randn(2, 2, 8, 8, 8),
    ),
    "one dimension": (
        lambda: net(nn.Conv1d(2, 8, 5), norm(8, nn.BatchNorm1d)),
        lambda: torch.randn(4, 2, 32),
    ),
    "a product": (lambda: net(nn.Linear(32, 16), norm(16, nn.BatchNorm1d)), lambda: torch.randn(64, 32)),
    "one weight before two norms": (lambda: Shared().eval(), images),
}


@pytest.fixture(params=NETS.values(), ids=[*NETS])
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, given = request.param
    return make(), given()


def errors(model: nn.Module, x: Tensor, *got: Tensor) -> Sequence[float]:
    """Of what was computed, in autocast's error."""
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            autocast = error([model(x)], [exact])
    return [error([each], [exact]) / autocast for each in got]


def test_a_program_is_stored_with_folded_weights_and_errs_no_more_than_autocast(
    case: tuple[nn.Module, Tensor],
) -> None:
    model, x = case
    program = amp_fx.export(model, (x,))
    assert not [node for node in program.graph.nodes if "batch_norm" in str(node.target)]
    dtypes = {name: value.dtype for name, value in program.state_dict.items() if value.is_floating_point()}
    assert {name for name, dtype in dtypes.items() if dtype is torch.float32} == {
        name for name in dtypes if "_folded" in name and not name.endswith("_folded_weight")
    }
    [found] = errors(model, x, program.module()(x))
    assert found < 1.05


def test_what_is_compiled_folds_the_same_weights(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    with torch.inference_mode():
        [found] = errors(model, x, torch.compile(model, backend="amp_fx", options={"profile": "off"})(x))
    # what is added is a bias in the dtype of the call here
    assert found < 1.05


def test_eager_numerics_keep_norms() -> None:
    program = amp_fx.export(net(nn.Conv2d(3, 8, 3), norm(8)), (images(),), numerics="eager")
    assert [node for node in program.graph.nodes if "batch_norm" in str(node.target)]


def test_a_weight_that_is_beyond_fp16_once_it_is_folded_is_refused_by_name_or_clamped() -> None:
    conv, after = nn.Conv2d(3, 8, 3), norm(8)
    with torch.no_grad():
        conv.weight.fill_(3e4)
        after.get_parameter("weight")[3] = 100.0
    model = net(conv, after)
    with pytest.raises(OptionsError, match=r"0\.weight"):
        amp_fx.export(model, (images(),), dtype="float16")
    program = amp_fx.export(model, (images(),), dtype="float16", weights_beyond_range="clamp")
    assert program.state_dict["0.weight"].isfinite().all()


def test_what_is_added_to_each_channel_is_the_bias_of_a_packed_call() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bias = nn.Conv2d(3, 8, 3, bias=False), nn.Parameter(torch.randn(8, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.conv(x) + self.bias)

    model, x = Added().eval(), images()
    with torch.inference_mode(), amp_fx.record() as recording:
        got = torch.compile(model, backend="amp_fx", options={"weights": "cache"})(x)
        torch.testing.assert_close(got, model(x))
    [plan] = recording.plans
    assert plan.weights.startswith("packed")


class Far(nn.Module):
    """What is added is far larger than what it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bias = nn.Conv2d(3, 8, 3, bias=False), nn.Parameter(100.0 + torch.rand(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.bias


def test_an_addition_of_the_program_itself_is_not_rounded_with_a_low_result() -> None:
    torch.manual_seed(0)
    model, x = Far().eval().requires_grad_(False), images()
    with torch.inference_mode():
        [found] = errors(model, x, torch.compile(model, backend="amp_fx", options={"profile": "off"})(x))
    assert found < 1.05


@pytest.mark.parametrize("is_norm", [False, True])
def test_a_package_has_the_shift_of_a_norm_as_a_bias_and_adds_what_the_program_adds(
    is_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(packaging, "compile_package", lambda program, *_: asked.append(program))
    # Inductor would hold what is packed
    monkeypatch.setattr(packaging, "HoldPacked", lambda *_: SimpleNamespace(packed=()))
    model = net(nn.Conv2d(3, 8, 3), norm(8)) if is_norm else Far().eval()
    amp_fx.package(amp_fx.export(model, (images(),)), "model.pt2", profile="off")
    added = [node for node in asked[0].graph.nodes if node.target is torch.ops.aten.add.Tensor]
    # what is not packed adds in fp32
    assert len(added) == (not is_norm or not onednn_packs(torch.bfloat16))
