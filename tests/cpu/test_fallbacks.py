"""Each stage of the backend fails on purpose: the next way is taken, with one warning; strict raises."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed, SkipFrame

import amp_fx
import amp_fx.compiler.backend
import amp_fx.compiler.compiling
from amp_fx import FallbackWarning, GradScaler, PlanError, ScalingWarning, record
from amp_fx.graphs.fallback import is_for_the_caller
from amp_fx.passes import LayOutGradients, PlaceLevels
from amp_fx.runtime.weights.cache import WeightCache
from support.checks.below_16_bits import MLP, lowered
from support.checks.below_16_bits import options as level_options
from support.checks.held_memory import Held
from support.models.small import near_autocast
from support.tracing.captured_graphs import op_by_op, without_inductor


class OnPurposeError(KeyError):
    """What a stage fails with: no error of the house."""


#: as a warning has it, with where it was raised
ON_PURPOSE = r"OnPurposeError: 'on purpose' \[cpu/test_fallbacks\.py:\d+\]"


def fails(*_: Any, **__: Any) -> Any:
    raise OnPurposeError("on purpose")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # so small that no profile may decide
    return torch.compile(model, backend="amp_fx", options={"profile": "off", **options})


def scale_weight(model: nn.Sequential) -> None:
    next(model.parameters()).data.mul_(1.5)


#: about as far from fp64 as eager autocast
is_low = functools.partial(near_autocast, most=1.3, least=0.3)


@contextlib.contextmanager
def one_warning(how: str, reason: str = ON_PURPOSE) -> Iterator[None]:
    with pytest.warns(FallbackWarning, match=f"{how}.*{reason}.*strict") as caught:
        yield
    assert sum(warning.category is FallbackWarning for warning in caught) == 1


# ---- while a graph is compiled ----

#: what fails, the options, and how the graph is compiled then
STAGES: dict[str, tuple[tuple[Any, str], dict[str, Any], str]] = {
    "rewriting": ((amp_fx.compiler.backend, "rewrite"), {}, "autocast's semantics"),
    "finding a plan's recipe": ((amp_fx.compiler.backend, "level_placement"), {}, "autocast's semantics"),
    "telling": ((amp_fx.compiler.backend, "add_autocast"), {}, "autocast's semantics"),
    "copies": (
        (amp_fx.compiler.compiling, "with_weights"),
        {"numerics": "eager"},
        "weights cast in each call",
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_is_left_out(stage: str, monkeypatch: pytest.MonkeyPatch, held: Held) -> None:
    place, options, how = STAGES[stage]
    monkeypatch.setattr(*place, fails)
    model, x = net(), torch.randn(8, 64)
    run = compiled(model, **options)
    with torch.inference_mode(), without_inductor(), record() as recording, one_warning(how):
        assert is_low(run(x), model, x)
        assert is_low(run(x), model, x)
    [plan] = recording.plans
    assert ("on purpose" in plan.fallback) == (plan.nodes == []) == ("autocast" in how)
    assert held.bytes() == 0
    torch._dynamo.reset()
    run = compiled(model, strict=True, **options)
    with torch.inference_mode(), record(), pytest.raises(BackendCompilerFailed) as info:
        run(x)
    assert isinstance(info.value.inner_exception, OnPurposeError)


@pytest.mark.usefixtures("op_by_op")
@mock.patch("amp_fx.runtime.weights.calling.apply_patterns", fails)
def test_where_packing_fails_weights_are_cast_in_each_call(held: Held) -> None:
    model, x = net(), torch.randn(8, 64)
    run = compiled(model)
    with torch.inference_mode(), one_warning("weights cast in each call"):
        assert is_low(run(x), model, x)
        scale_weight(model)
        assert is_low(run(x), model, x)
    assert held.bytes() == 0


def has_gradients_of(loss: Tensor, model: nn.Module, within: float) -> bool:
    pairs = zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True)
    return all(p.grad is not None and (p.grad - g).norm() < within * g.norm() for p, g in pairs)


@pytest.mark.usefixtures("op_by_op")
@mock.patch.object(LayOutGradients, "call", fails)
def test_where_our_passes_in_inductor_fail_it_compiles_without_them() -> None:
    model, x = nn.Conv2d(4, 8, 3), torch.randn(2, 4, 8, 8)
    with one_warning("autocast's semantics", "lay-out-gradients.*on purpose"):
        got = compiled(model)(x)
    assert is_low(got, model, x)
    got.square().sum().backward()
    assert has_gradients_of(model(x).square().sum(), model, within=0.02)


@mock.patch.object(amp_fx.compiler.compiling.ScaledGraph, "extend", fails)
def test_where_scaling_fails_the_scaler_works_from_outside() -> None:
    model, x = net(), torch.randn(8, 64)
    scaler = GradScaler("cpu", init_scale=256.0)
    run = compiled(model, dtype="float16", scaler="default")
    with without_inductor(), one_warning("scaled from outside"):
        scaler.scale(run(x).square().mean()).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters()))
    assert has_gradients_of(model(x).square().mean(), model, within=0.01)


@pytest.mark.parametrize("policy", ["int8", "fp8", "fp8 in training"])
@mock.patch.object(PlaceLevels, "call", fails)
def test_where_a_level_fails_matmuls_run_in_16_bits(policy: str, tmp_path: Path) -> None:
    model, x = MLP(32, 64, 64), torch.randn(64, 32)
    options = {"policy": "int8"} if policy == "int8" else level_options(tmp_path, strict=False)
    with one_warning("in 16 bits", "place-levels.*on purpose"):
        if "training" in policy:
            step = lowered(model, [x], options)
            assert not any(step.scaled())
            assert {row.dtype for row in step.plan.nodes if row.flops} == {torch.bfloat16}
            return
        with torch.inference_mode(), without_inductor():
            got = compiled(model, **options)(x)
    assert (got - model(x)).norm() < 0.01 * model(x).norm()


@mock.patch.object(amp_fx.compiler.compiling, "lower", fails)
@mock.patch.object(amp_fx.compiler.backend, "lower", fails)
def test_where_all_of_ours_fails_inductor_compiles_it_alone() -> None:
    model, x = net(), torch.randn(8, 64)
    with torch.no_grad(), without_inductor(), one_warning("autocast's semantics"):
        assert is_low(compiled(model)(x), model, x)
    # so is a graph without floats, which is passed through
    torch._dynamo.reset()
    with without_inductor(), one_warning("as it is, by Inductor alone"):
        assert compiled(lambda x: x + 1)(torch.arange(3)).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "training", "ways"),
    [
        ({}, True, 1),
        ({}, False, 2),
        ({"policy": "fast", "inductor": {"max_autotune": True}}, True, 1),
        ({"weights": "freeze"}, True, 1),
        ({"weights": "freeze"}, False, 2),
        ({"policy": "fp8"}, True, 2),
        ({"policy": "int8", "weights": "cast", "int8": "int8_unpacked"}, False, 2),
        ({"dtype": "float16", "scaler": "default"}, True, 2),
    ],
    ids=str,
)
def test_a_plainer_way_is_tried_where_options_ask_for_more(options: Any, training: bool, ways: int) -> None:
    given = amp_fx.options(**options)
    with (
        mock.patch.object(amp_fx.compiler.backend, "rewrite", side_effect=fails) as rewrite,
        torch.set_grad_enabled(training),
        without_inductor(),
        one_warning("autocast's semantics"),
    ):
        compiled(net(), **given)(torch.randn(8, 64))
    tried = [call.args[2] for call in rewrite.call_args_list]
    assert len(tried) == ways
    plain = tried[-1]
    assert (plain.weights, plain.level, plain.scaler) == ("cast", "auto", None)
    assert str(plain.policy) == ("fast" if options.get("policy") == "fast" else "autocast")
    # without gradients, kernels are called from Python
    inductor = {**tried[0].inductor, **({} if training else {"cpp_wrapper": False})}
    assert (plain.dtype, plain.inductor) == (tried[0].dtype, inductor)


def test_what_inductor_cannot_compile_either_is_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def cannot(gm: Any, inputs: Any, config: Any) -> Any:
        found.append(f"no kernel for graph {len(found)}")
        raise RuntimeError(found[-1])

    monkeypatch.setattr(amp_fx.compiler.compiling, "compile_with_inductor", cannot)
    with torch.inference_mode(), pytest.raises(BackendCompilerFailed) as info:
        # a warning would be another error
        compiled(net())(torch.randn(8, 64))
    assert len(found) > 1
    assert str(info.value.inner_exception) == found[-1]


def test_errors_about_options_and_words_to_dynamo_are_raised() -> None:
    for error in (PlanError("no such plan"), ScalingWarning("of the caller's filter"), SkipFrame("leave it")):
        assert is_for_the_caller(error)
    assert not is_for_the_caller(OnPurposeError())
    refuses = mock.patch.object(amp_fx.compiler.backend, "rewrite", side_effect=PlanError("no such plan"))
    with refuses, torch.no_grad(), pytest.raises(PlanError, match="no such plan"):
        compiled(net())(torch.randn(8, 64))


@torch.library.custom_op("amp_fx_fallbacks::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An op that says itself what autocast does with it."""
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autocast("cpu", torch.bfloat16)


