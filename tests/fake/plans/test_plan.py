"""The plan is plain data: it goes to JSON and back, says for every call and cast what was decided, and is compared."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_fx import CastPlan, NodePlan, Plan, Report, record
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.plans.plan import CastSum
from amp_fx.precision.plans.plan_files import Change, diff_plans
from amp_fx.precision.plans.reading import publish
from amp_fx.precision.policy import OpClass
from support.models.small import Parts
from support.tracing.captured_graphs import rewrite


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Of a model with a checkpointed block, whose graph is a body, and with integers."""
    torch._dynamo.reset()

    def run(m: Any, tokens: Tensor) -> Tensor:
        x = m.embed(tokens)
        x = x + checkpoint(m.block, x, use_reentrant=False)
        return F.cross_entropy(m.head(x), tokens)

    block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    model = Parts(run, embed=nn.Embedding(16, 8), block=block, head=nn.Linear(8, 16))
    rules = [{"op": "gelu", "precision": "low"}]
    return rewrite(model, torch.randint(16, (6,)), options={"policy": {"rules": rules}}).plan


def test_a_plan_goes_through_json_copies_and_pickles_unchanged(plan: Plan) -> None:
    data = plan.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["version"] == 5
    assert data["nodes"][0].keys() == {field.name for field in fields(NodePlan)}
    assert data["casts"][0].keys() == {field.name for field in fields(CastPlan)}
    assert Plan.from_json(plan.to_json()) == Plan.from_dict(data) == plan
    assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == plan
    # the policy is in the form it parses; among the options of a backend a plan is printed in one line
    assert json.loads(plan.policy) == {"base": "autocast", "rules": [{"op": "gelu", "precision": "low"}]}
    assert len(repr({"plan": plan})) < 300 < len(plan.to_json())


def test_bodies_are_in_the_plan_under_their_names(plan: Plan) -> None:
    inner = [row.name for row in plan.nodes if row.op == "linear" and "." in row.name]
    assert len(inner) == 2
    body = inner[0].rpartition(".")[0]
    assert {cast.name.rpartition(".")[0] for cast in plan.casts} == {body, ""}
    users = [name for cast in plan.casts if cast.name.startswith(body) for name in cast.users]
    assert all(name.startswith(f"{body}.") for name in users)


def test_a_call_is_found_by_its_name_and_counted_by_its_dtype(plan: Plan) -> None:
    (head,) = [row for row in plan.nodes if row.module_path == "head"]
    assert plan.node(head.name) is head
    assert (head.op_class, head.dtype, head.traced) == (OpClass.LOW, torch.bfloat16, torch.float32)
    with pytest.raises(KeyError, match="no_such_node"):
        plan.node("no_such_node")
    table = plan.ops_by_dtype()
    assert table["linear"] == {"bfloat16": 3}
    assert table["cross_entropy_loss"] == table["add.Tensor"] == {"float32": 1}


def test_casts_are_counted_in_bytes_read_and_written_and_have_changed_the_graph() -> None:
    plan = rewrite(torch.matmul, torch.randn(3, 8), torch.randn(8, 5)).plan
    assert sorted(cast.bytes for cast in plan.casts) == [15 * 6, 24 * 6, 40 * 6]
    assert plan.changed
    assert not rewrite(lambda x: x.to(torch.bfloat16), torch.randn(4)).plan.changed
    assert not Plan().changed


def test_a_cast_narrows_unless_its_result_is_wider() -> None:
    wide, low, half = torch.float32, torch.bfloat16, torch.float16
    pairs = {(wide, low): True, (low, half): True, (low, torch.float8_e4m3fn): True, (half, wide): False}
    for (before, after), narrows in pairs.items():
        assert CastPlan("cast", "value", before, after, 6, (), True, "").narrows is narrows
        assert CastSum("amp_fx", "forward", "weight", before, after, 1, 6, 0, 0).narrows is narrows


def test_a_module_computes_in_the_dtype_of_its_matmul_else_of_its_last_call(plan: Plan) -> None:
    (matmul,) = [row for row in plan.nodes if row.module_path == "head"]
    after = replace(matmul, name="gelu", op="gelu", op_class=OpClass.FP32, dtype=torch.float32, flops=0)
    assert Plan(nodes=[matmul, after]).module_dtypes == {"head": "bfloat16"}
    assert Plan(nodes=[replace(matmul, flops=0), after]).module_dtypes == {"head": "float32"}


