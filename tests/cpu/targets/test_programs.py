"""Programs compiled for an H100 that is not there, forward and backward: what is fused, the code, and machine code."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_fx.instruments.targets.tracing import TracedGraph
from examples.gpt import GPT, GPTConfig
from support.models import zoo
from support.models.small import Parts
from support.programs.target_code import Code
from support.programs.target_process import (
    MADE,
    OFF,
    facts,
    needs_a_target,
    process,
    quick_ones,
    trace_case,
    traced,
)

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]


def sources(graphs: list[TracedGraph], options: dict[str, Any] = OFF) -> list[Code]:
    return process().call("support.programs.target_code:sources", graphs, options)


def after_linear(program: Callable[[Tensor], Tensor]) -> list[TracedGraph]:
    """A program that is called with the result of a linear."""
    return traced(Parts(lambda m, x: program(m.linear(x)), linear=nn.Linear(8, 8)), torch.randn(4, 8))


@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
def test_what_a_program_makes_is_made_on_the_target() -> None:
    def makes(hidden: Tensor) -> Tensor:
        return torch.cat([make(hidden).flatten() for make in MADE.values()]).sum()

    assert facts(after_linear(makes), OFF).wide == ("gradient",)


def test_a_result_whose_gradient_has_other_strides_is_differentiated() -> None:
    def heads(x: Tensor) -> Tensor:
        """What attention leaves in a cache: the transposed view and, joined with nothing, a copy of it."""
        values = x.view(4, 2, 4).transpose(0, 1)
        return torch.cat([torch.tensor([], dtype=x.dtype, device=x.device), values], dim=-2)

    assert facts(after_linear(heads), OFF).counts.extern_kernels == 2


@torch.library.custom_op("amp_fx_targets::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_custom_op_of_a_module_compiles() -> None:
    with torch.no_grad():
        assert facts(after_linear(doubled), OFF).counts.extern_kernels == 2


@pytest.fixture(scope="module")
def head() -> list[TracedGraph]:
    """A biased Linear whose result is read in fp32 alone."""

    def program(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(m.head(F.gelu(m.body(x))), labels)

    model = Parts(program, body=nn.Linear(64, 64), head=nn.Linear(64, 32))
    return traced(model, torch.randn(128, 64), torch.randint(32, (128,)))


def test_the_backward_runs_in_the_thread_that_asks(head: list[TracedGraph]) -> None:
    # a thread of autograd's own may still free Python objects while the process ends, which aborts it
    assert process().call("support.programs.target_process:threads", head) == ["MainThread", "MainThread"]


def test_weight_gradients_leave_matmuls_in_fp32_and_only_inputs_are_cast(head: list[TracedGraph]) -> None:
    found = facts(head, OFF)
    assert (found.counts.extern_kernels, found.rounded) == (5, 0)
    assert found.wide == ("gradient", "gradient")
    assert set(found.casts) == {"input"}


@pytest.mark.slow
def test_gradients_on_a_residual_stream_are_narrowed_where_they_are_added() -> None:
    # large enough for kernels that reduce a norm's gradient by rows and by columns at once
    tokens, config = torch.randint(64, (8, 1024)), GPTConfig(64, context=1024, layers=1, heads=12, width=768)
    block = traced(GPT(config), tokens, tokens)
    _, backward = sources(block)
    kernels = set(re.findall(r"async_compile\.triton\('(\w+)'", backward.text))
    assert any("_to_copy_add_native_layer_norm" in name for name in kernels)
    assert not [name for name in kernels if re.fullmatch(r"triton_poi_fused__to_copy(_view)?_\d+", name)]


# ---- rules that have the result of a low product in fp32 ----

#: a matmul of low operands that returns fp32
_WIDE_CALL = re.compile(r"extern_kernels\.b?mm_dtype\(|extern_kernels\.b?mm\(.*out_dtype=torch\.float32")


def logits() -> list[TracedGraph]:
    """With a bias and two batch dimensions."""

    def logits_and_loss(m: Any, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        found = m.head(m.up(x))
        return found, F.cross_entropy(found.flatten(0, 1), labels.flatten())

    model = Parts(logits_and_loss, up=nn.Linear(128, 128), head=nn.Linear(128, 256))
    return traced(model, torch.randn(4, 32, 128), torch.randint(256, (4, 32)))


def ruled(precision: str = "low", **more: str) -> dict[str, Any]:
    return {**OFF, "policy": {"rules": [{"module": "head", "precision": precision, **more}]}}


def wide_calls(graphs: list[TracedGraph], options: dict[str, Any]) -> list[int]:
    return [len(_WIDE_CALL.findall(code.text)) for code in sources(graphs, options)]


def test_the_forward_multiplies_low_operands_and_returns_fp32_with_and_without_gradients() -> None:
    # gradients are those of a low product: of the weights in fp32, of the input low
    assert wide_calls(logits(), ruled(result="fp32")) == [1, 2]
    with torch.no_grad():
        assert wide_calls(logits(), ruled(result="fp32")) == [1]


@pytest.mark.slow
def test_a_result_in_fp32_moves_more_than_a_rounded_one_and_less_than_an_fp32_product() -> None:
    graphs = logits()
    low, wide, fp32 = (facts(graphs, given) for given in (ruled(), ruled(result="fp32"), ruled("fp32")))
    assert low.wide == ("gradient", "gradient")
    assert low.counts.bytes_moved < wide.counts.bytes_moved < fp32.counts.bytes_moved
    assert wide.counts.extern_kernels == low.counts.extern_kernels
    assert len(wide.wide) == 3
    assert "activation" not in wide.casts


@pytest.mark.slow
def test_what_a_kernel_reads_of_what_it_has_written_was_written_by_all_threads() -> None:
    # a row of this width is read in loops: the first writes the sum in fp32, the next reads it and writes bf16
    def program(m: Any, tokens: Tensor) -> Tensor:
        return m.linear(m.norm(m.tokens(tokens) + m.positions.weight)).square().mean()

    width = 2048
    parts = {
        "positions": nn.Embedding(32, width),
        "norm": nn.LayerNorm(width),
        "linear": nn.Linear(width, 64),
    }
    codes = sources(
        traced(Parts(program, tokens=nn.Embedding(64, width), **parts), torch.randint(64, (4, 32)))
    )
    read_back = [between for code in codes for between in written_then_read(code.text)]
    assert read_back
    assert all("tl.debug_barrier()" in between for between in read_back)


def written_then_read(text: str) -> list[str]:
    """The lines between each value that a kernel writes and its reading of the same, of all kernels in some code."""
    found = []
    for kernel in re.findall(r"@triton\.jit\ndef triton_.*?'''", text, re.DOTALL):
        for load in re.finditer(r"tl\.load\((\w+) \+", kernel):
            _, write, between = kernel[: load.start()].rpartition(f"tl.store({load[1]} +")
            found += [between] if write else []
    return found


def test_batched_products_return_fp32() -> None:
    args = [torch.randn(4, 64, 64, requires_grad=True) for _ in range(2)]
    given = {**OFF, "policy": {"rules": [{"op": "bmm", "precision": "low", "result": "fp32"}]}}
    assert wide_calls(traced(lambda a, b: torch.bmm(a, b).exp().sum(), *args), given)[0] == 1


# ---- machine code of every kernel ----


def sizes(graphs: list[TracedGraph], *architectures: int) -> list[int]:
    found = process().call("support.programs.target_code:cubins", sources(graphs), architectures)
    assert all(of_kernel.keys() == set(architectures) for of_kernel in found.values())
    return [size for of_kernel in found.values() for size in of_kernel.values()]


@pytest.mark.parametrize("name", quick_ones(("a small net", "gpt2", "resnet"), "a small net"))
def test_kernels_of_a_model_compile_for_hopper_and_of_a_large_one_for_ampere_and_blackwell(name: str) -> None:
    def block(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        """A convolution, a residual add, a norm and a loss: kernels of every kind that amp_fx casts in."""
        x = (x + F.gelu(m.conv(x))).mean((2, 3))
        return F.cross_entropy(m.head(m.norm(x)), labels)

    if name == "a small net":
        layers = {"conv": nn.Conv2d(8, 8, 3, padding=1), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 16)}
        found = sizes(traced(Parts(block, **layers), torch.randn(4, 8, 16, 16), torch.randint(16, (4,))), 90)
    else:
        found = sizes(trace_case(zoo.make(name), "train"), 80, 90, 100)
    assert len(found) >= (6 if name == "a small net" else 3 * 20)
    assert min(found) > 1000
