"""ONNX files where they are used: onnxruntime and OpenVINO."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

import amp_fx
from amp_fx.exporting.as_written import as_written
from examples import hugging_face
from support.checks.below_16_bits import error_of, exact
from support.models.small import Beyond, Parts


def _allowed(error: float) -> float:
    return 1.1 * error + 1e-3


def _onnx(ep: ExportedProgram, path: Path, **options: Any) -> Path:
    program = torch.onnx.export(ep, dynamo=True, verbose=False, **options)
    assert program is not None
    program.save(str(path))
    return path


def _ran(path: Path | bytes, *inputs: Tensor) -> Tensor:
    """What onnxruntime computes."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    given = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return torch.from_numpy(session.run(None, given)[0])


def test_onnxruntime_runs_a_program_in_fp16(tmp_path: Path) -> None:
    net = hugging_face.bert(layers=1, width=256, heads=2, vocab=256, length=32, hidden=1024)
    model, x = Parts(lambda m, x: m.net(x).logits, net=net).eval(), torch.randint(256, (3, 32))
    ep = amp_fx.export(model, (x,), dtype="float16", profile="off")
    outputs = _ran(_onnx(ep, tmp_path / "model.onnx"), x)
    with torch.no_grad():
        fp16, fp32, wide = ep.module()(x), model(x), copy.deepcopy(model).double()(x)
    assert outputs.dtype is torch.float32
    assert error_of(outputs, wide) <= _allowed(error_of(fp16, wide))
    assert error_of(outputs, wide) > 10 * error_of(fp32, wide), "it really computes in fp16"


def _norms() -> Parts:
    """Every norm between low calls."""

    def call(m: Any, x: Tensor) -> Tensor:
        x = m.linear(m.convolutions(x).mean((1, 2)))
        return m.last(m.layer(x) + m.flat(x))

    first, second = nn.Conv2d(3, 16, 3), nn.ConvTranspose2d(16, 8, 3)
    norms = nn.BatchNorm2d(16), nn.InstanceNorm2d(8, affine=True)
    convolutions = nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1])
    others = {"linear": nn.Linear(12, 16), "layer": nn.LayerNorm(16), "flat": nn.BatchNorm1d(16)}
    return Parts(call, convolutions=convolutions, **others, last=nn.Linear(16, 8))


def _check(outputs: Tensor, ep: ExportedProgram, model: nn.Module, x: Tensor) -> None:
    wide = exact(model, x)
    with torch.no_grad():
        assert error_of(outputs, wide) <= _allowed(error_of(ep.module()(x), wide))


@pytest.mark.parametrize(
    "options", [{"dtype": "float16"}, {"dtype": "bfloat16"}, {"policy": "int8", "profile": "off"}], ids=str
)
def test_a_file_is_written_checked_and_runs_in_openvino_and_onnxruntime(
    tmp_path: Path, options: Any, caplog: Any
) -> None:
    import openvino

    path, model, x = tmp_path / "model.onnx", _norms().eval(), torch.randn(8, 3, 12, 12)
    with caplog.at_level(logging.INFO, "amp_fx.exporting"):
        ep = amp_fx.export_onnx(model, (x,), path, **options)
    # onnxruntime has no kernels for bf16
    is_run = options.get("dtype") == "float16"
    assert ("not as it is" in caplog.text) is not is_run
    if is_run:
        _check(_ran(path, x), ep, model, x)
    assert "was not run" not in caplog.text
    _check(_ran(as_written(path).model, x), ep, model, x)
    # by itself OpenVINO rounds what the file has in fp32
    run = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    _check(torch.from_numpy(run([x.numpy()])[0]), ep, model, x)


