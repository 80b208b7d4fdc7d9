"""``ChooseAttention``: attention on a CPU as two products around a softmax, or by the flash kernel, by their times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from amp_fx.passes import PassContext, run_passes
from amp_fx.precision.placement.attention import PAYS, Attention
from amp_fx.precision.placement.devices import CPUS, cpu_profile
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.policy import Policy
from support.tracing.captured_graphs import PIPELINE, captured

ZEN4, ZEN5, AMX = (
    cpu_profile(next(row for row in CPUS if row.name == name), 2)
    for name in ("avx512_bf16", "avx512_bf16 zen5", "amx_bf16")
)
OP = "scaled_dot_product_attention"


def by_rule(implementation: str) -> dict[str, Any]:
    return {"rules": [{"op": OP, "precision": "low", "implementation": implementation}]}


def heads(batch: int, count: int, length: int, width: int, scale: float = 1.0) -> Tensor:
    """``[batch, heads, length, width]`` as a projection leaves them: the length before the heads in memory."""
    return (torch.randn(batch, length, count, width) * scale).transpose(1, 2)


def choice(
    query: Tensor,
    key: Tensor,
    *,
    profile: DeviceProfile | None = ZEN4,
    policy: object = "autocast",
    numerics: str = "compiled",
    device: str = "cpu",
    training: bool = True,
    **how: Any,
) -> tuple[str, dict[ReasonKind, dict[str, Any]]]:
    """What ``ChooseAttention`` has computed one call of attention by, empty where it says nothing; and all reasons."""
    # else sizes of an earlier call make these unknown
    torch._dynamo.reset()
    gm = captured(lambda q, k: F.scaled_dot_product_attention(q, k, k, **how), query, key, device=device)
    plan = run_passes(gm, PIPELINE, PassContext(Policy.parse(policy), numerics, profile, training))
    (row,) = [row for row in plan.nodes if row.op == OP]
    return row.computed_by, {reason.kind: reason.values for reason in row.reasons}


def test_short_sequences_take_two_products_and_long_ones_the_flash_kernel() -> None:
    short, long, middle = heads(8, 12, 64, 32), heads(1, 16, 1024, 64), heads(4, 12, 256, 64)
    for (found, why), how, kind in (
        (choice(short, short), "products", ReasonKind.PRODUCTS),
        (choice(long, long, is_causal=True), "flash", ReasonKind.FLASH),
        (choice(middle, middle, training=False), "flash", ReasonKind.FLASH),
    ):
        assert (found, kind in why) == (how, True)
        assert (why[ReasonKind.PRODUCTS_TAKE]["share"] < PAYS) is (how == "products")


@pytest.mark.parametrize(
    ("query", "how", "why"),
    [
        (heads(2, 4, 1, 32), {}, ReasonKind.QUERY_IN_TRAINING),
        (torch.randn(4, 64, 32), {}, ReasonKind.NO_HEADS),
        (heads(0, 4, 64, 32), {}, ReasonKind.EMPTY),
        (heads(2, 4, 64, 32), {"numerics": "eager"}, ReasonKind.AS_EAGER),
        (heads(2, 4, 64, 32), {}, ReasonKind.NO_RATES),
        (heads(2, 4, 64, 32), {"policy": by_rule("flash")}, ReasonKind.RULE),
    ],
    ids=["one query", "three dimensions", "empty", "eager numerics", "no profile", "a rule"],
)
def test_the_flash_kernel_stays_and_the_plan_says_why(
    query: Tensor, how: dict[str, Any], why: ReasonKind
) -> None:
    key = query if query.ndim == 3 else heads(len(query), 4, 64, 32)
    # without rates everything that may be low is low
    found, reasons = choice(query, key, profile=None, **how)
    assert (found, {ReasonKind.FLASH, why} <= reasons.keys()) == ("flash", True)


def test_a_cpu_whose_flash_kernel_was_not_measured_keeps_it() -> None:
    profile = DeviceProfile("other", "cpu", ZEN4.peak, ZEN4.bandwidth, ZEN4.launch)
    found, reasons = choice(*[heads(8, 12, 64, 32)] * 2, profile=profile)
    assert (found, ReasonKind.NO_FLASH_TIMES in reasons) == ("flash", True)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("queries", [1, 128, 1024])
def test_with_amx_products_are_for_training_with_short_sequences(queries: int, training: bool) -> None:
    query, key = (heads(1, 12, length, 64).bfloat16() for length in (queries, max(queries, 128)))
    found = choice(query, key, profile=AMX, training=training)
    # of the kernel's time, products took 1.5 in inference and 0.47 in a step; with 1,024 queries 3.8 and 1.8
    assert (found[0] == "products") is (queries == 128 and training)


def test_on_a_zen_5_products_are_chosen_for_a_head_of_1024_queries_and_not_of_2048() -> None:
    for length, how in ((1024, "products"), (2048, "flash")):
        assert choice(*[heads(1, 2, length, 64)] * 2, profile=ZEN5, training=False)[0] == how


def test_a_rule_asks_for_products_whatever_they_take_and_nothing_is_said_on_cuda() -> None:
    long = [heads(1, 2, 1024, 64)] * 2
    found, reasons = choice(*long, policy=by_rule("products"))
    assert (found, ReasonKind.RULE in reasons) == ("products", True)
    assert choice(*[torch.randn(2, 4, 64, 32)] * 2, device="cuda", profile=None)[0] == ""


@pytest.mark.parametrize("training", [False, True])
def test_both_take_longer_for_more_of_anything(training: bool) -> None:
    few = Attention(12, 128, 128, 64, training=training)
    for more in ({"heads": 24}, {"queries": 256}, {"keys": 256}, {"width": 128}):
        many = Attention(**{**vars(few), **more})
        assert (many.flash(ZEN4) or 0) > (few.flash(ZEN4) or 0)
        assert many.products(ZEN4) > few.products(ZEN4)


@pytest.mark.parametrize("groups", [4, 1])
def test_a_single_query_takes_products(groups: int) -> None:
    query, key = heads(2, 4, 1, 32).bfloat16(), heads(2, groups, 40, 32).bfloat16()
    assert choice(query, key, training=False, enable_gqa=True)[0] == "products"


def test_training_with_policy_int8_has_scores_as_exact_as_the_default() -> None:
    short = heads(8, 12, 64, 32)
    assert choice(short, short, policy="int8")[0] == "products"
    assert choice(short, short, policy="int8", training=False)[0] == "products_low"