# --- what changed between two ---


def placed(**options: Any) -> Plan:
    torch._dynamo.reset()
    layers = (nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
    return rewrite(nn.Sequential(*layers), torch.randn(4, 8), options=options).plan


@pytest.fixture(scope="module")
def before() -> Plan:
    return placed()


@pytest.fixture(scope="module")
def after() -> Plan:
    return placed(policy={"rules": [{"module": r"1\.0$", "precision": "fp32"}]})


def test_two_runs_of_one_program_do_not_differ(before: Plan) -> None:
    renamed = [replace(row, name=f"other_{row.name}") for row in before.nodes]
    again = placed()
    assert diff_plans([before], [replace(again, nodes=renamed)]).changes == []
    found = diff_plans([before], [again])
    assert not found
    assert str(found).endswith("no difference")


def test_nodes_in_another_dtype_are_named_with_reasons_and_casts_counted(before: Plan, after: Plan) -> None:
    found = diff_plans([before], [after])
    assert found
    (linear,) = [row for row in found.changes if row.op == "linear"]
    assert (linear.module_path, linear.before, linear.after) == ("1.0", "bfloat16", "float32")
    assert [reason.kind for reason in linear.reasons] == [ReasonKind.RULE]
    assert "1.0 linear (forward): bfloat16 -> float32" in str(found)
    data = found.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["changes"][0].keys() == Change("", "", "", "", "", ()).__dict__.keys()
    assert found.casts == (len(before.casts), len(after.casts))
    assert found.cast_bytes == tuple(sum(cast.bytes for cast in of.casts) for of in (before, after))
    assert sum(found.added.values()) - sum(found.removed.values()) == len(after.casts) - len(before.casts)
    back = diff_plans([after], [before])
    assert (back.added, back.removed) == (found.removed, found.added)


def test_new_nodes_and_nodes_that_are_gone_are_told(before: Plan) -> None:
    shorter = replace(before, nodes=[row for row in before.nodes if row.module_path != "2.0"])
    (gone,) = diff_plans([before], [shorter]).changes
    assert str(gone) == "2.0 linear (forward): bfloat16 -> gone"
    (new,) = diff_plans([shorter], [before]).changes
    assert str(new) == "2.0 linear (forward): new -> bfloat16"
    # equal calls of one module are told apart by their turn
    (new,) = diff_plans([before], [replace(before, nodes=[*before.nodes, before.nodes[0]])]).changes
    assert (new.module_path, new.op, new.before) == ("0.0", "linear", "")
    # and forward from backward
    found = diff_plans([before], [replace(before, phase="backward")])
    assert {row.phase for row in found.changes} == {"forward", "backward"}
    assert all("" in (row.before, row.after) for row in found.changes)
    # long lists are cut and say so
    many = Plan(nodes=[replace(before.nodes[0], module_path=f"m{number}") for number in range(30)])
    text = str(diff_plans([], [many]))
    assert "nodes: 30" in text
    assert "... and 22 more" in text


# --- plans are published to whoever records ---


def test_a_recording_holds_the_plans_published_inside_it_and_closes_when_its_block_ends_or_raises() -> None:
    publish(Plan("outside"))
    # what closes is the inner one, although they are equal then
    with record() as outer:
        with record() as inner:
            pass
        publish(Plan("a"))
        with record() as second:
            publish(Plan("b"))
        publish(Plan("c"))
    publish(Plan("d"))
    found = [[plan.graph for plan in each.plans] for each in (outer, inner, second)]
    assert found == [["a", "b", "c"], [], ["b"]]
    assert outer.reports == [Report([plan]) for plan in outer.plans]
    with pytest.raises(ZeroDivisionError), record() as recording:
        raise ZeroDivisionError
    publish(Plan())
    assert recording.plans == []


def test_plans_from_other_threads_are_recorded_while_recordings_open_and_close() -> None:
    counts: list[int] = []

    def publish_many(name: str) -> None:
        for _ in range(50):
            with record() as inner:
                publish(Plan(name))
            counts.append(len(inner.plans))

    with record() as recording, ThreadPoolExecutor(4) as threads:
        list(threads.map(publish_many, "0123"))
    assert Counter(plan.graph for plan in recording.plans) == dict.fromkeys("0123", 50)
    assert len(counts) == 200
    assert min(counts) >= 1