@pytest.mark.usefixtures("without_inductor")
def test_an_op_with_an_autocast_rule_inside_autocast_is_named_with_its_line() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return twice(x @ w) + 1  # the line to name

    x, w = (torch.randn(8, 8) for _ in range(2))
    with pytest.warns(FallbackWarning) as caught, record() as recording:
        got = torch.compile(program, backend="amp_fx")(x, w)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got, program(x, w))
    [text] = [str(each.message) for each in caught if each.category is FallbackWarning]
    named = ("twice", "test_fallbacks.py", "the line to name", "options={'strict': True}")
    assert all(each in text for each in named)
    [plan] = recording.plans
    assert "twice" in plan.fallback
    assert plan.nodes == []


# ---- in a call ----


@pytest.mark.parametrize("what", ["copies", "folded constants", "constants in the code"])
def test_what_fails_in_a_call_is_computed_in_each(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "constants in the code":
        monkeypatch.setattr("amp_fx.compiler.compiling.tunes_kernels", lambda _: True)
    model, x = net(), torch.randn(8, 64)
    # copies, where nothing is folded
    run = compiled(model, **({"numerics": "eager"} if what == "copies" else {}))
    with torch.inference_mode(), without_inductor() if what == "copies" else op_by_op():
        assert is_low(run(x), model, x)
        monkeypatch.setattr(WeightCache, "of", fails)
        with one_warning("in each call"):
            for _ in range(2):
                scale_weight(model)
                assert is_low(run(x), model, x)


@mock.patch.object(WeightCache, "of", fails)
def test_with_strict_what_fails_in_a_call_is_raised() -> None:
    run = compiled(net(), numerics="eager", strict=True)
    with torch.inference_mode(), without_inductor(), pytest.raises(OnPurposeError):
        run(torch.randn(8, 64))


def test_nested_tensors_are_named_and_run_as_under_autocast() -> None:
    model = net()
    rows = [torch.randn(size, 64) for size in (2, 5, 3)]
    ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with without_inductor(), pytest.warns(FallbackWarning, match="nested tensors"):
        found = compiled(model)(ragged)
    assert is_low(found.values(), model, torch.cat(rows))
