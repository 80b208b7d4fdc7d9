"""A rule that matches no call is told, once for each graph in the log and in every report of them all."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx import Plan, Report
from amp_fx.precision.plans.reading import unused_rules
from support.checks.whole_program import agree
from support.models.small import Parts
from support.tracing.captured_graphs import rewrite


def net(breaks: bool = False) -> nn.Module:
    """Two linears and a softmax, in one graph or in two."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.encoder(x)
        if breaks:
            torch._dynamo.graph_break()
        return m.head(x).softmax(-1)

    return Parts(forward, encoder=nn.Linear(8, 8), head=nn.Linear(8, 8))


def rules(*given: dict[str, str]) -> dict[str, Any]:
    return {"policy": {"rules": [{"precision": "fp32", **rule} for rule in given]}}


def unused(plan: Plan) -> list[str]:
    return [rule.get("op", "") or rule["module"] for rule in plan.unused_rules]


def test_ops_and_modules_that_are_not_there_are_named() -> None:
    there, elsewhere = ({"op": "softmax"}, {"module": "head"}), {"op": "softmax.int", "module": "encoder"}
    given = rules(*there, elsewhere, {"op": "log_softmax"}, {"module": "decoder"})
    plan = rewrite(net(), torch.randn(2, 8), options=given).plan
    assert unused(plan) == ["softmax.int", "log_softmax", "decoder"]
    assert Plan.from_json(plan.to_json()).unused_rules == plan.unused_rules


def test_a_rule_that_another_one_overrules_has_matched_and_those_of_a_name_are_not_the_users() -> None:
    both = rewrite(net(), torch.randn(2, 8), options=rules({"module": "head"}, {"module": ".*"}))
    named = rewrite(lambda x: x.to(torch.bfloat16), torch.randn(8), options={"policy": "O3"})
    assert unused(both.plan) == unused(named.plan) == []


def test_a_rule_about_what_stays_as_written_is_unused_one_about_calls_inside_of_bodies_is_not() -> None:
    def program(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = x.tanh()
        return x.add_(1)

    given = rules({"op": "tanh"}, {"op": "add_"})
    assert unused(rewrite(program, torch.randn(8), options=given).plan) == ["tanh", "add_"]
    checkpointed = Parts(lambda m, x: checkpoint(m.net, x.exp(), use_reentrant=False), net=net())
    given = rules({"op": "softmax"}, {"op": "exp"}, {"op": "log"})
    plan = rewrite(checkpointed, torch.randn(2, 8), options=given).plan
    assert "wrap_body" in str([row.name for row in plan.nodes])
    assert unused(plan) == ["log"]


def test_a_rule_about_the_implementation_holds_for_operands_that_are_low() -> None:
    query = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16)
    given = {"op": "scaled_dot_product_attention", "precision": "low", "implementation": "products"}
    attention = torch.nn.functional.scaled_dot_product_attention
    assert unused(rewrite(attention, query, query, query, options=rules(given)).plan) == []
    with_softmax = rewrite(lambda x: x.softmax(-1), query, options=rules({"op": "softmax"})).plan
    assert "Did you mean" not in unused_rules([with_softmax])[0]


TWO = rules({"module": "encoder"}, {"module": "head"}, {"module": "decoder"})


def test_a_rule_is_unused_if_it_matches_in_none_of_the_graphs_that_have_it() -> None:
    plans = agree(net(breaks=True), torch.randn(2, 8), options=TWO, fullgraph=False)
    assert [unused(plan) for plan in plans] == [["head", "decoder"], ["encoder", "decoder"]]
    (text,) = unused_rules(plans)
    assert "decoder" in text
    assert "2 graphs" in text
    # graphs with other rules do not hide one
    others = [rules({"module": module}) for module in ("decoder", "head")]
    (text,) = unused_rules([rewrite(net(), torch.randn(2, 8), options=each).plan for each in others])
    assert "decoder" in text
    # one that is left to autocast says nothing about rules
    fallen = Plan(fallback="it cannot be captured", policy="a")
    unused_here = Plan(policy="a", unused_rules=[{"module": "decoder", "precision": "fp32"}])
    assert len(unused_rules([fallen, unused_here])) == 1
    assert unused_rules([fallen]) == []


def test_a_plan_that_is_followed_says_what_its_own_rules_matched() -> None:
    made = rewrite(net(), torch.randn(2, 8), options=rules({"module": "decoder"})).plan
    for own in ({}, rules({"module": "nowhere"})):
        followed = rewrite(net(), torch.randn(2, 8), options={"plan": made, **own}).plan
        assert unused(followed) == ["decoder"]


def test_the_log_names_rule_graph_and_the_nearest_module(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="amp_fx")
    agree(net(), torch.randn(2, 8), options=TWO)
    (record,) = [r for r in caplog.records if "decoder" in r.getMessage()]
    assert record.levelno == logging.WARNING
    for part in ('{"module": "decoder", "precision": "fp32"}', "graph 0/0", "'encoder'"):
        assert part in record.getMessage()
    # a graph that others follow warns of nothing
    caplog.clear()
    agree(net(breaks=True), torch.randn(2, 8), options=rules({"module": "head"}), fullgraph=False)
    said = [r for r in caplog.records if "casts" not in r.getMessage()]
    (record,) = [r for r in said if '{"module": "head"' in r.getMessage()]
    assert record.levelno == logging.INFO


@pytest.mark.slow
def test_reports_and_the_log_of_an_export_name_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report = amp_fx.explain(net(breaks=True), torch.randn(2, 8), options=TWO)
    assert '{"module": "decoder", "precision": "fp32"}' in str(report)
    assert '"module": "head"' not in str(report).partition("unused rules")[2]
    found = [row for row in report.to_dict()["summary"]["advice"] if row["kind"] == "rule"]
    assert len(found) == 1
    for suffix in (".html", ".md", ".json"):
        saved = report.save(tmp_path / f"report{suffix}").read_text(encoding="utf-8")
        assert "decoder" in saved
    assert str(Report.load(tmp_path / "report.json")) == str(report)
    assert json.loads((tmp_path / "report.json").read_text())["plans"][0]["unused_rules"]
    # and so does the log of an export
    caplog.clear()
    amp_fx.export(net(), (torch.randn(2, 8),), **rules({"module": "decoder"}))
    assert "decoder" in caplog.text
