"""The plan is plain data: it goes to JSON and back, and says for every call and cast what was decided."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_fx import Plan
from amp_fx.policy import OpClass
from graphs import rewrite


class Net(nn.Module):
    """Has a checkpointed block, a named dtype and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + checkpoint(self.block, x, use_reentrant=False)  # pyright: ignore[reportOperatorIssue]
        return F.cross_entropy(self.head(x), tokens)


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch._dynamo.reset()
    return rewrite(
        Net(), torch.randint(16, (6,)), options={"policy": {"rules": [{"op": "gelu", "precision": "low"}]}}
    ).plan


def test_a_plan_among_the_options_of_a_backend_is_printed_in_one_line(plan: Plan) -> None:
    assert len(repr({"plan": plan})) < 300 < len(plan.to_json())


def test_a_real_plan_goes_through_json_unchanged(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_dict(plan.to_dict()) == plan


def test_a_plan_is_json_like_all_the_way_down(plan: Plan) -> None:
    data = plan.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["version"] == 4
    assert data["nodes"][0].keys() >= {"name", "op", "module_path", "op_class", "dtype", "reasons", "source"}
    assert data["casts"][0].keys() == {
        "name", "value", "from_dtype", "to_dtype", "bytes", "users", "inserted", "source", "kernel",
    }  # fmt: skip


def test_a_plan_survives_copying_and_pickling(plan: Plan) -> None:
    assert copy.deepcopy(plan) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


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


def test_the_plan_counts_ops_by_dtype(plan: Plan) -> None:
    table = plan.ops_by_dtype()
    assert table["linear"] == {"bfloat16": 3}
    assert table["cross_entropy_loss"] == {"float32": 1}
    assert table["add.Tensor"] == {"float32": 1}


def test_a_node_is_found_by_its_name(plan: Plan) -> None:
    (head,) = [row for row in plan.nodes if row.module_path == "head"]
    assert plan.node(head.name) is head
    assert (head.op_class, head.dtype, head.traced) == (OpClass.LOW, torch.bfloat16, torch.float32)
    with pytest.raises(KeyError, match="no_such_node"):
        plan.node("no_such_node")


def test_the_policy_is_in_the_form_it_parses(plan: Plan) -> None:
    assert json.loads(plan.policy) == {"base": "autocast", "rules": [{"op": "gelu", "precision": "low"}]}


def test_cast_bytes_are_read_plus_written() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x, w)

    plan = rewrite(program, torch.randn(3, 8), torch.randn(8, 5)).plan
    assert sorted(cast.bytes for cast in plan.casts) == [15 * 6, 24 * 6, 40 * 6]


def test_a_plan_with_an_inserted_cast_has_changed_the_graph(plan: Plan) -> None:
    def nothing_to_do(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)

    assert plan.changed
    assert not rewrite(nothing_to_do, torch.randn(4)).plan.changed
    assert not Plan().changed
