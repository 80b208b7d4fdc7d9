"""Attention on a CPU as two products around a softmax: ``ChooseAttention`` chooses, ``Attend`` writes."""

from __future__ import annotations

import textwrap
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import amp_fx
from amp_fx.compiler.notices import only_looking
from amp_fx.precision.placement.attention import heads_at_once
from amp_fx.precision.placement.devices import CPUS, cpu_profile
from amp_fx.precision.plans.plan import Plan
from support.tracing.captured_graphs import calls_text, op_by_op

ZEN4, ZEN5, AMX = (
    cpu_profile(next(row for row in CPUS if row.name == name), 2)
    for name in ("avx512_bf16", "avx512_bf16 zen5", "amx_bf16")
)
OP = "scaled_dot_product_attention"
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
PRODUCTS = torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default
SOFTMAX = {getattr(torch.ops.aten, name).default for name in ("amax", "exp", "reciprocal")}
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def by_rule(implementation: str) -> dict[str, Any]:
    return {"rules": [{"op": OP, "precision": "low", "implementation": implementation}]}


def heads(batch: int, count: int, length: int, width: int, scale: float = 1.0) -> Tensor:
    """``[batch, heads, length, width]`` as a projection leaves them: the length before the heads in memory."""
    return (torch.randn(batch, length, count, width) * scale).transpose(1, 2)


def run(
    policy: object, *args: Tensor, plan: Plan | None = None, **how: Any
) -> tuple[list[fx.GraphModule], list[Tensor]]:
    """Graphs after partitioning; the result and the gradients, computed op by op."""
    torch._dynamo.reset()
    leaves = [arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args]

    def program(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **how)
        return out.transpose(1, 2).flatten(2)

    options: dict[str, Any] = {"plan": plan} if plan else {"policy": policy, "profile": "off"}
    with op_by_op() as graphs, only_looking():
        out = torch.compile(program, backend="amp_fx", options={**options, "strict": True})(*leaves)
        if out.requires_grad:
            weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
            (out.float() * weight).sum().backward()
    return graphs, [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def exact(*args: Tensor, **how: Any) -> list[Tensor]:
    leaves = [arg.detach().double() if arg.is_floating_point() else arg for arg in args]
    for leaf, arg in zip(leaves, args, strict=True):
        leaf.requires_grad_(arg.requires_grad)
    mask = leaves[3] if len(leaves) > 3 else None
    out = F.scaled_dot_product_attention(*leaves[:3], attn_mask=mask, **how).transpose(1, 2).flatten(2)
    if out.requires_grad:
        (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)).sum().backward()
    return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def error(values: list[Tensor], wanted: list[Tensor]) -> list[float]:
    pairs = [(value.detach().double(), right.detach()) for value, right in zip(values, wanted, strict=True)]
    return [float((value - right).norm() / right.norm()) for value, right in pairs]


def ops(*graphs: fx.GraphModule) -> set[object]:
    return {node.target for gm in graphs for node in gm.graph.nodes}


@pytest.mark.parametrize(
    ("shape", "keys", "mask", "how"),
    [
        ((2, 4, 40, 32), 40, None, {}),
        ((2, 4, 40, 32), 24, None, {"scale": 0.3}),
        ((1, 4, 40, 32), 40, None, {"is_causal": True}),
        ((1, 4, 40, 32), 24, None, {"is_causal": True}),
        ((2, 4, 40, 32), 40, torch.rand(2, 1, 1, 40) > 0.3, {"scale": -0.2}),
        ((2, 4, 40, 32), 24, torch.rand(2, 1, 40, 24) > 0.3, {}),
        ((2, 4, 40, 32), 40, torch.full((40, 40), float("-inf")).triu(1), {}),
        ((2, 8, 40, 32), 40, None, {"enable_gqa": True}),
    ],
    ids=[
        "plain",
        "cross, scale",
        "causal",
        "causal, cross",
        "padding, scale",
        "boolean mask",
        "added mask",
        "grouped queries",
    ],
)
def test_products_are_as_exact_as_the_flash_kernel(
    shape: tuple[int, int, int, int], keys: int, mask: Tensor | None, how: dict[str, Any]
) -> None:
    batch, count, _, width = shape
    groups = count // 4 if how.get("enable_gqa") else count
    query, key, value = heads(*shape, scale=1.4), *(heads(batch, groups, keys, width, s) for s in (1.4, 1.0))
    args = [arg.requires_grad_() for arg in (query, key, value)] + ([] if mask is None else [mask])
    wanted = exact(*args, **how)
    graphs, ours = run(by_rule("products"), *args, **how)
    _, theirs = run(by_rule("flash"), *args, **how)
    assert torch.ops.aten.bmm.default in ops(*graphs)
    assert not ops(*graphs) & {FLASH, FLASH_BACKWARD}
    for got, flash in zip(error(ours, wanted), error(theirs, wanted), strict=True):
        assert got <= 1.4 * flash


