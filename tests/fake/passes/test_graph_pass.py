"""Passes on Inductor's graphs, beside those that the program itself gives to Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import fx
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx._torch import graph_pass

STAGES: tuple[Literal["joint", "post_grad"], ...] = ("joint", "post_grad")


class Given(CustomGraphPass):
    """A pass of the program's own."""

    def __init__(self, ran: list[str], name: str, uuid: str | None = "") -> None:
        self._ran, self._name, self._uuid = ran, name, uuid

    def __call__(self, graph: fx.Graph) -> None:
        self._ran.append(self._name)

    def uuid(self) -> str | None:
        return self._name if self._uuid == "" else self._uuid


def graph() -> fx.Graph:
    return make_fx(torch.sin)(torch.ones(2)).graph


def own(ran: list[str]) -> Callable[[fx.GraphModule], None]:
    return lambda gm: ran.append("ours")


@pytest.mark.parametrize("stage", STAGES)
def test_passes_of_the_program_run_after_ours(stage: Literal["joint", "post_grad"]) -> None:
    ran: list[str] = []
    name = f"{stage}_custom_pre_pass"
    (step,) = graph_pass(stage, "id", own(ran), {name: Given(ran, "option")}).values()
    step(graph())
    with config.patch({name: Given(ran, "configuration")}):
        (step,) = graph_pass(stage, "id", own(ran), {}).values()
    step(graph())
    (step,) = graph_pass(stage, "id", own(ran), {name: [Given(ran, "a"), Given(ran, "b")]}).values()
    step(graph())
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


@pytest.mark.skipif(
    not hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"), reason="torch 2.11 does not have it"
)
def test_a_pass_that_asks_whether_there_is_a_backward_is_told() -> None:
    told: list[bool] = []

    class Aware(custom_graph_pass.CustomInferenceAwareGraphPass):
        def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
            told.append(is_inference)

        def uuid(self) -> str:
            return "aware"

    (step,) = graph_pass("post_grad", "id", own([]), {"post_grad_custom_pre_pass": Aware()}).values()
    assert isinstance(step, custom_graph_pass.CustomInferenceAwareGraphPass)
    step(graph(), is_inference=True)
    assert told == [True]
