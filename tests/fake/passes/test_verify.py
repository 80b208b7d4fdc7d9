"""A broken graph is an error at compile time that names node and line; so is a failing pass."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import Tensor, fx, nn

from amp_fx import PassError, VerifyError
from amp_fx.graphs.keys import STEP_META
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.passes import FuseCasts, Pass, PassContext, PassResult, Verify, run_passes
from amp_fx.precision.plans.label import label_of
from support.tracing.captured_graphs import PIPELINE, captured, run_until

aten = torch.ops.aten


def program(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(x, w).exp()  # the line to name


def ready() -> tuple[fx.GraphModule, fx.Node]:
    """A graph that only lacks its verification, and its matmul."""
    gm = run_until(FuseCasts, program, torch.randn(4, 4), torch.randn(4, 4)).gm
    (matmul,) = gm.graph.find_nodes(op="call_function", target=aten.matmul.default)
    return gm, matmul


def refused(gm: fx.GraphModule, *named: str) -> None:
    with pytest.raises(VerifyError) as info:
        Verify().call(gm, PassContext())
    assert all(re.search(each, str(info.value)) for each in named), info.value


def test_a_sound_graph_passes_unchanged() -> None:
    gm, _ = ready()
    before = str(gm.graph)
    Verify().call(gm, PassContext())
    assert str(gm.graph) == before


def test_arguments_whose_dtypes_disagree_are_named() -> None:
    gm, matmul = ready()
    matmul.args = (matmul.args[0], gm.graph.find_nodes(op="placeholder")[1])
    # fake tensors run this; a kernel would not
    refused(gm, r"matmul \(matmul\)", r"torch\.bfloat16", r"l_w_ in torch\.float32", "the line to name")


def test_a_call_that_does_not_run_is_named() -> None:
    gm, matmul = ready()
    (exp,) = gm.graph.find_nodes(op="call_function", target=aten.exp.default)
    exp.target, exp.args = aten.lerp.Scalar, (matmul, gm.graph.find_nodes(op="placeholder")[1], 0.5)
    call = r"aten\.lerp\.Scalar\(matmul: torch\.bfloat16, l_w_: torch\.float32\)"
    refused(gm, call, "the line to name")


def test_metadata_that_lies_is_named() -> None:
    gm, matmul = ready()
    matmul.meta["val"] = matmul.meta["val"].float()
    refused(gm, r"matmul .*torch\.bfloat16.*torch\.float32")


def test_a_call_that_reads_a_step_of_another_dtype_is_named() -> None:
    gm = run_until(FuseCasts, lambda x, w: (x @ w).relu().sin(), torch.randn(4, 4), torch.randn(4, 4)).gm
    (relu,) = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
    with gm.graph.inserting_before(relu):
        step = Rewriter(gm.graph, meta={STEP_META: True}).call(aten.to.dtype, relu.args[0], torch.float16)
    relu.args = (step,)
    refused(gm, r"relu .*torch\.float16.*torch\.float32")


def test_a_dtype_other_than_the_planned_one_is_named() -> None:
    gm, matmul = ready()
    label = label_of(matmul)
    assert label is not None
    label.dtype = torch.float16
    refused(gm, r"matmul .*torch\.float16.*torch\.bfloat16")


def test_an_output_that_is_not_what_dynamo_traced_is_named() -> None:
    gm, matmul = ready()
    gm.graph.output_node().args = ((matmul,),)
    refused(gm, r"matmul .*bfloat16.*float32.*the line to name")


def test_in_a_module_of_torch_that_has_no_line_of_the_users_the_module_is_named() -> None:
    gm = run_until(FuseCasts, nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), torch.randn(4, 4)).gm
    (linear,) = gm.graph.find_nodes(op="call_function", target=aten.linear.default)
    linear.meta["val"] = linear.meta["val"].float()
    refused(gm, "module 1")


@dataclasses.dataclass(frozen=True)
class Broken(Pass):
    """Fails as a bug would."""

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """Fails."""
        raise ZeroDivisionError("by accident")


@dataclasses.dataclass(frozen=True)
class Tangle(Pass):
    """Leaves a graph that does not lint."""

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """Uses a value before it is made."""
        first, *_ = gm.graph.find_nodes(op="call_function", target=aten.matmul.default)
        (last,) = gm.graph.find_nodes(op="call_function", target=aten.exp.default)
        first.args = (last, last)
        return PassResult("tangled", 1)


def test_the_runner_names_the_failing_pass_and_those_before_it() -> None:
    gm = captured(program, torch.randn(4, 4), torch.randn(4, 4))
    pipeline = (*PIPELINE[:2], Broken())
    with pytest.raises(PassError, match=r"'broken'.*\['pin-dtypes', 'classify'\].*by accident") as info:
        run_passes(gm, pipeline, PassContext())
    assert isinstance(info.value.__cause__, ZeroDivisionError)


def test_the_runner_lints_what_a_pass_has_changed() -> None:
    gm = captured(program, torch.randn(4, 4), torch.randn(4, 4))
    with pytest.raises(PassError, match="'tangle'"):
        run_passes(gm, (Tangle(),), PassContext())
