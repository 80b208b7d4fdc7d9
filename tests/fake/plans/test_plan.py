"""The plan is plain data: it goes to JSON and back, and says for every call and cast what was decided."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_fx import CastPlan, NodePlan, Plan
from amp_fx.plans.plan import CastSum
from amp_fx.policy import OpClass
from graphs import rewrite
from small_models import Parts


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


def test_a_plan_among_the_options_of_a_backend_is_printed_in_one_line(plan: Plan) -> None:
    assert len(repr({"plan": plan})) < 300 < len(plan.to_json())


def test_a_plan_goes_through_json_copies_and_pickles_unchanged(plan: Plan) -> None:
    data = plan.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["version"] == 4
    assert data["nodes"][0].keys() == {field.name for field in fields(NodePlan)}
    assert data["casts"][0].keys() == {field.name for field in fields(CastPlan)}
    for again in (
        Plan.from_json(plan.to_json()),
        Plan.from_dict(data),
        copy.deepcopy(plan),
        pickle.loads(pickle.dumps(plan)),
    ):
        assert again == plan


def test_bodies_are_in_the_plan_under_their_names(plan: Plan) -> None:
    inner = [row.name for row in plan.nodes if row.op == "linear" and "." in row.name]
    assert len(inner) == 2
    body = inner[0].rpartition(".")[0]
    assert {cast.name.rpartition(".")[0] for cast in plan.casts} == {body, ""}
    assert all(
        name.startswith(f"{body}.")
        for cast in plan.casts
        if cast.name.startswith(body)
        for name in cast.users
    )


def test_a_call_is_found_by_its_name_and_counted_by_its_dtype(plan: Plan) -> None:
    (head,) = [row for row in plan.nodes if row.module_path == "head"]
    assert plan.node(head.name) is head
    assert (head.op_class, head.dtype, head.traced) == (OpClass.LOW, torch.bfloat16, torch.float32)
    with pytest.raises(KeyError, match="no_such_node"):
        plan.node("no_such_node")
    table = plan.ops_by_dtype()
    assert table["linear"] == {"bfloat16": 3}
    assert table["cross_entropy_loss"] == table["add.Tensor"] == {"float32": 1}


def test_the_policy_is_in_the_form_it_parses(plan: Plan) -> None:
    assert json.loads(plan.policy) == {"base": "autocast", "rules": [{"op": "gelu", "precision": "low"}]}


def test_cast_bytes_are_read_plus_written() -> None:
    plan = rewrite(torch.matmul, torch.randn(3, 8), torch.randn(8, 5)).plan
    assert sorted(cast.bytes for cast in plan.casts) == [15 * 6, 24 * 6, 40 * 6]


def test_a_plan_with_an_inserted_cast_has_changed_the_graph(plan: Plan) -> None:
    assert plan.changed
    assert not rewrite(lambda x: x.to(torch.bfloat16), torch.randn(4)).plan.changed
    assert not Plan().changed


@pytest.mark.parametrize(
    ("before", "after", "narrows"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float16, True),
        (torch.bfloat16, torch.float8_e4m3fn, True),
        (torch.float16, torch.float32, False),
    ],
)
def test_a_cast_narrows_unless_its_result_is_wider(
    before: torch.dtype, after: torch.dtype, narrows: bool
) -> None:
    assert CastPlan("cast", "value", before, after, 6, (), True, "").narrows is narrows
    assert CastSum("amp_fx", "forward", "weight", before, after, 1, 6, 0, 0).narrows is narrows


def test_a_module_computes_in_the_dtype_of_its_matmul_else_of_its_last_call(plan: Plan) -> None:
    (matmul,) = [row for row in plan.nodes if row.module_path == "head"]
    after = replace(matmul, name="gelu", op="gelu", op_class=OpClass.FP32, dtype=torch.float32, flops=0)
    assert Plan(nodes=[matmul, after]).module_dtypes == {"head": "bfloat16"}
    assert Plan(nodes=[replace(matmul, flops=0), after]).module_dtypes == {"head": "float32"}