def test_onnxruntime_adds_biases_to_products_in_int8(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval(), torch.randn(32, 64) / 64
    ep = amp_fx.export_onnx(model, (x,), path := tmp_path / "model.onnx", dtype="float16", policy="int8")
    _check(_ran(path, x), ep, model, x)


@pytest.mark.int8
@pytest.mark.parametrize(
    "dynamic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fixed", "dynamic"]
)
def test_products_in_int8_are_unsigned_by_signed_and_read_no_table(tmp_path: Path, dynamic: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.Linear(64, 8)).eval()
    x, path = torch.randn(6, 40, 64), tmp_path / "model.onnx"
    shapes = ({0: torch.export.Dim("batch", min=2)},) if dynamic else None
    ep = amp_fx.export_onnx(model, (x,), path, dtype="float16", policy="int8", dynamic_shapes=shapes)
    graph: Any = onnx_ir.load(path).graph
    products = [node for node in graph if node.op_type == "MatMulInteger"]
    assert [[str(value.dtype) for value in node.inputs] for node in products] == [
        ["UINT8", "INT8", "UINT8"]
    ] * 2
    # indices by which views were read grew with the rows
    assert not any(node.op_type == "Gather" for node in graph)
    assert (
        max(value.const_value.size for value in graph.initializers.values() if value.dtype.name == "INT64")
        < 8
    )
    x = torch.randn(9, 40, 64) if dynamic else x
    with torch.no_grad():
        program = ep.module()(x)
    # the same bytes, multiplied alike; what is rounded to fp16 in between may fall to either side
    assert error_of(_ran(path, x), program.double()) < 1e-3


def test_views_by_strides_have_their_elements_and_the_model_may_write_to_its_inputs(tmp_path: Path) -> None:
    def call(_: Any, x: Tensor) -> tuple[Tensor, ...]:
        whole, part = x.as_strided((6, 2), (2, 1)), x.as_strided((2, 3), (3, 1))
        return (
            whole + 1,
            part + 1,
            x.as_strided((3, 4), (1, 3)) + 1,
            x.as_strided((2, 2), (2, 1), 3) + 1,
            x.add_(1),
        )

    path, x = tmp_path / "model.onnx", torch.randn(3, 4)
    amp_fx.export_onnx(Parts(call, none=nn.Identity()).eval(), (x.clone(),), path)
    wanted = call(None, x.clone())
    import onnxruntime

    found = onnxruntime.InferenceSession(path).run(None, {"args_0": x.numpy()})
    for got, true in zip(found, wanted, strict=True):
        assert torch.equal(torch.from_numpy(got), true)


@pytest.mark.int8
def test_a_plan_for_openvino_multiplies_all_in_integers_there(tmp_path: Path) -> None:
    import openvino

    model = nn.Sequential(
        nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 16)
    ).eval()
    # of rows that differ in size, scales of a row err less
    x = torch.randn(64, 64) * torch.logspace(0, 1, 64)[:, None]
    found = amp_fx.calibrate(model, [x], of="outputs", policy="int8", profile="off")
    plan = found.plan(budget=100, verify=False, engine="openvino")
    usual = found.plan(budget=100, verify=False)
    assert not all(row.scales for row in usual.plans[0].nodes if row.levels_below)
    below = [row for row in plan.plans[0].nodes if row.levels_below]
    assert below
    assert all(row.scales for row in below)
    ep = amp_fx.export_onnx(model, (x,), path := tmp_path / "model.onnx", plan=plan, engine="openvino")
    run = openvino.Core().compile_model(path, "CPU")
    kinds = [op.get_rt_info() for op in run.get_runtime_model().get_ordered_ops()]
    products = [info for info in kinds if info["layerType"].astype(str) == "FullyConnected"]
    # by measured scales, and by none the last
    found_dtypes = [info["runtimePrecision"].astype(str) for info in products]
    assert found_dtypes.count("u8") == len(below)
    assert len(products) == 3
    _check(torch.from_numpy(run([x.numpy()])[0]), ep, model, x)
    # the engine that runs no int8 gets none
    assert not any(row.levels_below for row in found.plan(verify=False, engine="tensorrt").plans[0].nodes)


