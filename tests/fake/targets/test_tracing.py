"""Targets by name, and graphs that Dynamo traced on the CPU become data, and graphs for another device."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from amp_fx.errors import TargetError
from amp_fx.instruments.targets import TARGETS, find_target
from amp_fx.instruments.targets.tracing import Tracer, move
from amp_fx.precision.placement.gpus import GPUS, LIMITS
from amp_fx.precision.placement.profile import DeviceProfile
from support.models.small import Parts
from support.programs.target_process import MADE, traced

CUDA = torch.device("cuda", 0)


def values(gm: fx.GraphModule) -> list[Any]:
    return [node.meta["example_value"] for node in gm.graph.nodes if "example_value" in node.meta]


def devices(gm: fx.GraphModule) -> set[str]:
    graphs = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    return {v.device.type for graph in graphs for v in values(graph) if isinstance(v, Tensor)}


def local() -> nn.Module:
    """Makes tensors in every way that names a device, or none."""

    def program(m: Any, x: Tensor) -> Tensor:
        mask = torch.ones(8, 8).tril() + torch.zeros(8, device="cpu") + torch.full((8,), 2.0, device=x.device)
        return m.linear(x) @ mask.to(torch.device("cpu")) + torch.arange(8) * torch.tensor(2.0).to("cpu")

    return Parts(program, linear=nn.Linear(8, 8))


def test_everything_of_a_graph_moves() -> None:
    (graph,) = traced(local(), torch.randn(4, 8))
    moved = move(graph.gm, CUDA)
    assert devices(graph.gm) == {"cpu"}
    assert devices(moved) == {"cuda"}
    assert "cpu" in str(graph.gm.graph)
    assert "cpu" not in str(moved.graph)


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
@pytest.mark.parametrize("kind", MADE)
def test_what_a_program_makes_is_made_on_the_target(kind: str) -> None:
    (graph,) = traced(MADE[kind], torch.randn(4, 8))
    moved = move(graph.gm, CUDA)
    assert devices(moved) == {"cuda"}
    before, after = values(graph.gm)[-1], values(moved)[-1]
    assert (after.shape, after.dtype) == (before.shape, before.dtype)
    # values are made on the host, and copied
    assert not any(node.target in (torch.tensor, torch.as_tensor, "new_tensor") for node in moved.graph.nodes)


def test_a_copy_of_a_tensor_is_a_copy_on_the_target() -> None:
    (graph,) = traced(lambda x: x.new_tensor(2.0) + torch.as_tensor(x * 2), torch.randn(4, 8))
    (copy,) = [node for node in move(graph.gm, CUDA).graph.nodes if node.target is torch.as_tensor]
    assert copy.all_input_nodes


def test_inputs_know_their_names_and_whether_they_are_parameters_and_require_gradients() -> None:
    model = Parts(lambda m, x: m.linear(x), linear=nn.Linear(8, 8))
    model.get_parameter("linear.bias").requires_grad_(False)
    (graph,) = traced(model, torch.randn(4, 8, requires_grad=True))
    moved = move(pickle.loads(pickle.dumps(graph)).gm, CUDA)
    inputs = moved.graph.find_nodes(op="placeholder")
    found = [node.meta["example_value"] for node in inputs]
    kinds = [(isinstance(value, nn.Parameter), value.requires_grad) for value in found]
    assert kinds == [(True, True), (True, False), (False, True)]
    names = [str(node._dynamo_source.name) for node in inputs]  # type: ignore[attr-defined]  # Dynamo's
    assert sum("linear" in name and "weight" in name for name in names) == 1


def test_bodies_of_checkpoints_move_with_the_graph() -> None:
    layer = nn.Linear(8, 8)

    def program(x: Tensor) -> Any:
        return checkpoint(lambda y: layer(y) + torch.ones(8), x, use_reentrant=False)

    (graph,) = traced(program, torch.randn(4, 8, requires_grad=True))
    copy = pickle.loads(pickle.dumps(graph))
    assert any(isinstance(child, fx.GraphModule) for child in copy.gm.children())
    assert devices(move(copy.gm, CUDA)) == {"cuda"}


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_survives_the_way_to_another_process(dynamic: bool) -> None:
    model = Parts(lambda m, x: m.linear(x).flatten()[: x.shape[0]] * x.shape[0], linear=nn.Linear(8, 8))
    (graph,) = traced(model, torch.randn(4, 8), dynamic=dynamic)
    copy = pickle.loads(pickle.dumps(graph))
    assert str(copy.gm.graph) == str(graph.gm.graph)
    assert [copy.name, copy.grad, copy.autocast] == [graph.name, True, None]
    sizes = {type(size) for v in values(move(copy.gm, CUDA)) if isinstance(v, Tensor) for size in v.shape}
    assert (torch.SymInt in sizes) is dynamic
    with_stack = next(node for node in copy.gm.graph.nodes if node.meta.get("nn_module_stack"))
    assert with_stack.meta["stack_trace"]


def test_what_is_ambient_while_dynamo_traces_belongs_to_the_graph() -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        (graph,) = traced(nn.Linear(8, 8), torch.randn(4, 8))
    assert (graph.grad, graph.autocast) == (False, torch.bfloat16)


def test_a_program_runs_as_it_is_while_it_is_traced() -> None:
    def program(x: Tensor) -> Tensor:
        y = x + 1
        # a graph break, and a decision by a value
        return y * 2 if y.sum().item() > 0 else y * 3

    tracer = Tracer()
    result = torch.compile(program, backend=tracer)(torch.ones(3))
    assert result.tolist() == [4.0] * 3
    assert len(tracer.graphs) == 2
    assert "item" in tracer.graphs[0].graph_break


# ---- targets by name, and the numbers behind them ----


@pytest.mark.parametrize("name", ["a100", "b200", "h100", "h200", "l4", "rtx4090"])
def test_the_common_cards_are_targets(name: str) -> None:
    target = find_target(f"cuda:{name}")
    assert target is TARGETS[f"cuda:{name}"] is find_target(f"CUDA:{name.upper()}")
    assert DeviceProfile.from_dict(json.loads(target.profile.to_json())) == target.profile
    assert pickle.loads(pickle.dumps(target)) == target


def test_every_card_that_triton_compiles_for_is_a_target() -> None:
    assert {target.gpu for target in TARGETS.values()} == {g for g in GPUS if g.capability >= (8, 0)}
    assert all(limits.block_shared < limits.shared for limits in LIMITS.values())


def test_two_cards_of_one_architecture_have_rates_of_their_own() -> None:
    h100, h200 = find_target("cuda:h100"), find_target("cuda:h200")
    assert h100.architecture == h200.architecture == "sm_90"
    assert h100.profile.bandwidth < h200.profile.bandwidth


NEAREST = {"cuda:h10": "h100", "h100": "h100", "L4": "l4", "RTX4090": "rtx4090", "cuda:a10": "a100"}


@pytest.mark.parametrize(("wrong", "right"), NEAREST.items())
def test_an_unknown_target_names_the_nearest_one(wrong: str, right: str) -> None:
    with pytest.raises(TargetError, match=f"'{wrong}'.*'cuda:{right}'"):
        find_target(wrong)
