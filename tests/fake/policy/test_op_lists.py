"""The op lists, held against the autocast of the installed torch; ``tests/support/ops/listed_ops.py`` asks it."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from amp_fx._torch import op_name
from amp_fx.precision.policy import table
from amp_fx.precision.policy.classes import OpClass, Origin, follow, fp32
from amp_fx.precision.policy.common import FFT, LINALG
from amp_fx.precision.policy.cuda import CUDA_GROUPS
from support.ops import listed_ops
from support.ops.listed_ops import LOW, cast, first_dtype, repeat, row, run

#: Registered in builds with cudnn only; pre-dispatch graphs hold the layer (lstm.input), not this inner call.
BUILD_DEPENDENT = {"cuda": {"_cudnn_rnn"}}

#: overloads for named tensors, which Dynamo refuses; torch 2.13 has none
NAMED_TENSORS = re.compile(r"\.\w*(dimname|names_)", re.IGNORECASE)


def registered(device: str) -> set[str]:
    """ATen's names registered under the autocast key of a device; extensions have other namespaces."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device.upper()}")
    ours = (name for name in names if name.startswith("aten::") and not NAMED_TENSORS.search(name))
    return {name.removeprefix("aten::") for name in ours}


def autocast_names(device: str) -> set[str]:
    return {name for name in table.rows_of(device) if row(device, name).origin is Origin.AUTOCAST}


# ---- (a) the names


@pytest.mark.parametrize("device", LOW)
def test_the_autocast_rows_are_the_ops_registered_in_the_installed_torch(device: str) -> None:
    ours, theirs = autocast_names(device), registered(device) - BUILD_DEPENDENT.get(device, set())
    assert ours - theirs == set(), "on our list, no longer registered"
    assert theirs - ours == set(), "registered, not on our list"


@pytest.mark.parametrize("device", sorted({*table.DEVICES} - LOW.keys()))
def test_a_device_has_the_ops_that_its_autocast_registers(device: str) -> None:
    # hpu's are registered by a package that is not here
    assert registered(device) in (autocast_names(device), set())


def header_macros() -> dict[str, set[str]]:
    """Parses the op lists of ``ATen/autocast_mode.h``: macro name -> op names."""
    path = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = path.read_text().replace("\\\n", " ")
    macros = {}
    for name, body in re.findall(r"#define AT_FORALL_(\w+)\(_\)(.*)", text):
        ops = re.findall(r"\b_\(\s*(\w+)(?:\s*,\s*(\w+))?\s*\)", body)
        quoted = re.findall(r'"([\w.]+)"', body)
        found = {f"{op}.{which}" if which else op for op, which in ops} | {*quoted}
        macros[name] = {op for op in found if not NAMED_TENSORS.search(op)}
    return macros


def test_the_cuda_classes_are_those_of_the_macros_in_the_torch_header() -> None:
    macros = header_macros()
    classes = dict.fromkeys(("FP32", "FP32_SET_OPT_DTYPE", "DIFFERENT_REDISPATCH_SIGNATURE"), OpClass.FP32)
    classes |= {"LOWER_PRECISION_FP": OpClass.LOW, "PROMOTE": OpClass.PROMOTE}
    for macro, op_class in classes.items():
        names = macros[macro]
        assert names, macro
        assert {name: row("cuda", name).op_class for name in names} == dict.fromkeys(names, op_class), macro
    assert all(row("cuda", name).unless_given == ("dtype",) for name in macros["FP32_SET_OPT_DTYPE"])


# ---- (b) the classes


def answer_of_autocast(device: str, name: str, first: torch.dtype, rest: torch.dtype) -> torch.dtype | None:
    """Runs an op under autocast on arguments of these dtypes; slots with a dtype of their own stay fp32."""
    try:
        call = cast(name, listed_ops.arguments(name), repeat(first, rest), row(device, name).own_dtype_slots)
        return first_dtype(listed_ops.under_autocast(device, name, call))
    except Exception as error:
        raise RuntimeError(f"{name} needs a row of BUILDERS, or of NOT_ASKED: {error!r}") from error


@pytest.mark.quick_rows("cpu")
@pytest.mark.parametrize("device", LOW)
def test_autocast_itself_gives_the_dtypes_that_the_class_of_the_op_says(device: str) -> None:
    for name in [
        name for on, name in listed_ops.ASKED if on == device and (on, name) not in listed_ops.DIFFERS
    ]:
        check_class(device, name)


def check_class(device: str, name: str) -> None:
    torch.manual_seed(0)
    group, low, full = row(device, name), LOW[device], torch.float32
    ask = functools.partial(answer_of_autocast, device, name)
    if name == "binary_cross_entropy" and device == "cuda":
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            ask(low, low)
        return
    answer = ask(full, full)
    if group.op_class is OpClass.KEEP:
        assert answer is torch.float64
    elif answer is None:
        # a mask or positions: autocast cannot be told apart by dtype, but the op has to run
        if group.origin is not Origin.UNLISTED or group.op_class is not OpClass.FP32:
            ask(low, low)
    elif group.op_class is OpClass.LOW:
        assert answer is (full if group.origin is Origin.UNLISTED else low)
        assert ask(low, low) is low
    elif group.op_class is OpClass.FP32:
        assert answer in (torch.float32, torch.complex64)
        if group.origin is not Origin.UNLISTED:
            assert ask(low, low) is answer
    else:
        assert answer is full
        assert ask(low, low) is low
        if group.mixes or (group.op_class is OpClass.PROMOTE and group.origin is Origin.AUTOCAST):
            assert ask(full, low) is full
            if listed_ops.floats_in(name) > 1:
                assert ask(low, full) is full