def test_a_product_of_bytes_that_no_plan_made_is_exact(tmp_path: Path) -> None:
    weight = torch.randint(-128, 128, (32, 16), dtype=torch.int8)
    model = Parts(lambda _, x: torch.ops.aten._int_mm(x, weight).float(), none=nn.Identity()).eval()
    x = torch.randint(-128, 128, (24, 32), dtype=torch.int8)
    amp_fx.export_onnx(model, (x,), path := tmp_path / "model.onnx")
    assert torch.equal(_ran(path, x), x.int().matmul(weight.int()).float())


def test_weights_that_are_held_in_int8_have_no_reduced_range() -> None:
    model, x = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)).eval(), torch.randn(32, 64)
    amp_fx.store_low(model, (x,), options={"policy": "int8", "profile": "off"})
    with pytest.raises(amp_fx.OptionsError, match="store_low"):
        amp_fx.export(model, (x,), policy="int8", int8_range="reduced")


def test_a_model_that_overflows_in_fp16_is_named_by_its_line(tmp_path: Path) -> None:
    model, args, path = Beyond().eval(), (torch.randn(4, 64),), tmp_path / "model.onnx"
    with pytest.raises(amp_fx.ExportError, match=r"small.py:\d+: .*square.*beyond float16"):
        amp_fx.export_onnx(model, args, path, dtype="float16")
    # onnxruntime by itself computes squares in fp32
    assert _ran(path, *args).isfinite().all()
    # the rule has the mean of squares in fp32, too
    rule = {"op": "square", "precision": "fp32"}
    amp_fx.export_onnx(model, args, path, dtype="float16", policy={"rules": [rule]})


class _Scaled(nn.Module):
    """A product beyond fp16 that is scaled down by the next call."""

    def __init__(self, size: float) -> None:
        super().__init__()
        nn.init.constant_((linear := nn.Linear(64, 64, bias=False)).weight, size / 64)
        self.body = nn.Sequential(linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) / 1024


