"""A folded norm's bias takes back the mean that rounding a weight moves, where a norm before tells the mean."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx.runtime.weights.bias_correction import activation_moments, moved_mean, norm_moments, sum_moments
from support.checks.below_16_bits import error
from support.models.small import Parts

pytestmark = pytest.mark.usefixtures("op_by_op")

CHANNELS = 24

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu, in place": functools.partial(F.relu, inplace=True),
    "relu6": F.relu6,
    "relu6, in place": functools.partial(F.relu6, inplace=True),
    "hardtanh": F.hardtanh,
    "silu": F.silu,
    "hardswish, in place": functools.partial(F.hardswish, inplace=True),
    "gelu": F.gelu,
    "leaky_relu": functools.partial(F.leaky_relu, negative_slope=0.2),
    "clamp": lambda x: x.clamp(0.0, 4.0),
    "padded": lambda x: F.pad(F.relu(x), (1, 1, 1, 1)),
}


def norm(channels: int = CHANNELS, kind: Callable[..., nn.Module] = nn.BatchNorm2d) -> nn.Module:
    made = kind(channels, momentum=None)
    with torch.no_grad():
        made.get_parameter("weight").uniform_(0.5, 2.0)
        made.get_parameter("bias").normal_(0.5)
    return made


def conv(groups: int = 1) -> nn.Module:
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False, groups=groups)


def measured(model: nn.Module, *batches: Tensor) -> nn.Module:
    """A model whose statistics are those of some data, as after training."""
    with torch.no_grad():
        for batch in batches:
            model.train()(batch)
    return model.eval().requires_grad_(False)


def block(activation: Callable[[Tensor], Tensor]) -> nn.Module:
    return Parts(
        lambda m, x: m.after(m.last(activation(m.before(m.first(x))))),
        first=conv(),
        before=norm(),
        last=conv(),
        after=norm(),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{name: (functools.partial(block, each), (4, CHANNELS, 12, 12)) for name, each in ACTIVATIONS.items()},
    "depthwise": (
        lambda: nn.Sequential(conv(), norm(), nn.ReLU6(), conv(groups=CHANNELS), norm(), nn.ReLU6(), conv(), norm()),
        (4, CHANNELS, 12, 12),
    ),
    "groups": (lambda: nn.Sequential(conv(), norm(), nn.ReLU(), conv(groups=4), norm()), (4, CHANNELS, 12, 12)),
    "residual": (
        lambda: Parts(
            lambda m, x: m.after(m.last(F.relu(m.beside(m.skip(x)) + m.before(m.first(x))))),
            first=conv(), before=norm(), skip=conv(), beside=norm(), last=conv(), after=norm(),
        ),
        (4, CHANNELS, 12, 12),
    ),
    "norm first": (
        lambda: Parts(
            lambda m, x: m.after(m.last(F.relu(m.before(x)))), before=norm(), last=conv(), after=norm()
        ),
        (4, CHANNELS, 12, 12),
    ),
    "products": (
        lambda: nn.Sequential(
            nn.Linear(CHANNELS, CHANNELS), norm(kind=nn.BatchNorm1d), nn.ReLU(), nn.Linear(CHANNELS, CHANNELS),
            norm(kind=nn.BatchNorm1d),
        ),
        (256, CHANNELS),
    ),
    "one dimension": (
        lambda: nn.Sequential(
            nn.Conv1d(CHANNELS, CHANNELS, 5), norm(kind=nn.BatchNorm1d), nn.SiLU(), nn.Conv1d(CHANNELS, CHANNELS, 5),
            norm(kind=nn.BatchNorm1d),
        ),
        (8, CHANNELS, 64),
    ),
}  # fmt: skip


def mean_errors(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Errors of the channels' means, and of the results, of a run."""
    exact, got = copy.deepcopy(model).double()(x.double()), run(x).double()
    others = [at for at in range(exact.ndim) if at != 1]
    return error([got.mean(others)], [exact.mean(others)]), error([got], [exact])