@pytest.mark.parametrize("groups", [4, 1])
def test_a_single_query_takes_products_for_any_number_of_keys(groups: int) -> None:
    query, rest = heads(2, 4, 1, 32, 1.4), [heads(2, groups, 40, 32, scale) for scale in (1.4, 1.0)]
    how: dict[str, Any] = {"enable_gqa": True}
    for value in rest:
        torch._dynamo.mark_dynamic(value, 2)
    mask = torch.rand(2, 1, 1, 40) > 0.3
    torch._dynamo.mark_dynamic(mask, 3)
    with torch.no_grad():
        (graph,), ours = run(by_rule("products"), query, *rest, mask, **how)
        _, theirs = run(by_rule("flash"), query, *rest, mask, **how)
    assert torch.ops.aten.bmm.default in ops(graph)
    assert FLASH not in ops(graph)
    wanted = exact(query, *rest, mask, **how)
    assert error(ours, wanted)[0] <= 1.1 * error(theirs, wanted)[0]


def test_a_row_in_which_all_is_masked_is_zero_as_the_kernel_has_it() -> None:
    args = [heads(1, 2, 8, 16).requires_grad_() for _ in range(3)]
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[3] = False
    _, ours = run(by_rule("products"), *args, mask)
    _, theirs = run(by_rule("flash"), *args, mask)
    assert ours[0][0, 3].eq(0).all()
    for got, flash in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, flash, rtol=3e-2, atol=3e-2)


def test_a_row_that_finite_numbers_hide_counts_all_keys_alike_in_the_backward_too() -> None:
    args = [heads(1, 2, 8, 16).bfloat16().float().requires_grad_() for _ in range(3)]
    mask = torch.zeros(8, 8)
    mask[3] = -1e9
    _, ours = run(by_rule("products"), *args, mask)
    # so large a number leaves no digit of a score in fp32: all keys of that row count alike, as for a query of zeros
    query = args[0].detach().clone()
    query[:, :, 3] = 0
    wanted = exact(query.requires_grad_(), *args[1:])
    assert max(error([ours[3]], [wanted[3]])) < 0.02


def test_a_plan_is_followed_in_what_computes_attention() -> None:
    args = [heads(1, 2, 64, 16).requires_grad_() for _ in range(3)]
    with amp_fx.record() as recording:
        run(by_rule("products"), *args)
    graphs, _ = run({}, *args, plan=recording.plans[0])
    assert FLASH not in ops(*graphs)


def test_a_plan_of_known_sizes_leaves_the_kernel_where_the_batch_is_not_known() -> None:
    args = [heads(4, 2, 64, 16) for _ in range(3)]
    with torch.no_grad(), amp_fx.record() as recording:
        run(by_rule("products"), *args)
    plan = recording.plans[0]
    assert plan.changed
    dynamic = torch._dynamo.config.patch(assume_static_by_default=False)
    with torch.no_grad(), dynamic, amp_fx.record() as recording:
        graphs, _ = run({}, *args, plan=plan)
    assert FLASH in ops(*graphs)
    (row,) = [row for row in recording.plans[0].nodes if row.op == OP]
    assert row.computed_by == "flash"


@pytest.mark.parametrize(
    ("base", "products", "least", "most"),
    [("autocast", 3, 0, 4e-3), ("fast", 2, 4e-3, 8e-3), ("int8", 2, 4e-3, 8e-3)],
)
def test_policies_fast_and_int8_take_scores_from_one_product_in_16_bits_and_the_default_from_two(
    base: str, products: int, least: float, most: float
) -> None:
    args = [heads(1, 2, 64, 64, 2.0) for _ in range(3)]
    with torch.no_grad():
        (graph,), (ours,) = run({"base": base, **by_rule("products")}, *args)
    found = [node for node in graph.graph.nodes if node.target in PRODUCTS]
    assert (len(found), {node.meta["val"].dtype for node in found}) == (products, {torch.bfloat16})
    (wanted,) = exact(*[arg.bfloat16() for arg in args])
    assert least < error([ours], [wanted])[0] < most


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"mask": torch.rand(1, 1, 1, 64) > 0.3}], ids=str)
def test_the_backward_keeps_no_score(how: dict[str, Any]) -> None:
    args = [heads(1, 2, 64, 16).requires_grad_() for _ in range(3)]
    mask = [how.pop("mask")] if "mask" in how else []
    (forward, _), _ = run(by_rule("products"), *args, *mask, **how)
    (results,) = forward.graph.find_nodes(op="output")
    saved = [node for node in results.args[0] if isinstance(node, fx.Node)]
    assert not [node for node in saved if node.meta["val"].numel() >= 2 * 64 * 64]