def test_an_overflow_that_onnxruntime_does_not_compute_is_named_with_its_module(tmp_path: Path) -> None:
    path, x, model = tmp_path / "model.onnx", torch.ones(2, 64), _Scaled(71680.0).eval()
    with pytest.raises(amp_fx.ExportError, match=r"71,680.*float16.*\"module\": \"body.0\"") as error:
        amp_fx.export_onnx(model, (x,), path, dtype="float16")
    assert "Gemm" in str(error.value)
    # the file itself does not overflow there, and its copy does
    assert _ran(path, x).isfinite().all()
    assert _ran(as_written(path).model, x).isinf().all()
    amp_fx.export_onnx(model, (x,), path, dtype="bfloat16")
    amp_fx.export_onnx(_Scaled(65504.0).eval(), (x,), path, dtype="float16", keep_io_dtypes=False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_copy_of_a_file_rounds_as_the_program_does(tmp_path: Path, dtype: str) -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        x = torch.cond(x.sum() > 0, lambda x: x + m.first(x).relu(), lambda x: x - 1, (x,))
        return m.last(m.first(x) * 3 + x)

    model = Parts(call, first=nn.Linear(64, 64), last=nn.Linear(64, 64)).eval()
    x, path = torch.rand(8, 64), tmp_path / "model.onnx"
    ep = amp_fx.export_onnx(model, (x,), path, dtype=dtype)
    with torch.no_grad():
        program, wide = ep.module()(x), exact(model, x)
    copied = _ran(as_written(path).model, x)
    assert error_of(copied, wide) <= 1.1 * error_of(program, wide)
    assert error_of(copied, program.double()) < 0.3 * error_of(program, wide), (
        "it rounds where the program does"
    )


def test_a_loop_hands_on_values_in_16_bits_and_its_body_rounds(tmp_path: Path) -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 20]>
        agraph (float16[4] x) => (float16[4] y) {
            times = Constant <value_int: int = 2> ()
            y = Loop (times, , x) <body = body (int64 i, bool on, float16[4] state) => (bool more, float16[4] next) {
                more = Identity (on)
                next = Add (state, state)
            }>
        }
    """
    onnx.save(onnx.parser.parse_model(text), path := tmp_path / "model.onnx")
    found = _ran(as_written(path).model, torch.tensor([1.0, 2.5, 1 / 3, 20000.0]))
    third = float(torch.tensor(1 / 3, dtype=torch.float16)) * 4
    assert found.tolist() == [4.0, 10.0, third, math.inf]


def _attending(m: Any, x: Tensor, flags: Tensor) -> Tensor:
    """Attention by a boolean mask, by -inf, and by the lowest number, whose rows are no zeros."""
    query, key, value = m.first(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4).unbind(0)
    masks = [flags, *(torch.zeros(flags.shape).masked_fill(~flags, low) for low in (-math.inf, _LOWEST))]
    return torch.stack([F.scaled_dot_product_attention(query, key, value, mask) for mask in masks])


_LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        {"dtype": "float16", "policy": {"rules": [{"module": ".*", "precision": "fp32"}]}},
    ],
    ids=["float16", "bfloat16", "float32"],
)
def test_rows_of_attention_that_are_masked_whole_are_zeros_as_in_torch(tmp_path: Path, options: Any) -> None:
    import openvino

    model, path = Parts(_attending, first=nn.Linear(32, 96)).eval(), tmp_path / "model.onnx"
    flags = torch.rand(2, 1, 6, 6) > 0.4
    flags[0, :, 1:3], flags[..., 4:, 0] = False, True
    x = torch.randn(2, 6, 32)
    # its check runs what onnxruntime has kernels for, and the copy in all dtypes
    amp_fx.export_onnx(model, (x, flags), path, **options)
    with torch.no_grad():
        wanted = model(x, flags)
    most = 0.01 if options["dtype"] == "bfloat16" else 2e-3
    run = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    copied = _ran(as_written(path).model, x, flags)
    for found in (torch.from_numpy(run([x.numpy(), flags.numpy()])[0]), copied):
        assert error_of(found, wanted) < most
        assert not found[:2, 0, :, 1:3].any()
        assert found[2, 0, :, 1:3].all()


def test_a_file_that_computes_otherwise_is_anerror_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (torch.randn(4, 16),)
    other = amp_fx.export(nn.Linear(16, 4).eval(), args, dtype="float16")
    monkeypatch.setattr("amp_fx.exporting.onnx_file.export", lambda *_, **__: other)
    for fill in (nn.init.ones_, nn.init.zeros_):
        fill((model := nn.Linear(16, 4, bias=False).eval()).weight)
        with pytest.raises(amp_fx.ExportError, match="from the model's"):
            amp_fx.export_onnx(model, args, tmp_path / "model.onnx")
    with pytest.raises(amp_fx.ExportError, match="no folder"):
        amp_fx.export_onnx(model, args, tmp_path / "nowhere" / "model.onnx")


def test_a_model_in_training_mode_is_told_to_evaluate_and_no_precision_is_blamed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.9), nn.Linear(16, 4))
    with pytest.raises(
        amp_fx.ExportError, match=r"from the model's.*'1' \(Dropout\).*model\.eval\(\)"
    ) as error:
        amp_fx.export_onnx(model, (torch.randn(64, 16),), tmp_path / "model.onnx", dtype="float16")
    assert "precision" not in str(error.value)


def test_onnxruntime_says_that_it_has_no_bf16_kernels_on_cpu(tmp_path: Path) -> None:
    program = amp_fx.export(nn.Linear(8, 8).eval(), (x := torch.randn(2, 8),), profile="off")
    path = _onnx(program, tmp_path / "m.onnx")
    with pytest.raises(Exception, match=r"NOT_IMPLEMENTED.*Gemm"):
        _ran(path, x)