def test_where_the_lists_differ_from_autocast_theirs_is_the_wider_dtype() -> None:
    for device, name in listed_ops.DIFFERS:
        assert answer_of_autocast(device, name, torch.float32, torch.float32) is LOW[device]
        assert row(device, name).op_class in (OpClass.PROMOTE, OpClass.FP32)


@pytest.mark.parametrize("device", LOW)
def test_at_least_nine_in_ten_autocast_rows_are_asked(device: str) -> None:
    names = autocast_names(device) - {*FFT.split(), *LINALG.split()}
    asked = names - listed_ops.NOT_ASKED[device].keys()
    assert listed_ops.NOT_ASKED[device].keys() <= {*table.rows_of(device)}
    assert len(asked) >= 0.9 * len(names)


# ---- (c) follow means: commutes with rounding

FOLLOWERS = sorted(
    {name for device, name in listed_ops.EVERY_ROW if row(device, name).op_class is OpClass.FOLLOW}
)


def assert_same(left: Any, right: Any, dtype: torch.dtype) -> None:
    lefts, rights = tree_leaves(left), tree_leaves(right)
    for one, other in zip(lefts, rights, strict=True):
        if listed_ops.is_float(one):
            assert torch.equal(one.to(dtype), other.to(dtype))
        elif isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_follow_op_gives_the_same_numbers_rounded_before_or_after(low: torch.dtype) -> None:
    for name in FOLLOWERS:
        torch.manual_seed(0)
        call = listed_ops.arguments(name, listed_ops.t)
        rounded = cast(name, call, repeat(low, low))
        before = run(name, rounded)
        assert first_dtype(before) is low, name
        assert_same(before, run(name, call), low)
        widened = cast(name, rounded, repeat(torch.float32, torch.float32))
        assert_same(before, run(name, widened), torch.float32)


# ---- (d) mixes means: widens inside


def pointwise_by_default() -> Iterator[str]:
    """Functional ATen overloads that get the default row."""
    for qualified in torch._C._dispatch_get_all_op_names():
        name = qualified.removeprefix("aten::")
        # bitwise ops (and their operators), gcd and lcm take integers only
        if name == qualified or name.startswith(("__", "bitwise_", "gcd", "lcm")):
            continue
        packet, _, which = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), which or "default", None)
        if op and name not in table.rows_of("cpu") and table.lookup(op, "cpu") is not None:
            yield name


MIXING_ROWS = {name for device, name in listed_ops.EVERY_ROW if row(device, name).mixes}
MIXERS = sorted(name for name in {*pointwise_by_default(), *MIXING_ROWS} if listed_ops.floats_in(name) > 1)


def test_an_op_that_mixes_dtypes_equals_widening_first() -> None:
    low, full = torch.bfloat16, torch.float32
    for name, (first, rest) in itertools.product(MIXERS, ((full, low), (low, full))):
        torch.manual_seed(0)
        mixed = cast(name, listed_ops.arguments(name), repeat(first, rest))
        result = run(name, mixed)
        expected = run(name, cast(name, mixed, repeat(full, full)))
        assert first_dtype(result) is first_dtype(expected), name
        assert_same(result, expected, full)


# ---- (e) the table


def test_a_list_with_an_op_in_two_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'mm'.*'first'.*'second'"):
        table.rows_that_hold((follow("first", "mm"), fp32("second", "mm")), "")


def test_every_name_is_an_out_of_place_overload_of_the_installed_torch() -> None:
    for device, name in listed_ops.EVERY_ROW:
        op = listed_ops.overload(name)
        assert op_name(op) == name
        assert not op._schema.is_mutable or name in ("batch_norm", "instance_norm", "native_batch_norm")
        group = row(device, name)
        slots = {argument.name for argument in op._schema.arguments}
        assert slots & {*group.own_dtype_slots} or not group.own_dtype_slots


@pytest.mark.parametrize(
    ("version", "op_class"),
    [("2.11.1+cu130", OpClass.PROMOTE), ("2.12.0a0+git1234", OpClass.FP32), ("2.15.0", OpClass.FP32)],
)
def test_rows_hold_from_their_first_torch_version_to_before_their_last(
    version: str, op_class: OpClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert table.rows_that_hold(CUDA_GROUPS, "")["rms_norm"].op_class is op_class


def test_a_device_list_wins_over_the_common_one_and_reasons_name_the_autocast_of_the_device() -> None:
    assert row("cuda", "max_pool3d").op_class is OpClass.FOLLOW
    assert row("cpu", "max_pool3d").op_class is OpClass.FP32
    for device in ("cpu", "mps"):
        assert f"{device.upper()} autocast" in row(device, "linear").reason


def test_a_device_without_lists_has_no_rows() -> None:
    assert "vulkan" not in table.DEVICES
    assert table.lookup(torch.ops.aten.mm.default, "vulkan") is None


def test_pointwise_ops_that_no_list_names_run_in_the_dtype_of_their_inputs() -> None:
    group = row("cuda", "erf")
    assert (group.op_class, group.mixes) == (OpClass.PROMOTE, True)


def test_writes_unknown_ops_and_other_namespaces_have_no_row() -> None:
    aten, added = torch.ops.aten, torch.ops.prims.add.default
    rowless = (aten.erf_.default, aten.erf.out, aten.unique_dim.default, aten.to.dtype, added)
    assert [op for op in rowless if table.lookup(op, "cuda") is not None] == []