@pytest.mark.parametrize("heads", [1, 6, 12, 61, 150])
@pytest.mark.parametrize("at_once", [1, 1600, 10_000, 10**7])
def test_blocks_of_heads_are_few_and_nearly_alike(heads: int, at_once: int) -> None:
    size = heads_at_once(heads, 1600, at_once)
    blocks = -(-heads // size)
    assert blocks <= 16
    assert size * 1600 <= max(at_once, 1600, heads * 1600 / 8)
    assert heads - (blocks - 1) * size > size - blocks


@pytest.mark.parametrize(
    ("rows", "stored"), [((2, 1), True), ((2, 4), False)], ids=["shared", "of each head"]
)
def test_a_mask_that_heads_share_is_computed_once_and_read_by_one_kernel(
    rows: tuple[int, int], stored: bool
) -> None:
    args = [heads(2, 4, 40, 16) for _ in range(3)]
    # where torch makes numbers of it
    mask = torch.rand(*rows, 40, 40) > 0.3
    with torch.no_grad():
        (graph,), _ = run(by_rule("products"), *args, mask)
    found = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.where.self)
    (where,) = [node for node in found if node.meta["val"].shape == mask.shape]
    assert ("inductor_realize_to_strides" in where.meta) is stored
    # Inductor fuses a softmax whose parts have one shape
    softmax = [node.meta["val"].ndim for node in graph.graph.nodes if node.target in SOFTMAX]
    assert softmax == [3] * len(SOFTMAX)


def test_a_single_query_is_computed_once_and_not_for_each_key() -> None:
    query, key = heads(1, 4, 1, 64), heads(1, 4, 40, 64)
    with torch.no_grad():
        (graph,), _ = run(by_rule("products"), query, key, key)
    (stored,) = [node for node in graph.graph.nodes if "inductor_realize_to_strides" in node.meta]
    assert stored.meta["val"].shape == query.shape


def test_a_plan_says_how_scores_are_computed() -> None:
    # in bf16, so that it has no casts to insert, and changes nothing else
    args = [heads(1, 2, 64, 64).bfloat16() for _ in range(3)]
    with torch.no_grad(), amp_fx.record() as recording:
        run({"base": "fast", **by_rule("products")}, *args)
    plan = Plan.from_dict(recording.plans[0].to_dict())
    with torch.no_grad():
        (graph,), _ = run({}, *args, plan=plan)
    assert sum(node.target in PRODUCTS for node in graph.graph.nodes) == 2


@pytest.mark.quick_rows("(3, 1, 1, 40)-heads", "None-batch", "(40, 40)-all")
@pytest.mark.parametrize(
    ("at_once", "bmm"),
    [(40 * 40 * 2, 2 * 6), (40 * 40 * 4, 2 * 3), (10**6, 2)],
    ids=["heads", "batch", "all"],
)
@pytest.mark.parametrize("mask", [(3, 4, 40, 40), (3, 1, 1, 40), (1, 4, 40, 40), (40, 40), None], ids=str)
def test_blocks_of_heads_give_what_all_heads_give_at_once(
    at_once: int, bmm: int, mask: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amp_fx.compiler.compiling.SCORES_AT_ONCE", at_once)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    args = [heads(3, 4, 40, 16, 2.0) for _ in range(3)]
    given = [] if mask is None else [torch.rand(mask) > 0.3]
    how: dict[str, Any] = {"is_causal": True} if mask is None else {}
    with torch.no_grad():
        (graph,), ours = run(by_rule("products"), *args, *given, **how)
    assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)) == bmm
    wanted = exact(*[arg.bfloat16() for arg in args], *given, **how)
    assert error(ours, wanted)[0] < 4e-3


def test_what_is_written_for_a_call_without_gradients() -> None:
    args = [heads(1, 2, 8, 16) for _ in range(3)]
    with torch.no_grad():
        (graph,), _ = run(by_rule("products"), *args, is_causal=True)
    text = "\n".join(textwrap.wrap(calls_text(graph).split("bmm", 1)[1], 90))
    expecttest.assert_expected_inline(
        text,
        """\
:bf16, convert:f32, baddbmm:bf16, convert:f32, add.Tensor:f32, iota:torch.int64,
iota:torch.int64, unsqueeze:torch.int64, ge.Tensor:torch.bool, full:f32, where.self:f32,
amax:f32, sub.Tensor:f32, mul.Tensor:f32, exp:f32, sum.dim_IntList:f32, reciprocal:f32,
mul.Tensor:f32, convert:bf16, bmm:bf16, view:bf16, permute:bf16, clone:bf16, view:bf16,
convert:f32""",
    )
