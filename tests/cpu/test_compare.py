"""``amp_fx.compare``: which module of a program is named, what is measured, and that nothing is changed.

One program goes through Inductor, others in slow tests; the rest is run op by op, as AOTAutograd traces it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
from collections import UserDict
from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx import AmpFxError, Comparison, InputError, OptionsError
from examples import hugging_face
from support.checks.below_16_bits import error
from support.document_blocks import Net
from support.models.small import Parts
from support.models.spoiled_by_low_dtypes import FP16, OFF, SPOILED, kelvin, mean_square


def compared(model: nn.Module, *batch: Any, **given: Any) -> Comparison:
    return amp_fx.compare(model, *batch, **{"loss": mean_square, "options": OFF, **given})


def rows(found: Comparison) -> dict[str, amp_fx.ModuleError]:
    return {row.module: row for row in found.worst}


# --- the verdict ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=() if name == "large" else pytest.mark.slow) for name in SPOILED]
)
def test_the_module_that_spoils_a_compiled_program_is_named(program: str) -> None:
    make, culprit, size, options = SPOILED[program]
    # a kernel takes g++ a second; in fp16, what is written for the backward is what overflows
    trains = program == "large"
    with torch.set_grad_enabled(trains):
        loss = mean_square if trains else None
        found = amp_fx.compare(make(), torch.randn(size), loss=loss, options=options)
    assert not found.healthy
    assert found.culprit == culprit
    assert culprit in found.verdict
    assert found.disturbance < 0.1 * found.result_error


@pytest.mark.quick_rows("large")
@pytest.mark.parametrize("program", SPOILED)
def test_in_training_it_is_named_and_the_remedy_mends_it(program: str, without_inductor: None) -> None:
    make, culprit, size, options = SPOILED[program]
    model, x = make(), torch.randn(size)
    found = compared(model, x, options=options)
    assert (found.healthy, found.culprit) == (False, culprit)
    assert found.first_nonfinite == (None if program == "kelvin" else "norm")
    assert found.culprit_call is not None
    assert "spoiled_by_low_dtypes.py" in found.culprit_call.source
    mended = compared(model, x, options=found.remedy)
    assert mended.healthy
    assert mended.result_error < 0.2 * found.result_error


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nothing_is_wrong_of_a_healthy_llama(is_compiled: bool, request: pytest.FixtureRequest) -> None:
    if not is_compiled:
        request.getfixturevalue("without_inductor")
    sizes: dict[str, Any] = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 2, "hidden": 64, "vocab": 64}
    ids = torch.randint(64, (2, 16))

    def loss(outputs: Any) -> Tensor:
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    found = compared(hugging_face.llama(**sizes, length=16), ids, loss=loss)
    assert found.healthy
    assert found.disturbance < 1e-3
    assert (found.culprit, found.first_nonfinite, found.remedy) == (None, None, {})
    names = rows(found)
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp", "lm_head"} <= names.keys()
    assert "model.layers" not in names
    assert all(0 < row.error < 0.02 for row in names.values() if row.precision == "bfloat16")


@pytest.mark.parametrize("loss", [mean_square, torch.sum], ids=["mean square", "sum, whose gradient cancels"])
def test_a_norm_at_the_end_is_healthy(loss: Callable[[Tensor], Tensor], without_inductor: None) -> None:
    model = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    assert compared(model, torch.randn(4, 8, 32), loss=loss).healthy


def test_a_loss_near_zero_is_healthy(without_inductor: None) -> None:
    x, net = torch.randn(64, 16), Net()
    centre = mean_square(net(x)).item()
    found = compared(Parts(lambda m, x: mean_square(m.net(x)) - centre, net=net), x, loss=None)
    assert rows(found)[""].error >= 1
    assert found.healthy


# --- what is measured ---


def test_errors_are_those_of_the_values_and_of_their_gradients(without_inductor: None) -> None:
    model, x = Net(), torch.randn(64, 16)
    found = rows(compared(model, x))

    def values(low: bool) -> dict[str, tuple[Tensor, Tensor]]:
        kept: dict[str, Tensor] = {}
        with torch.autocast("cpu", torch.bfloat16, enabled=low), contextlib.ExitStack() as hooks:
            for name in ("up", "norm", "down"):
                keep = functools.partial(lambda name, _, __, result: kept.update({name: result}), name)
                hooks.enter_context(getattr(model, name).register_forward_hook(keep))
            result = model(x)
        gradients = torch.autograd.grad(mean_square(result.float()), list(kept.values()))
        pairs = zip((value.detach() for value in kept.values()), gradients, strict=True)
        return dict(zip(kept, pairs, strict=True))

    low, exact = values(True), values(False)
    for name in ("up", "down"):
        value, gradient = (error([ours], [true]) for ours, true in zip(low[name], exact[name], strict=True))
        assert found[name].error == pytest.approx(value, rel=0.05)
        assert found[name].gradient_error == pytest.approx(gradient, rel=0.2)
    worst = [max(row.error, row.gradient_error or 0) for row in found.values()]
    assert worst == sorted(worst, reverse=True)


def test_of_large_values_a_sample_is_compared_and_all_is_searched(without_inductor: None) -> None:
    model: Any = Parts(lambda m, x: m.scale(m.up(x)), up=nn.Linear(64, 64), scale=nn.Linear(64, 64))
    x = torch.randn(3000, 64)
    assert compared(model, x, options=FP16).first_nonfinite is None
    # one number in 192,000, of which few are compared
    x[1234] = 0.0
    x[1234, 5] = 4e4
    with torch.no_grad():
        model.up.weight[7, 5] = 2.0
    assert compared(model, x, options=FP16).first_nonfinite == "up"


def test_without_a_loss_results_are_compared_in_the_mode_of_the_caller(without_inductor: None) -> None:
    model, x = Net().eval(), torch.randn(4, 16)
    with torch.inference_mode():
        found = amp_fx.compare(model, x, options=OFF)
    assert found.healthy
    assert {row.gradient_error for row in found.worst} == {None}
    assert 0 < found.result_error < 0.02


#: what pytree does not know
Returned = make_dataclass("Returned", [("value", Any), ("kind", str, "scores")])


@pytest.mark.parametrize(
    "form",
    [Returned, lambda y: [Returned({"scores": (Returned(y), 3)})], lambda y: (UserDict(scores=y), None)],
    ids=["a data class", "nested ones", "a mapping in a tuple"],
)
def test_results_in_data_classes_and_mappings_are_compared(form: Any, without_inductor: None) -> None:
    model, x = Parts(lambda m, x: form(m.net(x)), net=Net()), torch.randn(4, 16)
    with torch.no_grad():
        found = amp_fx.compare(model, x, options=OFF)
    assert found.healthy
    assert 0 < found.result_error < 0.02


@pytest.mark.parametrize(
    ("program", "loss", "named"),
    [
        (lambda m, x: (m.net(x).argmax(-1), 3), None, "tuple"),
        (lambda m, x: m.net.requires_grad_(False)(x), mean_square, "parameter"),
        (lambda m, x: m.net(x).detach() + x.sum(), mean_square, "parameter"),
    ],
    ids=["no floating tensors", "frozen weights", "weights without a gradient"],
)
def test_where_nothing_is_left_to_compare_it_is_an_error(
    program: Any, loss: Any, named: str, without_inductor: None
) -> None:
    x = torch.randn(4, 16).requires_grad_()
    with pytest.raises(AmpFxError, match=named):
        amp_fx.compare(Parts(program, net=Net()), x, loss=loss, options=OFF)


@torch.compiler.disable()  # called, as the types of torch want it
def lost_by_rounding(x: Tensor) -> Tensor:
    return 1 / (x - x.bfloat16())


def test_a_result_that_alone_is_not_finite_is_named(without_inductor: None) -> None:
    model = Parts(lambda m, x: {"ratio": lost_by_rounding(m.up(x).float())}, up=nn.Linear(16, 16))
    with torch.no_grad():
        found = amp_fx.compare(model, torch.randn(4, 16), options=OFF)
    assert (found.healthy, found.culprit, found.first_nonfinite) == (False, None, "")
    assert "['ratio']" in found.verdict


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_may_be_symbols(dynamic: bool, without_inductor: None) -> None:
    found = compared(Net(), torch.randn(6, 16), dynamic=dynamic)
    assert found.healthy
    assert all(row.gradient_error for row in found.worst)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_graph_break_starts_a_new_part(without_inductor: None) -> None:
    def broken(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        torch._dynamo.graph_break()
        return m.b(x)

    found = compared(Parts(broken, a=Net(), b=Net()), torch.randn(6, 16))
    assert len(found.plans) == 2
    assert all(rows(found)[name].gradient_error for name in ("a", "a.up", "b", "b.norm"))


@pytest.mark.slow
def test_every_call_on_request(without_inductor: None) -> None:
    found = compared(Net(), torch.randn(6, 16), calls=True)
    calls = {(row.op, row.module) for row in found.calls}
    assert calls >= {("linear", "up"), ("gelu", ""), ("linear", "down")}
    assert compared(Net(), torch.randn(6, 16)).calls == ()


# --- references ---


@pytest.mark.quick_rows("autocast")
@pytest.mark.parametrize("against", ["autocast", OFF], ids=["autocast", "options"])
def test_a_run_is_close_to_others_that_round_alike(against: Any, without_inductor: None) -> None:
    model, x = Net(), torch.randn(64, 16)
    near, far = compared(model, x, against=against), compared(model, x)
    assert rows(near)["down"].error < 0.5 * rows(far)["down"].error


def test_eager_is_the_program_under_its_own_autocast(without_inductor: None) -> None:
    model, x = Net(), torch.randn(64, 16)
    alone = compared(model, x, against="eager")
    assert rows(alone)["down"].error == pytest.approx(rows(compared(model, x))["down"].error)
    with torch.autocast("cpu", torch.bfloat16):
        inside = compared(model, x, loss=lambda outputs: mean_square(outputs.float()), against="eager")
    assert rows(inside)["down"].error < 0.5 * rows(alone)["down"].error


# --- fp16 ---


def test_gradients_that_become_zero_are_counted_and_a_scaler_mends_them(without_inductor: None) -> None:
    model, x = Net(), torch.randn(64, 16)

    def small(outputs: Tensor) -> Tensor:
        return 1e-5 * mean_square(outputs)

    found = compared(model, x, loss=small, options=FP16, scale=1.0)
    assert not found.healthy
    assert rows(found)["up"].lost > 0.1
    assert found.remedy["scaler"] == "default"
    assert compared(model, x, loss=small, options=FP16).healthy


def test_the_loss_scale_is_that_of_the_scaler_and_backs_off_as_its_would(without_inductor: None) -> None:
    model, x = Net(), torch.randn(64, 16)
    scaler = amp_fx.GradScaler("cpu", init_scale=4096.0)
    options = {**FP16, "scaler": scaler.name}
    assert compared(model, x, options=options).loss_scale == 4096.0
    found = compared(model, x, loss=lambda outputs: 100 * outputs.square().sum(), options=options)
    assert found.healthy
    assert found.loss_scale < 4096.0
    assert scaler.get_scale() == 4096.0


# --- the call ---


def test_nothing_is_changed(without_inductor: None) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))
    x = torch.randn(32, 16)
    model(x).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    before, generator = copy.deepcopy((model.state_dict(), gradients)), torch.get_rng_state()
    first, again = compared(model, x), compared(model, x)
    assert first.worst == again.worst
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    torch.testing.assert_close((model.state_dict(), gradients), before, rtol=0, atol=0)
    assert torch.equal(generator, torch.get_rng_state())


X, NET = torch.zeros(2, 16), Net()


@pytest.mark.parametrize(
    ("arguments", "given", "kind"),
    [
        *(((NET, *b), {}, InputError) for b in ((torch.zeros(2, 3),), (), (X, 3), ("text",), ({"y": X},))),
        *(((NET, X), {"against": against}, OptionsError) for against in ("fp64", 3, {"polcy": "fast"})),
        ((NET, X), {"loss": lambda outputs: outputs}, AmpFxError),
        ((torch.sin, X), {}, AmpFxError),
    ],
    ids=[
        *("a wrong size", "nothing", "too much", "text", "another name", "an unknown reference"),
        *("no reference", "wrong options as reference", "no loss", "a function"),
    ],
)
def test_what_is_wrong_is_an_error(arguments: Any, given: dict[str, Any], kind: Any) -> None:
    with pytest.raises(kind, match="no loss" if "loss" in given else None):
        compared(*arguments, **given)


def test_a_batch_is_what_calibrate_takes(without_inductor: None) -> None:
    model, x = Net(), torch.randn(6, 16)
    first, *others = (compared(model, *batch).worst for batch in ((x,), ((x,),), ({"x": x},)))
    assert [*others, compared(model, x=x).worst] == [first] * 3


@pytest.mark.usefixtures("group_of_one")
def test_one_process_of_a_group_may_call_it(without_inductor: None) -> None:
    found = compared(nn.parallel.DistributedDataParallel(Net()), torch.randn(6, 16))
    assert found.healthy
    assert "up" in rows(found)


# --- what a reader sees ---


def test_text_json_and_picture(without_inductor: None, tmp_path: Path) -> None:
    found = compared(kelvin(), torch.randn(4, 32, 64))
    lines = str(found).split("\n")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 25
    assert eval(str(found).partition("options=")[2]) == found.remedy
    data = json.loads(found.to_json())
    assert (data["culprit"], data["healthy"]) == ("attend", False)
    assert json.loads(found.save(tmp_path / "found.json").read_text()) == data
    assert re.search(r'"error \de-0\d"', found.save(tmp_path / "found.html").read_text())
    assert re.search(r"error \de-0\d", found.save(tmp_path / "found.dot").read_text())
