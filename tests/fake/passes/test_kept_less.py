"""What a step keeps in fewer bits: bytes, gradients, and what is never rounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.partitioners import default_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

import amp_fx
from amp_fx.compiler.notices import only_looking
from amp_fx.passes.inductor.grouped_rounding import from_bits, from_int4, from_int8, to_bits, to_int4, to_int8
from benchmarks.counts import saved_bytes
from support.tracing.captured_graphs import op_by_op

aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32
ROWS = (0, 1)


# ---- the numbers


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
def test_eight_bits_err_by_half_a_step_and_keep_zeros(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 128).mul(torch.logspace(-3, 2, 8)[:, None]).to(dtype)
    x[:, ::7] = 0
    numbers, scale = to_int8(x, ROWS, 64)
    again = from_int8(numbers, scale, ROWS, 64, dtype)
    assert numbers.dtype is torch.int8
    assert again.dtype is dtype
    assert not again[:, ::7].any()
    step = x.unflatten(1, (-1, 64)).abs().amax(-1, keepdim=True).double() / 126
    error = (again.double() - x.double()).unflatten(1, (-1, 64)).abs()
    # the scale has 8 bits of its own, the value those of its dtype
    assert (error <= step * 0.5 + x.double().abs().unflatten(1, (-1, 64)) * 2**-8).all()


def test_infinities_stay_and_a_nan_stays_one() -> None:
    x = torch.ones(2, 64)
    x[0, 3], x[0, 5], x[1, 7] = math.inf, -math.inf, math.nan
    again = from_int8(*to_int8(x, ROWS, 64), ROWS, 64, FP32)
    assert again[0, 3] == math.inf
    assert again[0, 5] == -math.inf
    finite = [at for at in range(64) if at not in (3, 5)]
    torch.testing.assert_close(again[0, finite], torch.ones(62), rtol=0.01, atol=0)
    assert again[1].isnan().all()
    in_four = from_int4(*to_int4(x, ROWS, 64), ROWS, 64, FP32)
    assert not in_four[0].isfinite().any()
    assert in_four[1].isnan().all()


def test_four_bits_are_right_in_the_mean_and_the_seed_says_which_way_they_round() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))

    def draw() -> Tensor:
        return from_int4(*to_int4(x, ROWS, 64), ROWS, 64, FP32)

    torch.manual_seed(0)
    first = draw()
    mean = sum((draw() for _ in range(400)), torch.zeros(4, 64)) / 400
    torch.manual_seed(0)
    assert torch.equal(draw(), first)
    step = (x.amax(1) - x.amin(1))[:, None] / 15
    assert ((first - x).abs() <= 1.02 * step).all()
    # the mean of 400 draws: five of its standard deviations
    assert ((mean - x).abs() <= step * 5 * 0.5 / 400**0.5).all()


def test_bools_come_back_in_any_layout() -> None:
    mask = torch.rand(4, 6, 16) > 0.5
    for order in ((0, 1, 2), (1, 0, 2)):
        numbers = to_bits(mask, order, 8)
        assert numbers.numel() == mask.numel() // 8
        assert torch.equal(from_bits(numbers, order, 8, torch.bool), mask)


# ---- steps


class Mlp(nn.Module):
    """Two blocks with a norm, an activation, a residual."""

    def __init__(self, width: int = 64, chance: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + F.dropout(down(F.gelu(up(norm(x)))), self.chance)
        return x.float().square().mean()


def batch(rows: int = 256) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


def step(
    build: Callable[[], nn.Module], x: Tensor, memory: Any, *, dynamic: bool = False, **options: Any
) -> tuple[list[fx.GraphModule], dict[str, Tensor]]:
    """Forward and backward graph of a step, computed op by op, and the gradients by name."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build()
    chosen = {"strict": True, "profile": "off", "activation_memory": memory, **options}
    compiled: Any = torch.compile(model, backend="amp_fx", options=chosen, dynamic=dynamic)
    with op_by_op() as graphs, only_looking():
        compiled(x).backward()
    return graphs, {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def in_fp64(build: Callable[[], nn.Module], x: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = build().double()
    model(x.double()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def errors(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name] - value).norm() / value.norm()) for name, value in right.items()}


def kept_dtypes(forward: fx.GraphModule) -> list[torch.dtype]:
    output: Any = forward.graph.output_node()
    return [node.meta["val"].dtype for node in output.all_input_nodes if node.op != "placeholder"]


def test_a_step_in_eight_bits_keeps_half_and_each_gradient_is_as_good_as_that() -> None:
    right = in_fp64(Mlp, batch())
    plain, ours = step(Mlp, batch(), "keep"), step(Mlp, batch(), "int8")
    assert saved_bytes(*ours[0]) < 0.5 * saved_bytes(*plain[0])
    assert torch.int8 in kept_dtypes(ours[0][0])
    before, after = errors(plain[1], right), errors(ours[1], right)
    assert all(after[name] <= max(2.5 * before[name], 1.2e-2) for name in right), (before, after)


def test_the_default_and_keep_are_one() -> None:
    torch._dynamo.reset()
    one, _ = step(Mlp, batch(), "keep")
    assert torch.int8 not in kept_dtypes(one[0])


@pytest.mark.parametrize("rows", [256, 100])
def test_sizes_that_vary_are_kept_in_eight_bits(rows: int) -> None:
    right = in_fp64(Mlp, batch(rows))
    graphs, found = step(Mlp, batch(rows), "int8", dynamic=True)
    assert torch.int8 in kept_dtypes(graphs[0])
    assert max(errors(found, right).values()) < 2e-2


