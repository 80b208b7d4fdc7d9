"""Passes on Inductor's graphs: they read of a node what the keys of the caches hold, and run before the program's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx

import amp_fx
import amp_fx.compiler.compiling
from amp_fx._torch import graph_pass
from amp_fx.graphs.keys import CUSTOM, MARK
from amp_fx.passes import Pass, PassContext, PassResult
from amp_fx.passes.base import marked
from support.checks.below_16_bits import MLP, options
from support.tracing.captured_graphs import DEFAULTS


@dataclass(frozen=True)
class Reads(Pass):
    """Does with every call of a graph whatever a test wants."""

    do: Callable[[fx.Node], Any]
    marks: tuple[str, ...] = ()

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        for node in list(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)):
            self.do(node)
        return PassResult("", 1)


def graph() -> tuple[fx.GraphModule, fx.Node]:
    gm = make_fx(torch.sin)(torch.ones(2))
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    node.meta.update(stack_trace="line", nn_module_stack={"x": ("layers.0", nn.Linear)}, recompute=0)
    node.meta[CUSTOM] = {MARK: "sin", "theirs": 1}
    return gm, node


def run_keyed(gm: fx.GraphModule, pipeline: list[Pass]) -> None:
    """As the backend does under the guard that all tests have."""
    amp_fx.compiler.compiling.run_in_order(gm, pipeline, PassContext())


@pytest.mark.parametrize(
    "read",
    [
        lambda node: "layers" in node.meta["nn_module_stack"],
        lambda node: [*node.meta["nn_module_stack"].values()],
        lambda node: node.meta["stack_trace"] == "line",
        lambda node: bool(node.meta["recompute"]),
        lambda node: {node.meta["recompute"]},
        lambda node: f"{node.meta['seq_nr']}",
    ],
)
def test_what_no_key_holds_cannot_be_read(read: Callable[[fx.Node], Any]) -> None:
    gm, node = graph()
    node.meta["seq_nr"] = 3
    before = dict(node.meta)
    with pytest.raises(amp_fx.PassError):
        run_keyed(gm, [Reads(read)])
    assert node.meta == before


def test_what_no_key_holds_is_handed_on() -> None:
    gm, node = graph()

    def copy(old: fx.Node) -> None:
        with gm.graph.inserting_after(old):
            gm.graph.node_copy(old).meta["val"] = old.meta["val"]

    before = dict(node.meta)
    run_keyed(gm, [Reads(copy)])
    assert node.meta == before
    assert node.next.meta == before


def test_a_mark_is_seen_by_who_names_it() -> None:
    gm, node = graph()
    seen: list[str | None] = []
    run_keyed(gm, [Reads(lambda n: seen.append(marked(n)), marks=("cos",))])
    run_keyed(gm, [Reads(lambda n: seen.append(marked(n)), marks=("sin",))])
    assert seen == [None, "sin"]
    assert node.meta[CUSTOM] == {MARK: "sin", "theirs": 1}


def uuids(program: Callable[..., Any], x: Tensor, given: dict[str, Any]) -> set[str]:
    """Of the passes that a program is compiled with."""
    found: list[str] = []

    def compile_with_inductor(gm: fx.GraphModule, inputs: Any, patches: dict[str, Any]) -> Callable[..., Any]:
        found.extend(repr(step.uuid()) for step in patches.values() if hasattr(step, "uuid"))
        return gm.forward

    torch._dynamo.reset()
    with mock.patch.object(amp_fx.compiler.compiling, "compile_with_inductor", compile_with_inductor):
        torch.compile(program, backend="amp_fx", options=given)(x)
    assert found
    return set(found)


def test_what_may_run_in_fp8_is_in_the_key(tmp_path: Path) -> None:
    model, x, given = MLP(32, 64, 64, 16), torch.randn(32, 32), options(tmp_path)
    first = uuids(model, x, given)
    for module in ("layers", "layers.0", "layers.1"):
        rules = {"base": "fp8", "rules": [{"module": module, "precision": "low"}]}
        assert uuids(model, x, {**given, "policy": rules}) != first
    assert uuids(model, x, given) == first


def test_the_size_that_a_choice_was_made_for_is_in_the_key(tmp_path: Path) -> None:
    model = MLP(32, 64, 64, 16)

    def keys(tokens: int) -> set[str]:
        x = torch.randn(tokens, 32)
        torch._dynamo.mark_dynamic(x, 0)
        return uuids(model, x, options(tmp_path))

    assert keys(48) == keys(48) != keys(96)


# the switch restores settings of other devices, too
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_the_setting_of_torch_that_a_pass_reads_is_in_the_key() -> None:
    model, x = nn.Conv2d(3, 8, 3), torch.randn(2, 3, 8, 8)
    before = uuids(model, x, dict(DEFAULTS))
    with torch.backends.mkldnn.flags(enabled=False):
        assert uuids(model, x, dict(DEFAULTS)) != before


# --- beside passes that the program itself gives to Inductor ---


class Given(CustomGraphPass):
    """A pass of the program's own."""

    def __init__(self, ran: list[str], name: str, uuid: str | None = "") -> None:
        self._ran, self._name, self._uuid = ran, name, uuid

    def __call__(self, graph: fx.Graph) -> None:
        self._ran.append(self._name)

    def uuid(self) -> str | None:
        return self._name if self._uuid == "" else self._uuid


def own(ran: list[str]) -> Callable[[fx.GraphModule], None]:
    return lambda gm: ran.append("ours")


@pytest.mark.parametrize("stage", ["joint", "post_grad"])
def test_passes_of_the_program_run_after_ours(stage: Literal["joint", "post_grad"]) -> None:
    ran: list[str] = []
    name = f"{stage}_custom_pre_pass"
    (step,) = graph_pass(stage, "id", own(ran), {name: Given(ran, "option")}).values()
    step(graph()[0].graph)
    with config.patch({name: Given(ran, "configuration")}):
        (step,) = graph_pass(stage, "id", own(ran), {}).values()
    step(graph()[0].graph)
    (step,) = graph_pass(stage, "id", own(ran), {name: [Given(ran, "a"), Given(ran, "b")]}).values()
    step(graph()[0].graph)
    assert ran == ["ours", "option", "ours", "configuration", "ours", "a", "b"]


def test_what_a_program_gives_is_part_of_the_cache_key_and_what_has_no_key_is_not_cached() -> None:
    def uuid(*given: Any) -> object:
        (step,) = graph_pass("joint", "id", own([]), {"joint_custom_pre_pass": list(given)}).values()
        return step.uuid()

    assert uuid() == ("id",)
    assert uuid(Given([], "a")) == ("id", "a")
    assert uuid(Given([], "a")) != uuid(Given([], "b"))
    assert uuid(Given([], "a", None)) is None
    assert uuid(lambda graph: None) is None


@pytest.mark.skipif(not hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"), reason="from torch 2.12")
def test_a_pass_that_asks_whether_there_is_a_backward_is_told() -> None:
    told: list[bool] = []

    class Aware(custom_graph_pass.CustomInferenceAwareGraphPass):
        def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
            told.append(is_inference)

        def uuid(self) -> str:
            return "aware"

    (step,) = graph_pass("post_grad", "id", own([]), {"post_grad_custom_pre_pass": Aware()}).values()
    assert isinstance(step, custom_graph_pass.CustomInferenceAwareGraphPass)
    step(graph()[0].graph, is_inference=True)
    assert told == [True]
