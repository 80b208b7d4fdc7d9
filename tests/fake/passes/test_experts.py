"""Products of experts, ``F.grouped_mm`` and transformers' own op: traced in fp32, run low, gradients too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import TorchRuntimeError
from torch.utils.flop_counter import FlopCounterMode

import amp_fx
from amp_fx.precision.plans.label import ReasonKind
from support.models.small import Mixture
from support.programs.target_process import quick_ones
from support.tracing.captured_graphs import DEFAULTS, autocast_in

pytestmark = pytest.mark.usefixtures("without_inductor")

#: the second expert has no rows
ENDS = torch.tensor([5, 5, 16, 24], dtype=torch.int32)

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
#: shapes of two factors that meet by rows, by batches, by columns, and by what is contracted
FORMS: dict[str, Shapes] = {
    "rows of tokens": ((24, 16), (4, 16, 32)),
    "one row": ((24, 8), (4, 8, 8)),
    "batches": ((4, 24, 16), (4, 16, 32)),
    "columns": ((4, 16, 8), (8, 24)),
    "sums": ((16, 24), (24, 32)),
}
CALLS: dict[str, Callable[..., Tensor]] = {
    "grouped_mm": lambda a, b, ends: F.grouped_mm(a, b, offs=ends),
    "_grouped_mm": lambda a, b, ends: torch._grouped_mm(a, b, ends),  # pyright: ignore[reportPrivateImportUsage]
    "aten": lambda a, b, ends: torch.ops.aten._grouped_mm.default(a, b, ends),
    "transposed weights": lambda a, b, ends: F.grouped_mm(a, b.mT.contiguous().mT, offs=ends),
    "transposed twice": lambda a, b, ends: F.grouped_mm(
        a.mT.contiguous().mT, b.mT.contiguous().mT, offs=ends
    ),
}


def one_by_one(a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
    """The same by products that autocast lists."""
    if ends is None:
        return a @ b
    pairs = list(zip([0, *ends.tolist()], ends.tolist(), strict=False))
    if a.ndim == b.ndim:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in pairs])
    if a.ndim == 2:
        return torch.cat([a[i:j] @ b[n] for n, (i, j) in enumerate(pairs)])
    return torch.cat([a[n] @ b[:, i:j] for n, (i, j) in enumerate(pairs)], 1)


def results(program: Callable[..., Tensor], *factors: Tensor, ends: Tensor | None) -> list[Tensor]:
    """The product and the gradient of each factor."""
    leaves = [factor.detach().clone().requires_grad_() for factor in factors]
    result = program(*leaves, ends)
    result.sin().sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    assert len(found) == len(exact)
    assert all(value.any() for value in found)
    return [
        ((each.double() - right).norm() / right.norm()).item()
        for each, right in zip(found, exact, strict=True)
    ]


def compared(
    program: Callable[..., Tensor], shapes: Shapes, options: dict[str, Any], low: torch.dtype | None
) -> tuple[list[float], list[float], amp_fx.Plan]:
    """The errors of a compiled product and its gradients, of products one by one, and the plan."""
    torch.manual_seed(0)
    factors = [torch.randn(shape) for shape in shapes]
    ends = None if all(len(shape) == 3 for shape in shapes) else ENDS
    exact = results(one_by_one, *(factor.double() for factor in factors), ends=ends)
    with autocast_in(low):
        beside = results(one_by_one, *factors, ends=ends)
    compiled = torch.compile(program, backend="amp_fx", options={**DEFAULTS, **options}, fullgraph=True)
    with amp_fx.record() as recording:
        found = results(compiled, *factors, ends=ends)
    assert {value.dtype for value in found} == {torch.float32}
    (plan,) = recording.plans
    return errors(found, exact), errors(beside, exact), plan


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", CALLS)
def test_a_product_of_experts_runs_low_as_accurately_as_its_products_one_by_one(call: str, form: str) -> None:
    ours, theirs, plan = compared(CALLS[call], FORMS[form], {}, torch.bfloat16)
    assert [row.dtype for row in plan.matmuls] == [torch.bfloat16]
    assert all(our <= 1.05 * their for our, their in zip(ours, theirs, strict=True)), (ours, theirs)


def test_in_fp16_they_run_low_as_well() -> None:
    ours, theirs, plan = compared(
        CALLS["grouped_mm"], FORMS["rows of tokens"], {"dtype": "float16"}, torch.float16
    )
    assert [row.dtype for row in plan.matmuls] == [torch.float16]
    assert max(ours) <= 1.05 * max(theirs)


@pytest.mark.parametrize("form", FORMS)
def test_a_rule_or_a_named_dtype_keeps_them_in_fp32(form: str) -> None:
    options = {"policy": {"rules": [{"op": "_grouped_mm", "precision": "fp32"}]}}
    named: Callable[..., Tensor] = lambda a, b, ends: F.grouped_mm(a, b, offs=ends, out_dtype=a.dtype)  # noqa: E731
    for ours, _, plan in (
        compared(CALLS["grouped_mm"], FORMS[form], options, None),
        compared(named, FORMS[form], {}, None),
    ):
        assert [row.dtype for row in plan.matmuls] == [torch.float32]
        assert max(ours) < 1e-6


@pytest.mark.parametrize(
    ("shapes", "call"),
    [
        (((24, 12), (4, 12, 16)), "grouped_mm"),
        (((24, 16), (4, 16, 12)), "grouped_mm"),
        (((24, 20), (4, 20, 28)), "grouped_mm"),
        # its forward would run in bf16, its gradient would not
        (((24, 16), (4, 16, 12)), "transposed weights"),
        (((4, 24, 4), (4, 4, 8)), "grouped_mm"),
        (((16, 24), (24, 36)), "grouped_mm"),
    ],
)
def test_rows_that_16_bits_cannot_align_stay_in_fp32(shapes: Shapes, call: str) -> None:
    for options in ({}, {"policy": {"rules": [{"op": "_grouped_mm", "precision": "low"}]}}):
        ours, _, plan = compared(CALLS[call], shapes, options, None)
        (row,) = plan.matmuls
        assert (row.dtype, row.is_because(ReasonKind.NO_KERNEL)) == (torch.float32, True)
        assert max(ours) < 1e-6


def test_a_frame_of_another_backend_still_meets_torchs_refusal() -> None:
    program, given = CALLS["grouped_mm"], (torch.randn(24, 16), torch.randn(4, 16, 32), ENDS)
    assert torch.compile(program, backend="amp_fx", options={**DEFAULTS})(*given).dtype is torch.float32
    for backend in ("eager", lambda gm, _: gm.forward):
        with pytest.raises(TorchRuntimeError, match="BF16"):
            torch.compile(program, backend=backend)(*given)
    assert (
        torch.compile(program, backend="amp_fx", options={**DEFAULTS}, dynamic=True)(*given).dtype
        is torch.float32
    )


def test_what_the_kernel_refuses_is_refused_while_dynamo_traces() -> None:
    for shapes in (((24, 10), (4, 10, 16)), ((24, 16), (4, 16, 10))):
        given = (*map(torch.randn, shapes), ENDS)
        with pytest.raises(TorchRuntimeError):
            torch.compile(CALLS["grouped_mm"], backend="amp_fx", options={**DEFAULTS})(*given)


@pytest.mark.parametrize("form", FORMS)
def test_operations_are_those_of_its_products_one_by_one(form: str) -> None:
    _, _, plan = compared(CALLS["grouped_mm"], FORMS[form], {}, None)
    ends = None if form == "batches" else ENDS
    with FlopCounterMode(display=False) as counter:
        one_by_one(*map(torch.randn, FORMS[form]), ends)  # type: ignore[arg-type]
    assert [row.flops for row in plan.matmuls] == [counter.get_total_flops()]


# ---- models ----


def mixture() -> tuple[Mixture, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Mixture(), (torch.randn(24, 16), ENDS)


def test_copies_of_their_weights_are_kept_and_follow_them() -> None:
    model, given = mixture()
    with torch.inference_mode(), amp_fx.record() as recording:
        compiled = torch.compile(model, backend="amp_fx", options={**DEFAULTS})
        before = compiled(*given)
        model.up.mul_(2)
        after, exact = compiled(*given), model(*given)
    (plan,) = recording.plans
    assert sum(bool(each.copy_of) for each in plan.inputs) == 4
    assert not torch.equal(before, after)
    assert errors([after], [exact.double()])[0] < 0.01


def test_any_number_of_tokens_is_one_graph() -> None:
    model, (x, ends) = mixture()
    compiled = torch.compile(model, backend="amp_fx", options={**DEFAULTS}, dynamic=True)
    with amp_fx.record() as recording:
        for tokens in (24, 17, 40):
            given = x.repeat(2, 1)[:tokens], ends.clamp(max=tokens)
            found = compiled(given[0], given[1].index_fill(0, torch.tensor([3]), tokens))
            exact = model(given[0], given[1].index_fill(0, torch.tensor([3]), tokens))
            assert errors([found.detach()], [exact.detach().double()])[0] < 0.01
    assert len(recording.plans) == 1


def test_a_mixture_is_exported_and_calibrated() -> None:
    model, given = mixture()
    program = amp_fx.export(model, given)
    dtypes = [n.meta["val"].dtype for n in program.graph.nodes if "_grouped_mm" in str(n.target)]
    assert dtypes == [torch.bfloat16] * 2
    assert errors([program.module()(*given).detach()], [model(*given).detach().double()])[0] < 0.01
    for of in ("outputs", "gradients"):
        loss = (lambda y: y.square().mean()) if of == "gradients" else None
        frontier = amp_fx.calibrate(model, [given], loss, of=of, profile="off").frontier()
        assert 1e-3 < max(point.error for point in frontier) < 0.05


#: class -> settings of its config
TINY = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 32, "head_dim": 16, "intermediate_size": 32, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"moe_intermediate_size": 24, "num_experts": 4},
    "GptOss": {"num_local_experts": 4},
    "DeepseekV3": {
        "moe_intermediate_size": 24, "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16,
    },
    "Olmoe": {"num_experts": 4},
    "Glm4Moe": {"moe_intermediate_size": 24, "n_routed_experts": 4, "first_k_dense_replace": 0},
}  # fmt: skip


def arm(model: nn.Module, compiled: Callable[..., Any]) -> list[Tensor]:
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    tokens = torch.arange(24).reshape(2, 12) * 7 % 64
    out = compiled(input_ids=tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    found = [out.logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [value for value in found if value.any()]


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_ones(MIXTURES, "Mixtral", "GptOss"))
def test_experts_of_transformers_have_one_accuracy_and_share_in_every_implementation(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**TINY, **MIXTURES[name]})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.set_experts_implementation("batched_mm")
    wide = copy.deepcopy(model).double()
    exact = arm(wide, wide)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = errors(arm(model, model), exact)
    flops = set[int]()
    for implementation in ("batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        with amp_fx.record() as recording:
            ours = errors(arm(model, torch.compile(model, backend="amp_fx", options={**DEFAULTS})), exact)
        (plan,) = recording.plans
        assert {row.dtype for row in plan.matmuls} == {torch.bfloat16}
        flops.add(sum(row.flops for row in plan.matmuls))
        assert sum(each**2 for each in ours) <= (1.05**2) * sum(each**2 for each in theirs)
        assert all(our <= 2 * their for our, their in zip(ours, theirs, strict=True)), (ours, theirs)
    assert len(flops) == 1
