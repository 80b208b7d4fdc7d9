"""What changed between two reports: nodes in another dtype, casts that came and went."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from amp_fx import Plan
from amp_fx.plans.label import Kind
from amp_fx.plans.plan_files import Change, diff_plans
from graphs import rewrite


def plan(**options: Any) -> Plan:
    torch._dynamo.reset()
    layers = (nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
    return rewrite(nn.Sequential(*layers), torch.randn(4, 8), options=options).plan


@pytest.fixture(scope="module")
def before() -> Plan:
    return plan()


@pytest.fixture(scope="module")
def after() -> Plan:
    return plan(policy={"rules": [{"module": r"1\.0$", "precision": "fp32"}]})


def test_two_runs_of_one_program_do_not_differ(before: Plan) -> None:
    renamed = [replace(row, name=f"other_{row.name}") for row in before.nodes]
    again = plan()
    assert diff_plans([before], [replace(again, nodes=renamed)]).changes == []
    found = diff_plans([before], [again])
    assert not found
    assert str(found).endswith("no difference")


def test_nodes_in_another_dtype_are_named_with_the_reason(before: Plan, after: Plan) -> None:
    found = diff_plans([before], [after])
    assert found
    (linear,) = [row for row in found.changes if row.op == "linear"]
    assert (linear.module_path, linear.before, linear.after) == ("1.0", "bfloat16", "float32")
    assert [reason.kind for reason in linear.reasons] == [Kind.RULE]
    assert "1.0 linear (forward): bfloat16 -> float32" in str(found)


def test_casts_are_counted_on_both_sides(before: Plan, after: Plan) -> None:
    found = diff_plans([before], [after])
    assert found.casts == (len(before.casts), len(after.casts))
    assert found.cast_bytes == tuple(sum(cast.bytes for cast in of.casts) for of in (before, after))
    assert sum(found.added.values()) - sum(found.removed.values()) == len(after.casts) - len(before.casts)
    back = diff_plans([after], [before])
    assert (back.added, back.removed) == (found.removed, found.added)


def test_new_nodes_and_nodes_that_are_gone_are_told(before: Plan) -> None:
    shorter = replace(before, nodes=[row for row in before.nodes if row.module_path != "2.0"])
    (gone,) = diff_plans([before], [shorter]).changes
    assert (gone.module_path, gone.op, gone.before, gone.after) == ("2.0", "linear", "bfloat16", "")
    (new,) = diff_plans([shorter], [before]).changes
    assert str(new) == "2.0 linear (forward): new -> bfloat16"
    assert str(gone).endswith("bfloat16 -> gone")


def test_equal_calls_of_one_module_are_told_apart_by_their_turn(before: Plan) -> None:
    (new,) = diff_plans([before], [replace(before, nodes=[*before.nodes, before.nodes[0]])]).changes
    assert (new.module_path, new.op, new.before) == ("0.0", "linear", "")


def test_forward_and_backward_are_not_confused(before: Plan) -> None:
    found = diff_plans([before], [replace(before, phase="backward")])
    assert {row.phase for row in found.changes} == {"forward", "backward"}
    assert all("" in (row.before, row.after) for row in found.changes)


def test_a_diff_is_json_like(before: Plan, after: Plan) -> None:
    data = diff_plans([before], [after]).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["changes"][0].keys() == Change("", "", "", "", "", ()).__dict__.keys()


def test_long_lists_are_cut_and_say_so(before: Plan) -> None:
    many = Plan(nodes=[replace(before.nodes[0], module_path=f"m{number}") for number in range(30)])
    text = str(diff_plans([], [many]))
    assert "nodes: 30" in text
    assert "... and 22 more" in text
