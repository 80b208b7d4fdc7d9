"""Attention in training with dropout, or with a mask that is learned: no kernel of torch's on a CPU takes either."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import amp_fx
from amp_fx.compiler.notices import only_looking
from amp_fx.precision.plans.label import ReasonKind
from support.tracing.captured_graphs import op_by_op

OP = "scaled_dot_product_attention"
PRODUCTS = torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default
#: of a sequence, and width of a head: with the identity for values, the result is the probabilities
LENGTH = 32


class Attention(nn.Module):
    """Attention whose mask, if it has one, is learned where it holds numbers."""

    given: Tensor | None
    learned: nn.Parameter | None

    def __init__(self, mask: Tensor | None = None, **how: Any) -> None:
        super().__init__()
        self.how = how
        self.learned = nn.Parameter(mask) if mask is not None and mask.is_floating_point() else None
        self.register_buffer("given", mask if self.learned is None else None)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = self.given if self.learned is None else self.learned
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **self.how)


def heads(batch: int, count: int, length: int = LENGTH) -> Tensor:
    """``[batch, heads, length, width]`` as a projection leaves them, in values that bf16 has."""
    return torch.randn(batch, length, count, LENGTH).transpose(1, 2).bfloat16().float()


def identity(batch: int, count: int) -> Tensor:
    return torch.eye(LENGTH).expand(batch, count, -1, -1).clone()


def differentiate(module: nn.Module, out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients of operands and of a learned mask."""
    weights = (1.7 * torch.arange(out.numel())).sin().to(out.dtype).reshape(out.shape)
    parameters = list(module.parameters())
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), [*leaves, *parameters])]


def step(module: nn.Module, *operands: Tensor, **options: Any) -> tuple[list[fx.GraphModule], list[Tensor]]:
    """Graphs after partitioning, and :func:`differentiate`, computed op by op."""
    torch._dynamo.reset()
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    with op_by_op() as graphs, only_looking():
        compiled = torch.compile(
            module, backend="amp_fx", options={"profile": "off", "strict": True, **options}
        )
        return graphs, differentiate(module, compiled(*leaves), leaves)


def exact(module: Attention, kept: Tensor, *operands: Tensor) -> list[Tensor]:
    """The same in fp64; ``kept`` are the probabilities that dropout leaves."""
    module = Attention(
        module.given if module.learned is None else module.learned.detach().double(), **module.how
    )
    leaves = [operand.detach().double().requires_grad_() for operand in operands]
    query, key, value = leaves
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = query @ key.mT * module.how.get("scale", 1 / math.sqrt(LENGTH))
    if module.how.get("is_causal"):
        scores = scores.where(torch.ones(LENGTH, LENGTH).tril() > 0, -math.inf)
    scores = scores if module.learned is None else scores + module.learned
    scores = scores if module.given is None else scores.where(module.given, -math.inf)
    largest = scores.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    exp = (scores - largest).exp()
    probabilities = exp / exp.sum(-1, keepdim=True).clamp(min=1e-9)
    dropout = module.how.get("dropout_p", 0.0)
    return differentiate(module, probabilities * kept / (1 - dropout) @ value, leaves)


def errors(values: list[Tensor], wanted: list[Tensor]) -> list[float]:
    pairs = zip(values, wanted, strict=True)
    return [float((value.double() - right).norm() / right.norm()) for value, right in pairs]


def calls(graphs: list[fx.GraphModule], *targets: object) -> list[fx.Node]:
    return [node for gm in graphs for node in gm.graph.nodes if node.target in targets]