@pytest.mark.parametrize("share", [0.8, 0.5, 0.3, 0.1])
def test_a_budget_is_kept_and_a_smaller_one_keeps_less(share: float) -> None:
    plain, _ = step(Mlp, batch(4096), "keep")
    ours, found = step(Mlp, batch(4096), share)
    assert saved_bytes(*ours) <= share * saved_bytes(*plain)
    right = in_fp64(Mlp, batch(4096))
    assert max(errors(found, right).values()) < (0.02 if share > 0.2 else 0.2)


class KeepsAll(CustomPartitionerFn):
    """A program's own partitioner, which computes nothing again."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        del kwargs["compiler"]
        return default_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "keeps all"


def test_a_budget_that_cannot_be_met_names_the_smallest_that_can() -> None:
    own: dict[str, Any] = {"custom_partitioner_fn": KeepsAll()}
    with pytest.raises(amp_fx.OptionsError, match=r"smallest share for it is (0\.\d\d)") as raised:
        step(Mlp, batch(4096), 0.05, **own)
    smallest = float(str(raised.value).rstrip(".").rpartition(" ")[2])
    assert 0.05 < smallest < 0.5
    plain, _ = step(Mlp, batch(4096), "keep", **own)
    ours, _ = step(Mlp, batch(4096), smallest, **own)
    assert saved_bytes(*ours) <= smallest * saved_bytes(*plain)


def test_dropout_keeps_its_mask_in_one_bit() -> None:
    graphs, _ = step(lambda: Mlp(chance=0.5), batch(4096), "int8", fallback_random=True)
    assert torch.bool not in kept_dtypes(graphs[0])
    assert torch.uint8 in kept_dtypes(graphs[0])


def test_what_is_added_below_an_exponential_is_not_rounded() -> None:
    class Masked(nn.Module):
        """A mask of numbers, and logits."""

        def __init__(self) -> None:
            super().__init__()
            self.map, self.bias = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            mask = self.bias(x).float().masked_fill(x > 1, torch.finfo(FP32).min)
            return F.softmax(self.map(x).float() + mask, -1).square().mean()

    graphs, found = step(Masked, batch(), "int8")
    assert max(errors(found, in_fp64(Masked, batch())).values()) < 2e-2
    # of the input of the maps alone, and not of what they return
    assert kept_dtypes(graphs[0]).count(torch.int8) == 1


def test_statistics_of_norms_are_kept_as_they_are() -> None:
    graphs, _ = step(Mlp, batch(8192), "int8")
    output: Any = graphs[0].graph.output_node()
    kept = [node for node in output.all_input_nodes if node.op != "placeholder"]
    statistics = [node for node in kept if node.meta["val"].shape == (8192, 1)]
    assert statistics
    assert all(node.meta["val"].dtype is FP32 for node in statistics)


@pytest.mark.parametrize("value", ["int4", 1.5, -0.1, True, None])
def test_another_value_is_an_error_that_names_the_valid_ones(value: Any) -> None:
    with pytest.raises(amp_fx.OptionsError, match=r"'keep', 'int8' or a number from 0 to 1; got"):
        amp_fx.options(activation_memory=value)


def test_eager_numerics_and_fewer_bits_contradict_each_other() -> None:
    with pytest.raises(amp_fx.OptionsError, match="activation_memory='int8' rounds"):
        amp_fx.options(activation_memory="int8", numerics="eager")


def doubled(x: Tensor) -> Tensor:
    return x * 2


def halved(x: Tensor) -> Tensor:
    return x / 2


@pytest.mark.parametrize(
    "hooks", [(doubled, halved), (fx.symbolic_trace(doubled), fx.symbolic_trace(halved))]
)
def test_hooks_that_compute_with_what_is_saved_are_given_no_integers(hooks: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Mlp()
    options = {"strict": True, "profile": "off", "activation_memory": "int8"}
    compiled: Any = torch.compile(model, backend="amp_fx", options=options)
    with op_by_op() as graphs, only_looking(), torch.autograd.graph.saved_tensors_hooks(*hooks):
        compiled(batch()).backward()
    assert torch.int8 not in kept_dtypes(graphs[0])
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    assert max(errors(found, in_fp64(Mlp, batch())).values()) < 1.2e-2


def test_hooks_that_come_after_the_compilation_are_told_once_of_integers() -> None:
    torch._dynamo.reset()
    options = {"strict": True, "profile": "off", "activation_memory": "int8"}
    compiled: Any = torch.compile(Mlp(), backend="amp_fx", options=options)
    with op_by_op(), only_looking():
        compiled(batch()).backward()
        # right: it moves tensors, and computes nothing
        with torch.autograd.graph.save_on_cpu():
            with pytest.warns(UserWarning, match=r"compiled without hooks.*torch\._dynamo\.reset"):
                compiled(batch()).backward()
            compiled(batch()).backward()


def test_what_a_model_in_bf16_saves_is_said() -> None:
    torch._dynamo.reset()
    options = {"profile": "off", "activation_memory": "int8"}
    model, x = Mlp().bfloat16(), batch(1024).bfloat16()
    (saved,) = [plan.saved for plan in amp_fx.explain(model, x, options=options).plans if plan.saved]
    assert saved["after"] < 0.6 * saved["before"]


def test_explain_says_what_is_saved_before_and_after() -> None:
    torch._dynamo.reset()
    options = {"profile": "off", "activation_memory": "int8"}
    report = amp_fx.explain(Mlp(), batch(1024), options=options)
    (saved,) = [plan.saved for plan in report.plans if plan.saved]
    assert saved["after"] < 0.5 * saved["before"]
    assert saved["8 bits"] > 0
    assert "saved for backward" in str(report)
    assert "weights cast again" in str(report)
    kept = amp_fx.explain(Mlp(), batch(1024), options={"profile": "off"})
    assert "saved for backward" not in str(kept)
