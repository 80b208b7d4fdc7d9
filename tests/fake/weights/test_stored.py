"""Models whose weights are stored low, in place: what is stored, what stays, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_fx import AmpFxError, OptionsError, Plan, StoredLow, WeightsError, store_low
from amp_fx._torch import unwrapped_errors
from support.checks.below_16_bits import error, lowered
from support.models.small import Parts
from support.tracing.captured_graphs import DEFAULTS

BF16 = torch.bfloat16


class Decoder(nn.Module):
    """An embedding tied to the head, a norm, and two linears that share their bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 16)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.down.bias = self.up.bias
        self.head = nn.Linear(16, 48, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, exact: bool = False) -> Tensor:
        x = self.table(tokens)
        if exact:
            return x * self.down.weight.square().sum()
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


TOKENS = torch.arange(8).reshape(2, 4)


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().eval()


def stored(model: nn.Module, *batch: Any, **options: Any) -> StoredLow:
    return store_low(model, *(batch or (TOKENS,)), options={**DEFAULTS, **options})


@pytest.fixture
def low_decoder() -> Decoder:
    """It is stored low."""
    model = decoder()
    stored(model)
    return model


def test_what_is_only_read_low_is_stored_low_the_rest_stays_and_what_is_tied_stays_tied() -> None:
    model = decoder()
    before = copy.deepcopy(model)
    found = stored(model)
    low = {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert found.stored == dict.fromkeys(low, "bfloat16")
    assert set(found.kept) == {"table.weight", "norm.weight", "norm.bias", "head.weight"}
    for name, value in before.state_dict().items():
        now = model.state_dict()[name]
        assert torch.equal(now, value.to(BF16) if name in low else value)
        assert now.dtype is (BF16 if name in low else torch.float32)
    assert model.head.weight is model.table.weight
    up, down = (dict(layer.named_parameters()) for layer in (model.up, model.down))
    assert up["parametrizations.bias.original"] is down["parametrizations.bias.original"]


def test_bytes_are_those_of_the_parameters_tied_ones_once() -> None:
    model = decoder()
    found = stored(model)
    low, kept = 2 * 16 * 16 + 16, 48 * 16 + 2 * 16
    assert (found.bytes_before, found.bytes_after) == (4 * (low + kept), 2 * low + 4 * kept)
    assert found.saved == 2 * low
    assert found.bytes_after == sum(value.nbytes for value in model.parameters())
    assert "\n" not in str(found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.bytes_after = 0  # type: ignore[misc]


def plan_of(model: nn.Module, *args: Tensor, **options: Any) -> Plan:
    with torch.no_grad():
        return lowered(model, args or (TOKENS,), {"weights": "cache", **options}).plan


def test_the_plan_is_that_of_the_model_before() -> None:
    model = decoder()
    plans = [plan_of(model, profile="off")]
    stored(model)
    plans += [plan_of(model, profile="off"), plan_of(model, profile="off", weights="cast")]
    rows = [[(row.op, row.dtype, row.reasons) for row in plan.nodes] for plan in plans]
    assert rows[0] == rows[1] == rows[2]
    followed = plan_of(model, plan=plans[0])
    assert [(row.op, row.dtype) for row in followed.nodes] == [(row.op, row.dtype) for row in plans[0].nodes]
    # no cast is left of what is stored
    plan = plans[2]
    tables = {given.name for given in plan.inputs if given.shape == (48, 16)}
    assert {cast.value for cast in plan.casts} & {given.name for given in plan.inputs} == tables


def test_what_one_batch_of_a_list_or_a_rule_reads_in_fp32_stays() -> None:
    model = decoder()
    found = stored(model, [TOKENS, (TOKENS, True)])
    assert found.stored.keys() == {"up.weight", "up.bias", "down.bias"}
    assert stored(decoder(), [{"tokens": TOKENS}]).stored.keys() > found.stored.keys()
    ruled = stored(decoder(), policy={"rules": [{"module": "down", "precision": "fp32"}]})
    assert set(ruled.stored) == {"up.weight"}


def tied() -> Any:
    """Two linears of one weight, a product from the other side, and a head."""
    torch.manual_seed(0)
    model: Any = Parts(
        lambda m, x: m.head(m.again(m.up(x).relu() @ m.right)),
        **{name: nn.Linear(32, 32) for name in ("up", "again", "head")},
    )
    model.again.weight = model.up.weight
    model.register_parameter("right", nn.Parameter(torch.randn(32, 32)))
    return model.eval()


INT8 = {"policy": "int8", "weights": "cast"}


def quantised() -> tuple[Any, Any, StoredLow]:
    """A model, as it was and stored."""
    model = tied()
    return copy.deepcopy(model), model, stored(model, torch.randn(32, 32), **INT8)


def test_weights_in_int8_are_stored_with_their_scales() -> None:
    wide, model, found = quantised()
    names = [name for name, dtype in found.stored.items() if dtype == "int8"]
    assert {*names} == {"up.weight", "again.weight", "right"}
    state = model.state_dict()
    for name, turned in (("up.weight", False), ("right", True)):
        data, scale = state[name], state[f"{name}_int8_scale"]
        assert (data.dtype, scale.dtype, tuple(scale.shape)) == (torch.int8, torch.float32, (32, 1))
        exact = wide.state_dict()[name]
        values = data * scale
        assert (exact - (values.t() if turned else values)).abs().max() <= 0.51 * scale.max()
    pair = 32 * 32 + 4 * 32
    assert found.bytes_after == 2 * pair + 2 * 32 * 32 + 2 * 3 * 32
    # what is tied stays tied
    pairs = [dict(layer.named_parameters()) for layer in (model.up, model.again)]
    for part in ("original0", "original1"):
        assert pairs[0][f"parametrizations.weight.{part}"] is pairs[1][f"parametrizations.weight.{part}"]


def test_a_state_dict_in_int8_and_one_in_fp32_go_into_a_model_in_int8() -> None:
    wide, model, _ = quantised()
    _, other, _ = quantised()
    with torch.no_grad():
        dict(other.up.named_parameters())["parametrizations.weight.original0"].zero_()
    state = model.state_dict()
    for given in (state, wide.state_dict()):
        other.load_state_dict(given)
        assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())


def test_the_plan_in_int8_is_that_of_the_model_before() -> None:
    wide, model, _ = quantised()
    plans = [plan_of(each, torch.randn(32, 32), **DEFAULTS, **INT8) for each in (wide, model)]
    rows = [[(row.op, row.dtype, row.levels) for row in plan.nodes] for plan in plans]
    assert rows[0] == rows[1]
    assert sum("int8" in str(levels) for _, _, levels in rows[0]) == 3


def test_what_batch_norm_is_folded_into_stays_in_fp32_unless_weights_are_cast() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()

    image, last = torch.randn(1, 4, 8, 8), {"3.weight", "3.bias"}
    assert set(stored(network(), image).stored) == last
    assert set(stored(network(), image, weights="cast").stored) == {"0.weight", "0.bias", *last}


def test_a_state_dict_goes_into_a_stored_model_and_into_one_in_fp32() -> None:
    model, other, wide = decoder(), decoder(), decoder()
    stored(model)
    with torch.no_grad():
        for value in other.parameters():
            value.add_(1.0)
    stored(other)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state.keys() == decoder().state_dict().keys()
    for into, given in ((other, state), (wide, state), (other, decoder().state_dict())):
        into.load_state_dict(given)
        for name, value in into.state_dict().items():
            assert torch.equal(value, given[name].to(value.dtype))
    assert other.state_dict()["up.weight"].dtype is BF16
    assert wide.state_dict()["up.weight"].dtype is torch.float32


def test_a_model_that_was_loaded_low_is_read_low_without_a_batch() -> None:
    model = decoder()
    found = stored(model)
    with torch.device("meta"):
        fresh = Decoder().eval()
    fresh.load_state_dict(model.state_dict(), assign=True)
    again = store_low(fresh)
    assert again.stored == found.stored
    assert again.saved == 0
    with torch.no_grad():
        assert torch.equal(fresh(TOKENS), model(TOKENS))


def test_a_copy_of_a_stored_model_is_stored(low_decoder: Decoder) -> None:
    other = copy.deepcopy(low_decoder)
    dtypes = [{name: v.dtype for name, v in each.state_dict().items()} for each in (other, low_decoder)]
    assert dtypes[0] == dtypes[1]
    with torch.no_grad():
        assert torch.equal(other(TOKENS), low_decoder(TOKENS))


def test_training_a_stored_model_is_an_error_compiled_and_eagerly(low_decoder: Decoder) -> None:
    for each, batch in ((low_decoder, TOKENS), (quantised()[1], torch.randn(32, 32))):
        program = torch.compile(each, backend="amp_fx", options=dict(DEFAULTS))
        with pytest.raises(WeightsError), unwrapped_errors(WeightsError):
            program(batch)
    with pytest.raises(WeightsError):
        low_decoder(TOKENS).sum().backward()


@pytest.mark.parametrize("trains", [True, False])
def test_fp32_values_that_take_the_place_of_stored_ones_can_be_trained(
    trains: bool, low_decoder: Decoder, without_inductor: None
) -> None:
    wide = decoder()
    low_decoder.load_state_dict(wide.state_dict(), assign=True)
    low_decoder.up.requires_grad_(trains)
    low, compiled = low_decoder, torch.compile(low_decoder, backend="amp_fx", options=dict(DEFAULTS))
    weight = dict(low.up.named_parameters())["parametrizations.weight.original"]
    for _ in range(2):
        assert torch.equal(low(TOKENS), wide(TOKENS))
    assert not weight._backward_hooks
    wide(TOKENS).sum().backward()
    assert wide.up.weight.grad is not None
    for program, near in ((low, 1e-6), (compiled, 0.02)):
        low.zero_grad()
        program(TOKENS).sum().backward()
        assert low.norm.weight.grad is not None
        assert (weight.grad is not None) is trains
        if weight.grad is not None:
            assert error([weight.grad], [wide.up.weight.grad]) < near


def test_weights_that_were_frozen_let_gradients_through() -> None:
    model = decoder().requires_grad_(False)
    stored(model)
    model.norm.requires_grad_(True)
    model(TOKENS).sum().backward()
    assert model.norm.weight.grad is not None


def test_what_is_no_module_and_bad_options_are_refused() -> None:
    with pytest.raises(AmpFxError, match="Module"):
        store_low(torch.sin, TOKENS)  # type: ignore[arg-type]
    with pytest.raises(OptionsError):
        store_low(decoder(), TOKENS, options={"dtpye": "bfloat16"})