def learned(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16().float()


@pytest.mark.parametrize(
    ("mask", "how", "groups"),
    [
        (None, {"dropout_p": 0.25}, 4),
        (None, {"dropout_p": 0.25, "is_causal": True, "scale": -0.3}, 4),
        (None, {"dropout_p": 0.25, "enable_gqa": True}, 2),
        (torch.rand(2, 1, 1, LENGTH) > 0.3, {"dropout_p": 0.25}, 4),
        (learned(1, 4, LENGTH, LENGTH), {"dropout_p": 0.25, "scale": 0.3}, 4),
        (learned(1, 4, LENGTH, LENGTH), {}, 4),
        (learned(2, 1, 1, LENGTH), {}, 4),
        (learned(LENGTH, LENGTH), {"enable_gqa": True}, 2),
    ],
    ids=[
        "dropout",
        "causal",
        "grouped queries",
        "padding",
        "learned and dropout",
        "learned for heads",
        "learned for keys",
        "learned for all",
    ],
)
def test_the_products_are_in_16_bits_and_forward_and_backward_drop_the_same(
    mask: Tensor | None, how: dict[str, Any], groups: int
) -> None:
    module = Attention(mask, **how)
    operands = heads(2, 4), heads(2, groups), identity(2, groups)
    graphs, ours = step(module, *operands)
    found = calls(graphs, *PRODUCTS)
    assert {node.meta["val"].dtype for node in found} == {torch.bfloat16}
    assert len(found) == 3 + 7
    kept = ours[0] != 0
    if "dropout_p" in how:
        seen = kept.sum() / exact(module, torch.ones(()), *operands)[0].ne(0).sum()
        assert float(seen) == pytest.approx(0.75, abs=0.03)
    assert max(errors(ours, exact(module, kept, *operands))) < 6e-3
    if mask is not None and mask.is_floating_point():
        assert ours[-1].shape == mask.shape


def test_a_step_keeps_no_number_of_a_score_and_a_bool_where_it_drops() -> None:
    operands = [heads(2, 4, 2 * LENGTH) for _ in range(3)]
    (forward, _), _ = step(Attention(dropout_p=0.1, is_causal=True), *operands)
    (results,) = forward.graph.find_nodes(op="output")
    kept = [node.meta["val"] for node in results.args[0] if isinstance(node, fx.Node)]
    scores = 2 * 4 * (2 * LENGTH) ** 2
    assert [value.dtype for value in kept if value.numel() >= scores] == [torch.bool]


def test_rows_that_are_masked_whole_are_zeros_with_gradients_of_zeros() -> None:
    mask = torch.rand(LENGTH, LENGTH) > 0.3
    mask[3] = False
    _, ours = step(Attention(mask, dropout_p=0.1), heads(1, 2), heads(1, 2), heads(1, 2))
    assert ours[0][:, :, 3].eq(0).all()
    assert ours[1][:, :, 3].eq(0).all()
    assert all(value.isfinite().all() for value in ours)


def test_all_that_is_dropped_is_zero() -> None:
    _, ours = step(Attention(dropout_p=1.0), heads(1, 2), heads(1, 2), heads(1, 2))
    assert all(value.eq(0).all() for value in ours)


@pytest.mark.parametrize("how", [{"dropout_p": 0.25}, {"dropout_p": 0.25, "is_causal": True}], ids=str)
def test_sizes_may_be_unknown(how: dict[str, Any]) -> None:
    module, operands = Attention(**how), (heads(3, 4), heads(3, 4), identity(3, 4))
    with torch._dynamo.config.patch(assume_static_by_default=False):
        graphs, ours = step(module, *operands)
    assert {node.meta["val"].dtype for node in calls(graphs, *PRODUCTS)} == {torch.bfloat16}
    assert any(
        isinstance(size, torch.SymInt) for node in calls(graphs, *PRODUCTS) for size in node.meta["val"].shape
    )
    assert max(errors(ours, exact(module, ours[0] != 0, *operands))) < 6e-3


@pytest.mark.parametrize(
    "options", [{"numerics": "eager"}, {"dtype": "float16"}], ids=["eager numerics", "float16"]
)
def test_products_stay_as_torch_writes_them(options: dict[str, Any]) -> None:
    graphs, _ = step(Attention(dropout_p=0.1), heads(1, 2), heads(1, 2), heads(1, 2), **options)
    assert {node.meta["val"].dtype for node in calls(graphs, *PRODUCTS)} == {torch.float32}


def test_the_plan_says_why_and_a_rule_leaves_the_call_to_torch() -> None:
    rule = {"op": OP, "precision": "low", "implementation": "flash"}
    for mask, policy, how, kind in (
        (None, "autocast", "products", ReasonKind.DROPOUT),
        (None, "fast", "products_low", ReasonKind.DROPOUT),
        (learned(LENGTH, LENGTH), "autocast", "products", ReasonKind.LEARNED_MASK),
        (None, {"rules": [rule]}, "flash", ReasonKind.RULE),
    ):
        module = Attention(mask, dropout_p=0.1 if mask is None else 0.0)
        with amp_fx.record() as recording:
            step(module, heads(1, 2), heads(1, 2), heads(1, 2), policy=policy)
        (row,) = [row for row in recording.plans[0].nodes if row.op == OP]
        assert (row.computed_by, row.is_because(kind)) == (how, True)


def test_without_gradients_torch_drops() -> None:
    operands = heads(1, 2), heads(1, 2), heads(1, 2)
    torch._dynamo.reset()
    with op_by_op(), only_looking(), torch.no_grad(), amp_fx.record() as recording:
        torch.compile(Attention(dropout_p=0.1), backend="amp_fx", options={"profile": "off", "strict": True})(
            *operands
        )
    (row,) = [row for row in recording.plans[0].nodes if row.op == OP]
    assert (row.computed_by, row.is_because(ReasonKind.DROPOUT)) == ("flash", True)
