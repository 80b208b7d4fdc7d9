"""What changed between two reports: nodes in another dtype, casts that came and went."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from amp_fx import Plan, Report
from amp_fx.plans.diff import Change
from amp_fx.plans.label import Kind
from graphs import rewrite
from small_models import Parts


def plan(**options: Any) -> Plan:
    model = Parts(lambda m, x: m.layers(x), layers=nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
    return rewrite(model, torch.randn(4, 8), options=options).plan


@pytest.fixture(scope="module")
def before() -> Plan:
    torch._dynamo.reset()
    return plan()


@pytest.fixture(scope="module")
def after() -> Plan:
    torch._dynamo.reset()
    return plan(policy={"rules": [{"module": r"layers\.1$", "precision": "fp32"}]})


def test_two_runs_of_one_program_do_not_differ(before: Plan) -> None:
    renamed = [replace(row, name=f"other_{row.name}") for row in before.nodes]
    again = plan()
    found = Report([before]).diff(Report([replace(again, nodes=renamed)]))
    assert found.changes == []
    assert not Report([before]).diff(Report([again]))
    assert str(Report([before]).diff(Report([again]))).endswith("no difference")


def test_nodes_in_another_dtype_are_named_with_the_reason(before: Plan, after: Plan) -> None:
    found = Report([before]).diff(Report([after]))
    assert found
    assert {(row.module_path, row.op, row.before, row.after) for row in found.changes} >= {
        ("layers.1", "linear", "bfloat16", "float32")
    }
    linear = next(row for row in found.changes if row.op == "linear")
    assert [reason.kind for reason in linear.reasons] == [Kind.RULE]
    assert "layers.1 linear (forward): bfloat16 -> float32" in str(found)
    assert all(row.module_path != "layers.0" or row.op != "linear" for row in found.changes)


def test_casts_are_counted_on_both_sides(before: Plan, after: Plan) -> None:
    found = Report([before]).diff(Report([after]))
    assert found.casts == (len(before.casts), len(after.casts))
    assert found.cast_bytes == tuple(sum(cast.bytes for cast in of.casts) for of in (before, after))
    assert sum(found.added.values()) - sum(found.removed.values()) == len(after.casts) - len(before.casts)
    back = Report([after]).diff(Report([before]))
    assert (back.added, back.removed) == (found.removed, found.added)


def test_new_nodes_and_nodes_that_are_gone_are_told(before: Plan) -> None:
    shorter = replace(before, nodes=[row for row in before.nodes if row.module_path != "layers.2"])
    (gone,) = Report([before]).diff(Report([shorter])).changes
    assert (gone.module_path, gone.op, gone.before, gone.after) == ("layers.2", "linear", "bfloat16", "")
    (new,) = Report([shorter]).diff(Report([before])).changes
    assert str(new) == "layers.2 linear (forward): new -> bfloat16"
    assert str(gone).endswith("bfloat16 -> gone")


def test_forward_and_backward_are_not_confused(before: Plan) -> None:
    found = Report([before]).diff(Report([replace(before, phase="backward")]))
    assert {row.phase for row in found.changes} == {"forward", "backward"}
    assert all("" in (row.before, row.after) for row in found.changes)


def test_a_diff_is_json_like(before: Plan, after: Plan) -> None:
    data = Report([before]).diff(Report([after])).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["changes"][0].keys() == Change("", "", "", "", "", ()).__dict__.keys()


def test_long_lists_are_cut_and_say_so() -> None:
    row = rewrite(nn.Linear(8, 8), torch.randn(2, 8)).plan.nodes[0]
    many = Plan(nodes=[replace(row, module_path=f"m{number}") for number in range(30)])
    text = str(Report().diff(Report([many])))
    assert "nodes: 30" in text
    assert "... and 22 more" in text
