"""What matmuls in fp8 read: copies made once, in the layouts of library kernels, with scales. No code is generated."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from amp_fx.passes import PassContext, PassResult, QuantiseMatmuls
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.policy.levels import NARROW_DTYPES, levels_of
from support.checks.below_16_bits import MLP, Step, calls, emulating_blocks, lies_right, lowered, options
from support.models.small import Parts

aten, prims = torch.ops.aten, torch.ops.prims

#: those whose scales are not of blocks, which no CPU multiplies
LEVELS = {name: level for name, level in levels_of("fp8").items() if level.block is None}

# tests share steps
pytestmark = pytest.mark.xdist_group("quantise")


def conversions(gm: fx.GraphModule) -> list[fx.Node]:
    """Casts to fp8."""
    return [n for n in calls(gm, prims.convert_element_type.default) if n.meta["val"].dtype in NARROW_DTYPES]


def attend(m: Any, x: Tensor) -> Tensor:
    y = m.norm(x)
    return (x + m.o((m.q(y) * m.k(y)).sigmoid() * m.v(y))).float().square().mean()


def attention(folder: Path, level: str, *shape: int) -> Step:
    """A step of three linears that read one value, so that their gradients add up, and one whose input they are."""
    model = Parts(attend, norm=nn.LayerNorm(32), **{name: nn.Linear(32, 32) for name in "qkvo"})
    x = torch.randn(*(shape or (2, 16)), 32, requires_grad=True)
    return lowered(model, [x], options(folder, level))


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Step]:
    """A step in a level; tests share it."""
    folder = tmp_path_factory.mktemp("fp8")

    @functools.cache
    def made(level: str) -> Step:
        torch._dynamo.reset()
        return attention(folder, level)

    return made


@pytest.mark.parametrize("level", LEVELS)
def test_operands_lie_as_library_kernels_want_them(step: Callable[[str], Step], level: str) -> None:
    assert step(level).counts() == (4, 8 if LEVELS[level].weight_gradients else 4)
    for node in itertools.chain(*step(level).scaled()):
        assert lies_right(node, LEVELS[level].by_row)
        scales = [arg.meta["val"] for arg in node.args[2:4]]  # type: ignore[union-attr]  # nodes
        assert all(scale.dtype is torch.float32 and scale.is_contiguous() for scale in scales)


@pytest.mark.parametrize("level", LEVELS)
def test_the_forward_sums_fast_and_the_backward_exactly(step: Callable[[str], Step], level: str) -> None:
    forward, backward = step(level).scaled()
    assert [node.args[7] for node in forward] == [True] * len(forward)
    assert {node.args[4].meta["val"].shape for node in forward} == {(32,)}  # type: ignore[union-attr]  # nodes
    assert [node.args[7] for node in backward] == [False] * len(backward)


@pytest.mark.parametrize(
    ("level", "values"),
    [
        # as rows of the forward, of the gradient of the input, of the gradient of the weight:
        # 2 inputs, 4 weights; 4 gradients, 4 weights; 4 gradients, 2 inputs
        ("rowwise", 6 + 8 + 6),
        # 2 inputs, 4 weights, 4 gradients; 4 weights again, the other way round
        ("tensorwise", 10 + 4),
        ("rowwise_gw_hp", 6 + 8),
    ],
)
def test_a_value_is_converted_once_for_all_that_read_it(
    tmp_path: Path, level: str, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # in the graph of forward and backward together: afterwards the backward may make copies again
    made, call = list[int](), QuantiseMatmuls.call

    def counted(self: QuantiseMatmuls, gm: fx.GraphModule, context: PassContext) -> PassResult:
        result = call(self, gm, context)
        made.append(len(conversions(gm)))
        return result

    monkeypatch.setattr(QuantiseMatmuls, "call", counted)
    matmuls = sum(attention(tmp_path, level).counts())
    assert (made, matmuls) == ([values], 8 if level == "rowwise_gw_hp" else 12)


def test_a_weight_is_read_in_fp32_and_has_no_low_copy(step: Callable[[str], Step]) -> None:
    made = step("rowwise")
    for gm in (made.forward, made.backward):
        casts = calls(gm, prims.convert_element_type.default)
        low = [n for n in casts if n.meta["val"].dtype is torch.bfloat16 and n.args[0].op == "placeholder"]  # type: ignore[union-attr]  # nodes
        assert (32, 32) not in {tuple(n.meta["val"].shape) for n in low}


@pytest.mark.parametrize(
    ("level", "made"),
    [
        # 4 gradients twice, 4 weights, 2 inputs
        ("rowwise", 14),
        # 4 gradients, 4 weights, 2 inputs
        ("tensorwise", 10),
    ],
)
def test_copies_of_weights_for_the_backward_are_made_in_the_backward(
    step: Callable[[str], Step], level: str, made: int
) -> None:
    found = step(level)
    saved = [n for n in found.forward.graph.output_node().all_input_nodes if n.op != "placeholder"]
    assert not [n for n in saved if n.meta["val"].dtype in NARROW_DTYPES and n.meta["val"].shape == (32, 32)]
    assert len(conversions(found.backward)) == made
    # of a weight that is turned, the largest magnitude is not looked for again
    largest = [n for n in calls(found.backward, aten.amax.default) if n.meta["val"].numel() == 1]
    assert len(largest) == (0 if level == "rowwise" else 4)


@pytest.mark.parametrize("level", ["rowwise", "tensorwise"])
def test_the_copy_is_kept_where_the_backward_reads_nothing_else(tmp_path: Path, level: str) -> None:
    chain = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    given = options(tmp_path, level)
    step = lowered(lambda x: chain(x).float().square().mean(), [torch.randn(1024, 64)], given)
    results = [n.meta["val"] for n in step.forward.graph.output_node().all_input_nodes]
    saved = [value.dtype for value in results if value.numel() == 1024 * 64]
    # of the second and third linear. The fourth is in bf16, and what it returns is squared
    assert sum(dtype in NARROW_DTYPES for dtype in saved) == 2
    assert saved.count(torch.bfloat16) == 2


def test_nothing_is_kept_for_the_backward_that_was_not_kept_before(tmp_path: Path) -> None:
    def kept(**given: Any) -> int:
        step = lowered(MLP(64, 256, 256, 64), [torch.randn(512, 64)], options(tmp_path, **given))
        results = step.forward.graph.output_node().all_input_nodes
        return sum(node.meta["val"].nbytes for node in results if node.op != "placeholder")

    assert kept(level="rowwise") <= kept(policy="autocast")


def test_one_token_has_scales_by_row_as_well(tmp_path: Path) -> None:
    step = attention(tmp_path, "rowwise", 1)
    # gradients of weights contract one token
    assert step.counts() == (4, 4)
    assert {node.args[2].meta["val"].shape for node in step.scaled()[0]} == {(1, 1)}  # type: ignore[union-attr]  # nodes


# --- scales of blocks, which no CPU multiplies ---


def emulated(folder: Path, *sizes: int, tokens: int, **settings: Any) -> Step:
    given = options(folder, "mxfp8")
    return lowered(MLP(*sizes), [torch.randn(tokens, sizes[0])], given, emulating_blocks, **settings)


@pytest.mark.parametrize(
    ("sizes", "tokens", "expected"),
    [
        ((32, 64, 96, 16), 64, (2, 3)),
        # tokens are contracted in gradients of weights: 48 is no multiple of 32
        ((32, 64, 64, 32), 48, (2, 1)),
        # the second linear contracts 48, the gradient of its input does not
        ((32, 48, 64, 32), 32, (1, 3)),
        ((32, 64, 48, 32), 32, (2, 2)),
    ],
)
def test_scales_of_blocks_are_bytes_and_what_32_does_not_divide_is_not_contracted(
    tmp_path: Path, sizes: tuple[int, ...], tokens: int, expected: tuple[int, int]
) -> None:
    found = emulated(tmp_path, *sizes, tokens=tokens)
    assert found.plan.meaning == "mxfp8"
    assert found.counts() == expected
    for node in itertools.chain(*found.scaled()):
        kinds = [arg.meta["val"].dtype for arg in node.args[:4]]  # type: ignore[union-attr]  # nodes
        assert kinds == [torch.float8_e4m3fn] * 2 + [torch.float8_e8m0fnu] * 2


def test_a_number_of_tokens_that_is_not_known_has_no_scales_of_blocks(tmp_path: Path) -> None:
    found = emulated(tmp_path, 32, 64, 64, 16, tokens=64, dynamic=True)
    assert found.counts() == (0, 0)
    first = next(row for row in found.plan.nodes if row.flops)
    assert first.is_because(ReasonKind.UNKNOWN_ROWS)
