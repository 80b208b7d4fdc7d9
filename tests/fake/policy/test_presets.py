"""Policies by the names that Keras, Apex, JMP, FSDP and DeepSpeed give them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_fx import OptionsError, Policy, Rule
from amp_fx.compiler.settings import Options
from amp_fx.precision.policy.rules import PRESETS
from support.models.small import Parts
from support.tracing.captured_graphs import rewrite

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16

#: text -> base and low dtype
NAMES = {
    "mixed_float16": ("fast", FLOAT16),
    "mixed_bfloat16": ("fast", BFLOAT16),
    "O1": ("autocast", FLOAT16),
    "O2": ("fast", FLOAT16),
    "O3": ("fast", FLOAT16),
    "params=float32,compute=bfloat16,output=float32": ("fast", BFLOAT16),
    "compute=float16": ("fast", FLOAT16),
    "param_dtype=bfloat16,reduce_dtype=float32,buffer_dtype=float32": ("fast", BFLOAT16),
}

NOTHING_LOW = ["float32", "O0", "compute=float32", "params=float32", "param_dtype=float32"]

OPS = ("layer_norm", "linear", "add.Tensor", "exp")
NORM = {"op": "layer_norm", "precision": "fp32"}


def dtypes(policy: Any) -> dict[str, set[str]]:
    torch._dynamo.reset()
    # a residual stream, a norm and a softmax: what the names differ in
    block = Parts(lambda m, x: x + m.linear(m.norm(x)), norm=nn.LayerNorm(8), linear=nn.Linear(8, 8))
    model = Parts(lambda m, x: m.block(m.block(x)).exp().sum(), block=block)
    found = rewrite(model, torch.randn(2, 8), options={"policy": policy})
    return {op: set(found.dtypes(op)) for op in OPS}


def test_a_name_means_a_base_and_a_dtype() -> None:
    for name, expected in NAMES.items():
        options = Options.parse(options={"policy": name})
        assert (options.policy.base, options.dtype) == expected, name
    assert PRESETS.keys() <= {*NAMES, *NOTHING_LOW}


@pytest.mark.parametrize("name", NOTHING_LOW)
def test_float32_leaves_nothing_low(name: str) -> None:
    assert dtypes(name) == {op: {"float32"} for op in OPS}


def test_o1_is_autocast_o2_stores_the_residual_stream_low_o3_all_but_what_may_overflow() -> None:
    assert dtypes("O1") == dtypes({"base": "autocast", "dtype": "float16"})
    assert dtypes("O1")["add.Tensor"] == {"float32"}
    # the last one feeds an exponential
    assert dtypes("O2")["add.Tensor"] == {"float16", "float32"}
    assert dtypes("O2") == dtypes("mixed_float16") == dtypes("compute=float16")
    low = {op: {"float16"} for op in OPS[:3]}
    assert dtypes("O3") == {**low, "exp": {"float32"}}
    # O3 is a rule that lowers everything; the last one wins
    assert dtypes({"base": "O3", "rules": [NORM]}) == {**low, "exp": {"float32"}, "layer_norm": {"float32"}}


@pytest.mark.parametrize(
    ("given", "printed", "same"),
    [
        ("p=f32,c=bf16,o=f32", "p=float32,c=bfloat16,o=float32", "c=bf16"),
        (" params = float32 , compute = half ", "params=float32,compute=float16", "c=f16"),
        (
            {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": None},
            *("param_dtype=bfloat16,reduce_dtype=float32", "param_dtype=bfloat16"),
        ),
        # FSDP: nothing is lowered where no dtype is named
        ({"param_dtype": None}, "float32", "float32"),
    ],
)
def test_dtypes_by_name_are_printed_in_their_long_form(given: Any, printed: str, same: str) -> None:
    assert str(Policy.parse(given)) == printed
    assert Policy.parse(given) == Policy.parse(printed) == Policy.parse(same)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("params=bfloat16,compute=bfloat16", "params=bfloat16"),
        ("compute=bfloat16,output=bfloat16", "output=bfloat16"),
        ("param_dtype=bfloat16,reduce_dtype=bfloat16", "reduce_dtype=bfloat16.*float32"),
        ("param_dtype=bfloat16,buffer_dtype=bfloat16", "buffer_dtype=bfloat16"),
        ("compute=bfloat8", "'bfloat8'.*'compute'.*'bfloat16'"),
        ("compute=bfloat16,outptu=float32", "'outptu'.*'output'"),
        ("mixed_bfloat", "'mixed_bfloat'.*'mixed_bfloat16'"),
        ({"base": "fast", "dtype": "float64"}, "'float64'"),
        ({"base": "O1", "dtype": "bfloat16"}, "'bfloat16'.*'O1'.*float16"),
        ({"base": "mixed_bfloat"}, "'mixed_bfloat'.*'mixed_bfloat16'"),
        ({"base": {"base": "fast"}}, "{'base': 'fast'}"),
    ],
)
def test_what_cannot_be_is_an_error_that_says_why(policy: Any, message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        Policy.parse(policy)


def test_a_name_and_another_option_that_contradict_are_an_error() -> None:
    with pytest.raises(OptionsError, match=r"'bfloat16'.*'O1'.*float16"):
        Options.parse(options={"policy": "O1", "dtype": "bfloat16"})
    assert Options.parse(options={"policy": "O1", "dtype": "float16"}).dtype is FLOAT16
    with pytest.raises(OptionsError, match="'default'"):
        Options.parse(options={"policy": "mixed_bfloat16", "scaler": "default"})


@pytest.mark.parametrize("name", [*NAMES, *NOTHING_LOW])
def test_a_name_prints_itself_back_and_rules_go_on_top_of_it(name: str) -> None:
    plain, ruled = Policy.parse(name), Policy.parse({"base": name, "rules": [NORM]})
    assert str(plain) == name
    assert (ruled.base, ruled.dtype) == (plain.base, plain.dtype)
    assert ruled.rules == (*plain.rules, Rule("fp32", op="layer_norm"))
    for policy in (plain, ruled):
        text = json.dumps(policy.to_dict())
        assert policy == Policy.parse(str(policy)) == Policy.parse(policy.to_dict()) == Policy.parse(text)
    fields = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "rules": [NORM]}
    assert Policy.parse(fields) == Policy.parse({"base": "mixed_bfloat16", "rules": [NORM]})


def test_the_loss_stays_in_fp32_where_its_inputs_are_low() -> None:
    args, options = (torch.randn(4, 4), torch.randn(4, 4)), {"policy": "mixed_float16"}
    found = rewrite(lambda x, y: F.mse_loss(F.linear(x, x), y), *args, options=options)
    assert found.dtypes("mse_loss") == ["float32"]
