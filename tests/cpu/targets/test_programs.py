"""Programs compiled for an H100 that is not there, forward and backward, as far as Inductor's fusion."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_fx.targets.tracing import TracedGraph
from examples.gpt import GPT, GPTConfig
from small_models import Parts
from targets import MADE, OFF, Facts, needs_a_target, process, traced

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]


def compiled(graphs: list[TracedGraph], options: dict[str, Any] | None) -> Facts:
    return process().call("targets:compiled", graphs, options)


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
def test_what_a_program_makes_is_made_on_the_target() -> None:
    def makes(m: Any, x: Tensor) -> Tensor:
        hidden = m.linear(x)
        return torch.cat([make(hidden).flatten() for make in MADE.values()]).sum()

    model = Parts(makes, linear=nn.Linear(8, 8))
    assert compiled(traced(model, torch.randn(4, 8)), OFF).wide == ("gradient",)


def test_a_result_whose_gradient_has_other_strides_is_differentiated() -> None:
    def heads(m: Any, x: Tensor) -> Tensor:
        """What attention leaves in a cache: the transposed view and, joined with nothing, a copy of it."""
        values = m.linear(x).view(4, 2, 4).transpose(0, 1)
        return torch.cat([torch.tensor([], dtype=x.dtype, device=x.device), values], dim=-2)

    model = Parts(heads, linear=nn.Linear(8, 8))
    assert compiled(traced(model, torch.randn(4, 8)), OFF).counts.extern_kernels == 2


@torch.library.custom_op("amp_fx_targets::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_custom_op_of_a_module_compiles() -> None:
    with torch.no_grad():
        graphs = traced(Parts(lambda m, x: doubled(m.linear(x)), linear=nn.Linear(8, 8)), torch.randn(4, 8))
    assert compiled(graphs, OFF).counts.extern_kernels == 2


@pytest.fixture(scope="module")
def head() -> list[TracedGraph]:
    """A biased Linear whose result is read in fp32 alone."""

    def program(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(m.head(F.gelu(m.body(x))), labels)

    model = Parts(program, body=nn.Linear(64, 64), head=nn.Linear(64, 32))
    return traced(model, torch.randn(128, 64), torch.randint(32, (128,)))


def test_the_backward_runs_in_the_thread_that_asks(head: list[TracedGraph]) -> None:
    # a thread of autograd's own may still free Python objects while the process ends, which aborts it
    assert process().call("targets:threads", head) == ["MainThread", "MainThread"]


def test_weight_gradients_leave_matmuls_in_fp32_and_no_kernel_only_casts_an_activation(
    head: list[TracedGraph],
) -> None:
    facts = compiled(head, OFF)
    assert facts.counts.extern_kernels == 5
    assert facts.wide == ("gradient", "gradient")
    assert facts.rounded == 0
    assert set(facts.casts) == {"input"}


def test_autocast_rounds_them_and_widens_them_again(head: list[TracedGraph]) -> None:
    facts = compiled(head, None)
    assert facts.wide == ()
    assert facts.rounded == 2


def test_gradients_on_a_residual_stream_are_narrowed_where_they_are_added() -> None:
    # large enough for kernels that reduce a norm's gradient by rows and by columns at once
    tokens, config = torch.randint(64, (8, 1024)), GPTConfig(64, context=1024, layers=1, heads=12, width=768)
    block = traced(GPT(config), tokens, tokens)
    _, backward = process().call("generated:sources", block, OFF)
    kernels = set(re.findall(r"async_compile\.triton\('(\w+)'", backward.text))
    assert any("_to_copy_add_native_layer_norm" in name for name in kernels)
    assert not [name for name in kernels if re.fullmatch(r"triton_poi_fused__to_copy(_view)?_\d+", name)]
