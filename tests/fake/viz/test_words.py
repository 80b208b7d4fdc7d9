"""One line a graph says whether low precision happened, and why not."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from string import Formatter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from amp_fx import Plan, PlanError, record
from amp_fx.precision.placement.devices import builtin
from amp_fx.precision.plans.label import Reason, ReasonKind
from amp_fx.viz.words import because, more_bytes, sentence, summary
from support.models.small import Parts
from support.tracing.captured_graphs import rewrite


def net(width: int = 16) -> nn.Module:
    """Three matmuls of one size."""
    parts = {name: nn.Linear(width, width) for name in ("up", "down", "head")}
    return Parts(lambda m, x: m.head(F.softmax(m.down(m.up(x)), -1)).square().mean(), **parts)


def line(options: dict[str, Any], model: nn.Module | None = None) -> str:
    return summary(rewrite(model or net(), torch.randn(4, 16), options=options).plan)


@pytest.mark.parametrize("kind", ReasonKind)
def test_every_kind_of_reason_says_which_value_it_lacks(kind: ReasonKind) -> None:
    names = {name for _, name, _, _ in Formatter().parse(kind.sentence) if name}
    values = dict.fromkeys(names, 0.25)
    text = sentence(Reason(kind, values))
    assert text
    assert text.count("0.25") + text.count("2.5e-01") == len(names)
    for name in names:
        with pytest.raises(PlanError, match=f"'{name}'"):
            sentence(Reason(kind, dict.fromkeys(names - {name}, 0.25)))


def test_reasons_are_told_in_order_and_by_role_where_a_call_has_several_matmuls() -> None:
    reasons = Reason.of(ReasonKind.LISTED, why="a list"), Reason.of(ReasonKind.LAST_LINEAR, role="forward")
    one, two = {"forward": "bfloat16"}, {"forward": "bfloat16", "gradient of its weight": "bfloat16"}
    row = rewrite(nn.Linear(8, 8), torch.randn(2, 8)).one("linear")
    assert because(replace(row, reasons=reasons, levels=one)) == f"a list; {sentence(reasons[1])}"
    assert because(replace(row, reasons=reasons, levels=two)) == f"a list; forward: {sentence(reasons[1])}"


def test_a_policy_below_16_bits_that_runs_nothing_there_says_why() -> None:
    plan = rewrite(net(), torch.randn(4, 16)).plan
    why = Reason.of(ReasonKind.NO_COPY, role="forward", level="int8")
    rows = [replace(row, levels={"forward": "bfloat16"}, reasons=(*row.reasons, why)) for row in plan.nodes]
    none = replace(plan, meaning="int8", nodes=rows)
    assert summary(none).endswith(f"; below 16 bits: int8, but no matmul runs in it: {sentence(why)}")
    some = [replace(row, levels={"forward": "int8"}) if row.op == "linear" else row for row in rows]
    assert summary(replace(none, nodes=some)).endswith("; below 16 bits: int8")
    # in training the joint graph decides
    assert summary(replace(none, training=True)).endswith("; below 16 bits: int8")


def test_matmuls_are_counted_by_dtype_with_the_casts() -> None:
    plan = rewrite(net(), torch.randn(4, 16)).plan
    assert summary(plan) == f"3 of 3 matmuls in bf16, {len(plan.casts)} casts"
    assert line({"dtype": "float16"}).startswith("3 of 3 matmuls in fp16, ")
    assert summary(Plan()) == "no matmuls, 0 casts"
    assert summary(Plan(fallback="no trace")) == "not rewritten: no trace"


RULED = {"policy": {"rules": [{"module": "head", "precision": "fp32"}]}}


def test_layers_too_small_to_gain_are_named_with_the_device_and_how_to_force_them_or_with_the_rule() -> None:
    said = line({"profile": "auto"})
    assert all(each in said for each in ("3 in fp32", builtin("cpu").name, "{'profile': 'off'}"))
    # and that is the way
    assert line({"profile": "off"}).startswith("3 of 3")
    assert re.match("2 of 3 .* 1 in fp32.*head", line(RULED))


def test_more_bytes_than_under_autocast_have_their_cause() -> None:
    def more(options: dict[str, Any]) -> str:
        return more_bytes([rewrite(net(), torch.randn(4, 16), options=options).plan], 1_050_000, 1_000_000)

    assert re.match(r"5\.0.*3 of 3", more({"profile": "auto"}))
    assert "1 of 3" in more(RULED)
    assert "because" not in more({})
    for ours, theirs in ((1_000_000, 1_000_000), (900_000, 1_000_000), (None, 1_000_000), (1_000_000, None)):
        assert more_bytes([Plan()], ours, theirs) == ""


def test_matmuls_inside_vmap_and_torch_func_are_counted_by_themselves() -> None:
    # a network and the gradient of it by its input, point by point
    model = Parts(
        lambda m, x: (vmap(grad(lambda point: m.net(point).squeeze(-1)))(m.encoder(x)) ** 2).mean(),
        encoder=nn.Linear(16, 16),
        net=nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)),
    )
    options = {"policy": {"rules": [{"module": r"net\.2", "precision": "fp32"}]}}
    plan = rewrite(model, torch.randn(4, 16), options=options).plan
    assert [row.module_path for row in plan.matmuls] == ["encoder"]
    assert [row.module_path for row in plan.untouched_matmuls] == ["net.0", "net.2"]
    where = "inside vmap or torch.func"
    said = f"; 1 {where}: under torch.autocast; 1 {where}: left as written"
    assert summary(plan) == f"1 of 3 matmuls in bf16, {len(plan.casts)} casts{said}"
    assert not plan.unused_rules


@pytest.mark.usefixtures("without_inductor")
def test_each_graph_has_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.compile(net().requires_grad_(False), backend="amp_fx", options={"profile": "off"})
    with caplog.at_level(logging.INFO, "amp_fx.compiler.backend"), record() as recording:
        for _ in range(2):
            model(torch.randn(4, 16))
    (said,) = [row.getMessage() for row in caplog.records if row.name == "amp_fx.compiler.backend"]
    assert said == f"graph 0/0: 3 of 3 matmuls in bf16, {len(recording.plans[0].casts)} casts"


# on a CPU autocast has no rule for a GRU, and it is captured as what it is made of: a product for the sequence, and one
# for each of its four steps
@pytest.mark.parametrize(
    ("kind", "matmuls"), [pytest.param(nn.LSTM, 2, marks=pytest.mark.bf16), (nn.RNN, 2), (nn.GRU, 6)]
)
def test_recurrent_layers_count_as_matmuls(kind: Callable[..., nn.Module], matmuls: int) -> None:
    model = Parts(lambda m, x: m.last(m.cell(x)[0]), cell=kind(16, 16), last=nn.Linear(16, 16))
    with torch._dynamo.config.patch(allow_rnn=True), torch.no_grad():
        plan = rewrite(model, torch.randn(4, 2, 16), options={"weights": "cast"}).plan
    assert summary(plan).startswith(f"{matmuls} of {matmuls} matmuls in bf16, ")