@pytest.mark.quick_rows("relu", "relu6", "silu", "depthwise", "norm first", "products")
@pytest.mark.parametrize("name", MODELS)
def test_means_move_less_and_no_result_is_worse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    make, shape = MODELS[name]
    model, x = measured(make(), *(torch.randn(shape) for _ in range(4))), torch.randn(shape)
    with torch.inference_mode():
        compiled = torch.compile(model, backend="amp_fx", options={"profile": "off"})
        got = mean_errors(model, x, compiled)
        program = amp_fx.export(model, (x,)).module()
        assert error([program(x)], [compiled(x)]) < 0.01
        monkeypatch.setattr("amp_fx.runtime.weights.bias_correction.Moments.of", lambda *_: None)
        without = mean_errors(model, x, amp_fx.export(model, (x,)).module())
    assert got[0] < 0.8 * without[0]
    assert got[1] < 1.02 * without[1]


@pytest.mark.parametrize("name", ["relu", "relu, in place", "depthwise", "products"])
def test_statistics_that_nobody_has_measured_say_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = MODELS[name]
    model, x = make().eval(), torch.randn(shape)
    stored = amp_fx.export(model, (x,)).state_dict
    monkeypatch.setattr("amp_fx.runtime.weights.bias_correction.Moments.of", lambda *_: None)
    plain = amp_fx.export(model, (x,)).state_dict
    assert all(torch.equal(value, plain[key]) for key, value in stored.items())


UNKNOWN: dict[str, Callable[[Tensor, Tensor], object]] = {
    "written to": lambda z, x: z.add_(x),
    "written to through a view": lambda z, x: z[:, :12].mul_(3.0),
    "padded with ones": lambda z, x: F.pad(z, (1, 1, 1, 1), value=1.0),
    "channels padded": lambda z, x: F.pad(z, (0, 0, 0, 0, 1, -1)),
    "rounded to integers": lambda z, x: z.to(torch.int32).float(),
    "the data's": lambda z, x: z * x,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_the_mean_of_a_value_that_no_norm_tells_is_not_guessed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(m: Any, x: Tensor) -> Tensor:
        z = F.relu(m.before(m.first(x)))
        changed = UNKNOWN[name](z, x)
        return m.after(m.last(z if "written" in name else changed))

    model = measured(
        Parts(program, first=conv(), before=norm(), last=conv(), after=norm()),
        x := torch.randn(4, CHANNELS, 8, 8),
    )
    stored = amp_fx.export(model, (x,)).state_dict
    monkeypatch.setattr("amp_fx.runtime.weights.bias_correction.Moments.of", lambda *_: None)
    plain = amp_fx.export(model, (x,)).state_dict
    assert all(torch.equal(value, plain[key]) for key, value in stored.items())


def test_a_norm_that_changes_changes_the_bias_behind_the_next_one() -> None:
    make, shape = MODELS["relu"]
    model, x = measured(make(), torch.randn(shape)), torch.randn(shape)
    with torch.inference_mode():
        compiled = torch.compile(model, backend="amp_fx", options={"profile": "off"})
        compiled(x)
        with torch.no_grad():
            model.get_parameter("before.bias").add_(2.0)
        got = compiled(x)
        torch._dynamo.reset()
        amp_fx.reset()
        assert torch.equal(got, torch.compile(model, backend="amp_fx", options={"profile": "off"})(x))


@pytest.mark.parametrize("name", ["relu", "relu6", "silu", "hardswish", "gelu", "tanh"])
def test_moments_are_those_of_many_samples(name: str) -> None:
    op, more = getattr(torch.ops.aten, name).default, ()
    given = norm_moments(torch.tensor([0.5, -2.0]), torch.tensor([1.0, -0.3]), torch.ones(2), torch.ones(2))
    assert given.equal(torch.tensor([[1.0, -0.3], [0.5, 2.0]]))
    samples = op(given[0, :, None] + given[1, :, None] * torch.randn(2, 400_000), *more)
    got = activation_moments(given, op, *more)
    torch.testing.assert_close(got, torch.stack([samples.mean(1), samples.std(1)]), rtol=0.02, atol=0.01)
    torch.testing.assert_close(sum_moments(got, given)[1], (got[1].square() + given[1].square()).sqrt())


def test_a_mean_is_moved_by_the_weight_that_is_rounded_away() -> None:
    weight, moments = torch.randn(6, 2, 3, 3), torch.randn(2, 4)
    moved = moved_mean(weight, weight.bfloat16(), moments, 2)
    x = moments[0].view(1, 4, 1, 1).expand(1, 4, 3, 3)
    torch.testing.assert_close(moved, F.conv2d(x, weight - weight.bfloat16().float(), groups=2).flatten())
    assert not moved_mean(weight, weight.bfloat16(), torch.full((2, 4), torch.nan), 2).any()
