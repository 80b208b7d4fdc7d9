"""Export without compiling: what becomes of the graph, the signature, the weights, and of autocast."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import amp_fx
from amp_fx import AmpFxError, CaptureError, InputError, OptionsError, Plan
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.sensitivity import Sensitivity
from support.checks.below_16_bits import error_of, exact
from support.models.small import Parts, UpDown
from support.tracing.captured_graphs import rewrite

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def tied() -> Parts:
    """An embedding tied to the head, beside a table of its own."""
    head, table = nn.Linear(16, 32, bias=False), nn.Embedding(32, 16)
    head.weight = table.weight
    parts = {"embedding": table, "positions": nn.Embedding(8, 16), "head": head}
    return Parts(lambda m, x: m.head(m.embedding(x) + m.positions(torch.arange(x.shape[1]))), **parts)


def mlp() -> UpDown:
    return UpDown(16, 32, 8, norm=True)


def converted(model: nn.Module, *args: Any, **options: Any) -> ExportedProgram:
    return amp_fx.export(model.eval(), args, profile="off", **options)


def stored_dtypes(ep: ExportedProgram) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in ep.state_dict.items()}


def casts(ep: ExportedProgram) -> Counter[tuple[torch.dtype, torch.dtype]]:
    return Counter(
        (node.args[0].meta["val"].dtype, node.meta["val"].dtype)  # type: ignore[union-attr]
        for node in ep.graph.find_nodes(op="call_function", target=aten.to.dtype)
    )


def test_weights_of_matmuls_are_stored_low_and_their_casts_are_gone() -> None:
    model = mlp()
    ep = converted(model, torch.randn(4, 16))
    kept = {"norm.weight": FP32, "norm.bias": FP32}
    low = ("up.weight", "up.bias", "down.weight", "down.bias")
    assert stored_dtypes(ep) == {**dict.fromkeys(low, BF16), **kept}
    # for the input, for the output, and around the norm
    assert casts(ep) == {(FP32, BF16): 2, (BF16, FP32): 2}
    assert {value.dtype for value in model.parameters()} == {FP32}, "the model itself is not changed"


@pytest.mark.parametrize("numerics", ["compiled", "eager"])
def test_norms_are_stored_with_operands_of_one_dtype(numerics: str) -> None:
    norms = (nn.BatchNorm2d(16), nn.GroupNorm(4, 16), nn.InstanceNorm2d(16, affine=True), nn.LayerNorm(10))
    model = nn.Sequential(nn.Conv2d(3, 16, 3), *norms, nn.ConvTranspose2d(16, 3, 3)).eval()
    x = torch.randn(2, 3, 12, 12)
    ep = converted(model, x, numerics=numerics)
    calls = [node for node in ep.graph.nodes if str(node.target).endswith("_norm.default")]
    # the first is folded into the weight before it, unless eager numerics are asked for
    assert len(calls) == (4 if numerics == "eager" else 3)
    for norm in calls:
        taken = {source.meta["val"].dtype for source in norm.all_input_nodes}
        # bit for bit what eager PyTorch does on a CPU, which has kernels for both
        assert taken == ({FP32} if numerics == "compiled" else {BF16, FP32})
    assert_as_accurate_as_autocast(ep, model, x)


def assert_as_accurate_as_autocast(ep: ExportedProgram, model: nn.Module, x: Tensor) -> None:
    result, true = ep.module()(x), exact(model, x)
    with torch.autocast("cpu", BF16):
        autocast = model(x)
    assert result.dtype is FP32
    assert error_of(result, true) <= 1.1 * error_of(autocast, true)
    assert error_of(result, true) > 10 * error_of(model(x), true), "it really computes in bf16"


def test_a_converted_program_is_accurate_validates_decomposes_and_survives_a_file(tmp_path: Path) -> None:
    x, model = torch.randn(64, 16), mlp()
    ep = converted(model, x)
    assert_as_accurate_as_autocast(ep, model, x)
    ep.validate()
    assert torch.equal(ep.run_decompositions().module()(x), ep.module()(x))
    files = {"amp_fx.json": ""}
    torch.export.save(ep, tmp_path / "mlp.pt2", extra_files=amp_fx.extra_files(ep))
    loaded = torch.export.load(tmp_path / "mlp.pt2", extra_files=files)
    assert torch.equal(loaded.module()(x), ep.module()(x))
    assert stored_dtypes(loaded) == stored_dtypes(ep)
    plan = Plan.from_json(files["amp_fx.json"])
    assert plan.ops_by_dtype()["linear"] == {"bfloat16": 2}
    assert {given.name: given.dtype for given in plan.inputs if given.parameter}["p_up_weight"] is BF16
    assert [given.name for given in plan.inputs if not given.parameter] == ["x"]
    # as well if it was decomposed before
    stock = torch.export.export(model, (x,))
    decomposed = amp_fx.convert(stock.run_decompositions(), profile="off")
    assert stored_dtypes(decomposed)["up.weight"] is BF16
    assert_as_accurate_as_autocast(decomposed, model, x)
    with pytest.raises(AmpFxError, match=r"amp_fx\.export"):
        amp_fx.extra_files(stock)


def test_low_precision_ends_on_request() -> None:
    x, model = torch.randn(4, 16), mlp()
    ep = converted(model, x, keep_io_dtypes=False)
    assert casts(ep) == {(BF16, FP32): 1, (FP32, BF16): 1}, "around the norm"
    result = ep.module()(x.bfloat16())
    assert result.dtype is BF16
    assert error_of(result, model(x)) < 0.02
    assert ep.example_inputs is not None
    assert ep.example_inputs[0][0].dtype is BF16
    plan = amp_fx.calibrate(model, x, of="outputs").plan(verify=False)
    replayed = converted(model, x, keep_io_dtypes=False, plan=plan)
    assert (casts(replayed), replayed.module()(x.bfloat16()).dtype) == (casts(ep), BF16)


def test_a_low_input_that_is_given_in_fp32_is_named_with_the_fix(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor, scale: Tensor, times: int) -> Tensor:
            return x @ x.T * scale * times + mask

    x, mask, scale = torch.randn(4, 16), torch.randn(4, 4), torch.ones((), dtype=torch.float64)
    named = {"mask": mask, "scale": scale, "times": 2}
    ep = amp_fx.convert(torch.export.export(Two(), (x,), named), keep_io_dtypes=False)
    module, low = ep.module(), {**named, "mask": mask.bfloat16()}
    for ordered in (low, dict(reversed(low.items()))):
        assert module(x.bfloat16(), **ordered).dtype is BF16
    with pytest.raises(InputError, match=r"'x' .*torch\.float32.*torch\.bfloat16.*keep_io_dtypes=True"):
        module(x, **low)
    with pytest.raises(InputError, match=r"'mask' .*torch\.float32"):
        module(x.bfloat16(), **named)
    torch.export.save(ep, tmp_path / "two.pt2")
    loaded = torch.export.load(tmp_path / "two.pt2")
    with pytest.raises(RuntimeError, match="Expected: BFloat16, Got: float"):
        loaded.module()(x, **named)
    assert loaded.module()(x.bfloat16(), **low).dtype is BF16


def test_an_input_that_the_program_writes_to_stays_fp32_beside_low_ones() -> None:
    total, x = torch.zeros(4, 4), torch.randn(4, 4)
    ep = converted(Parts(lambda _, total, x: total.add_(x @ x) * 2), total, x, keep_io_dtypes=False)
    assert ep.example_inputs is not None
    assert [value.dtype for value in ep.example_inputs[0]] == [FP32, BF16]
    assert ep.module()(total, x.bfloat16()).dtype is BF16
    assert error_of(total, x @ x) < 0.02


TABLES = [
    ({}, BF16, FP32), ({"tables": "low"}, BF16, BF16), ({"tables": "keep"}, FP32, FP32),
    ({"tables": "low", "numerics": "eager"}, FP32, FP32),
]  # fmt: skip


@pytest.mark.parametrize(("options", "embedding", "positions"), TABLES, ids=str)
def test_tables_are_rounded_where_they_are_tied_or_all_or_none(
    options: dict[str, Any], embedding: torch.dtype, positions: torch.dtype
) -> None:
    tokens, model = torch.randint(32, (2, 8)), tied()
    ep = converted(model, tokens, **options)
    names = ("embedding.weight", "positions.weight", "head.weight")
    assert stored_dtypes(ep) == dict(zip(names, (embedding, positions, embedding), strict=True))
    assert ep.state_dict["embedding.weight"].data_ptr() == ep.state_dict["head.weight"].data_ptr()
    assert error_of(ep.module()(tokens), model(tokens)) < 0.02
    if embedding is FP32:
        with torch.autocast("cpu", BF16):
            assert torch.equal(ep.module()(tokens).bfloat16(), model(tokens))


def test_weights_beyond_fp16_are_refused_by_name_clamped_or_kept_with_their_op() -> None:
    model, x = mlp(), torch.randn(4, 16)
    model.down.weight.data[3, 4] = -1e5
    with pytest.raises(OptionsError, match=r"down\.weight .*100000.*bfloat16.*'clamp'"):
        converted(model, x, dtype="float16")
    assert converted(model, x, dtype="bfloat16").state_dict["down.weight"].dtype is BF16
    kept = converted(model, x, dtype="float16", weights_beyond_range="keep")
    assert stored_dtypes(kept)["down.weight"] is FP32
    assert stored_dtypes(kept)["up.weight"] is FP16
    assert error_of(kept.module()(x), model(x)) < 0.01
    model.down.weight.data[0, 0] = float("inf")
    clamped = converted(model, x, dtype="float16", weights_beyond_range="clamp").state_dict["down.weight"]
    assert clamped[3, 4].item() == torch.finfo(FP16).min
    assert clamped[0, 0].item() == float("inf"), "what was infinite stays so"


@pytest.fixture
def fast_bf16(tmp_path: Path) -> str:
    """A profile on which bf16 is four times as fast as fp32."""
    peak = {"float32": 1e11, "bfloat16": 4e11, "float16": 1e9}
    path = tmp_path / "profile.json"
    DeviceProfile("made up", "cpu", peak, bandwidth=3e10, launch=5e-6).save(path)
    return str(path)


def test_weights_cost_no_cast_when_the_profile_decides(fast_bf16: str) -> None:
    """Casting the weight at each call would cost more than this matmul gains."""
    model, x = nn.Linear(512, 512), torch.randn(1, 512)
    assert stored_dtypes(amp_fx.export(model.eval(), (x,), profile=fast_bf16))["weight"] is BF16
    plan = rewrite(model, x, options={"profile": fast_bf16}).plan
    assert plan.ops_by_dtype()["linear"] == {"float32": 1}


def test_what_a_profile_keeps_in_fp32_is_counted(fast_bf16: str, caplog: pytest.LogCaptureFixture) -> None:
    ep = amp_fx.export(nn.Linear(2, 2).eval(), (torch.randn(2, 2),), profile=fast_bf16)
    assert stored_dtypes(ep)["weight"] is FP32
    assert all(each in caplog.text for each in ("1 of 1", "torch.bfloat16", "made up", "profile='off'"))
    caplog.clear()
    # two inputs: the small one would pay for a cast of its own
    both = Parts(lambda m, x, y: (m.small(x), m.large(y)), small=nn.Linear(2, 2), large=nn.Linear(512, 512))
    ep = amp_fx.export(both.eval(), (torch.randn(2, 2), torch.randn(512, 512)), profile=fast_bf16)
    assert {BF16, FP32} <= set(stored_dtypes(ep).values())
    assert "1 of 2" in caplog.text


def test_this_machines_profile_decides_nothing_unless_asked() -> None:
    assert stored_dtypes(amp_fx.export(nn.Linear(2, 2).eval(), (torch.randn(2, 2),)))["weight"] is BF16


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (nn.Linear(8, 8).half(), {}),
        (nn.Linear(8, 8).bfloat16(), {"profile": "auto"}),
        (nn.ReLU(), {"profile": "auto"}),
        (nn.Linear(8, 8), {"policy": {"rules": [{"op": "linear", "precision": "fp32"}]}, "profile": "auto"}),
    ],
    ids=["fp16", "bf16", "nothing to lower", "the user's own rule"],
)
def test_what_no_profile_has_decided_is_blamed_on_none(model: nn.Module, options: Any, caplog: Any) -> None:
    dtype = next((parameter.dtype for parameter in model.parameters()), FP32)
    amp_fx.export(model.eval(), (torch.randn(2, 8, dtype=dtype),), **options)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtyp": "float16"}, r"'dtyp' .*'dtype'"),
        ({"scaler": "default"}, r"'scaler'"),
        ({"max_autotune": True}, r"aoti_compile_and_package"),
        ({"tables": "lo"}, r"tables 'lo'.*'tied', 'low', 'keep'"),
        ({"weights_beyond_range": "ignore"}, r"'ignore'.*'raise', 'clamp', 'keep'"),
        # refused, not ignored
        ({"policy": {"base": "autocast", "sensitivity": "sensitivity.json"}}, "sensitivity"),
        ({"fp8": "rowwise"}, "policy='fp8'"),
    ],
)
def test_bad_options_are_named(options: Any, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Sensitivity("MLP", BF16).save("sensitivity.json")
    with pytest.raises(OptionsError, match=message):
        amp_fx.export(mlp(), (torch.randn(4, 16),), **options)


def test_metadata_that_no_autocast_explains_is_refused_with_the_fix() -> None:
    ep = torch.export.export(UpDown(16, 32, 8).eval(), (torch.randn(4, 16),))
    relu = next(node for node in ep.graph.nodes if node.target is aten.relu.default)
    relu.meta["val"] = relu.meta["val"].to(BF16)
    with pytest.raises(CaptureError, match=r"relu .*torch.bfloat16.*amp_fx\.export"):
        amp_fx.convert(ep)


@pytest.mark.parametrize(
    "mapped",
    [
        lambda m, x: torch.vmap(lambda row: m.inner(row).relu())(x),
        lambda m, x: torch.vmap(lambda row: sum(row.clone().mul_(2).split(16)))(x),
        lambda m, x: torch.vmap(torch.vmap(lambda value: value * 2))(x),
    ],
    ids=["a linear", "a write and a split", "one in the other"],
)
def test_what_is_inside_vmap_stays_and_the_rest_is_low(mapped: Any, tmp_path: Path) -> None:
    parts = {"first": nn.Linear(32, 32), "inner": nn.Linear(32, 32)}
    model, x = Parts(lambda m, x: mapped(m, m.first(x)), **parts).eval(), torch.randn(4, 32)
    ep = converted(model, x)
    assert stored_dtypes(ep)["first.weight"] is BF16
    assert stored_dtypes(ep)["inner.weight"] is FP32
    if torch.__version__ >= "2.13":
        # before, torch saves no program with vmap inside
        torch.export.save(ep, tmp_path / "mapped.pt2")
        ep = torch.export.load(tmp_path / "mapped.pt2")
    with torch.no_grad():
        assert 0 < error_of(ep.module()(x), exact(model, x)) < 1e-2


def test_a_cast_of_a_weight_that_is_written_to_or_returned_is_not_the_stored_weight() -> None:
    def call(m: Any, x: Tensor) -> tuple[Tensor, ...]:
        (doubled := m.a.weight.bfloat16()).mul_(2)
        return m.a(x), x.bfloat16() @ doubled.T, m.b(x), m.b.weight.bfloat16()

    model, x = Parts(call, a=nn.Linear(16, 16), b=nn.Linear(16, 16)).requires_grad_(False), torch.randn(4, 16)
    module = converted(model, x).module()
    for _ in range(2):
        for got, wanted in zip(module(x), model(x), strict=True):
            assert error_of(got, wanted.double()) < 0.01
            got.zero_()


@pytest.mark.parametrize("int8_range", ["full", "reduced"])
def test_sums_that_torch_clamps_on_this_cpu_are_warned_about(
    int8_range: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("amp_fx.exporting.converting.multiplies_int8", lambda: False)
    # the last linear is not in int8
    ep = converted(UpDown(16, 32, 8), torch.randn(32, 16), policy="int8", int8_range=int8_range)
    assert len(ep.graph.find_nodes(op="call_function", target=aten._int_mm.default)) == 1
    assert ("clamps sums" in caplog.text) == (int8_range == "full")
