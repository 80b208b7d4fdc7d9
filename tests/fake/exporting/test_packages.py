"""What AOTInductor is asked for, of which programs; real packages are in tests/cpu/exporting."""

from __future__ import annotations

import operator
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import amp_fx
from amp_fx._torch import CONVOLUTION_INT8, LINEAR, LINEAR_INT8
from amp_fx.exporting import packaging
from amp_fx.graphs.calls import CAST
from amp_fx.precision.placement import devices
from support.checks.below_16_bits import FP8_CPU
from support.models.small import Parts

ZEN5 = devices.cpu_profile(next(row for row in devices.CPUS if row.name == "avx512_bf16 zen5"), 1)
FLASH, BMM, MASKED = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
)
WINDOW, ONES = torch.ops.aten.convolution.default, ([1, 1], [0, 0], [1, 1])
CONVOLUTION = torch.ops.mkldnn._convolution_pointwise.default
INT8_MM = torch.ops.aten._int_mm.default
OP = "scaled_dot_product_attention"
ATTENTION = getattr(torch.ops.aten, OP).default


class Asked:
    """Takes the place of AOTInductor: its options, and what its graph has after the passes on Inductor's graphs."""

    def __init__(self, *, fails: bool = False) -> None:
        self.configs: dict[str, Any] = {}
        self.calls: Counter[object] = Counter()
        #: constants that oneDNN has packed
        self.held = 0
        self._fails = fails

    def __call__(self, program: ExportedProgram, path: str, configs: dict[str, Any]) -> None:
        assert path.endswith(".pt2")
        if self._fails:
            raise RuntimeError("no compiler")
        # as AOTAutograd does on a CPU
        kernels = {
            ATTENTION: lambda query, key, value: FLASH(query, key, value)[0],
            torch.ops.aten._to_copy.default: lambda x, dtype: CAST(x, dtype),
            torch.ops.aten.conv2d.default: lambda x, weight: WINDOW(x, weight, None, *ONES, False, [0, 0], 1),
        }
        gm, self.configs = program.run_decompositions(kernels).module(), configs
        for stage in ("joint", "post_grad"):
            if (passes := configs.get(f"{stage}_custom_pre_pass")) is not None:
                passes(gm.graph)
        self.calls = Counter(node.target for node in gm.graph.nodes if node.op == "call_function")
        constants = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
        self.held = sum(operator.attrgetter(name)(gm).is_mkldnn for name in constants)
        assert not [call for call in map(str, self.calls) if "amp_fx" in call], (
            "what loads a package has no amp_fx"
        )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """On a Zen 5."""
    monkeypatch.setattr(devices, "builtin", lambda device: ZEN5)
    monkeypatch.setattr(packaging, "compile_package", found := Asked())
    return found


def program(length: int = 64, dynamic: Any = None, **options: Any) -> ExportedProgram:
    """A linear and attention."""

    def forward(model: Any, x: Tensor) -> Tensor:
        parts = model.linear(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)

    net = Parts(forward, linear=nn.Linear(128, 3 * 128)).eval()
    with torch.no_grad():
        return amp_fx.export(net, (torch.randn(2, length, 128),), dynamic_shapes=dynamic, **options)


def by_rule(implementation: str) -> dict[str, Any]:
    return {"rules": [{"op": OP, "precision": "low", "implementation": implementation}]}


def written(asked: Asked) -> tuple[int, int, int]:
    """Calls of the flash kernel, and of both products."""
    return asked.calls[FLASH], asked.calls[BMM], asked.calls[MASKED]


def packed(asked: Asked) -> tuple[int, int]:
    """Calls of oneDNN with packed weights, in floating point and in int8."""
    return asked.calls[LINEAR], asked.calls[LINEAR_INT8]


@pytest.mark.bf16
def test_weights_are_packed_and_attention_is_products_where_this_cpu_takes_less_time_for_them(
    asked: Asked, tmp_path: Path
) -> None:
    path = tmp_path / "package.pt2"
    assert amp_fx.package(program(), path) == str(path)
    assert (packed(asked), written(asked)) == ((1, 0), (0, 2, 1))
    amp_fx.package(program(4096), path)
    assert written(asked) == (1, 0, 0)
    # without rates nothing is known
    amp_fx.package(program(), path, profile="off")
    assert written(asked) == (1, 0, 0)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"policy": by_rule("flash")}, (1, 0, 0)),
        ({"policy": "fast"}, (0, 2, 0)),
        ({"dtype": "float16"}, (1, 0, 0)),
        ({"dynamic": (({0: Dim("batch", max=9)},),)}, (1, 0, 0)),
    ],
    ids=["a rule", "policy fast", "fp16", "unknown sizes"],
)
def test_what_the_program_was_exported_with_counts(
    asked: Asked, options: dict[str, Any], wanted: tuple[int, int, int]
) -> None:
    amp_fx.package(program(**options), "package.pt2")
    assert written(asked) == wanted


def test_of_a_file_the_report_is_read(asked: Asked, tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], Any]] = [({}, (0, 2, 1)), ({"policy": by_rule("flash")}, (1, 0, 0))]
    for options, wanted in rows:
        ours, path = program(**options), tmp_path / "program.pt2"
        torch.export.save(ours, path, extra_files=amp_fx.extra_files(ours))
        amp_fx.package(path, "package.pt2")
        assert written(asked) == wanted
    # without it
    torch.export.save(ours, path)
    amp_fx.package(str(path), "package.pt2")
    assert written(asked) == (0, 2, 1)


def test_a_plan_says_what_computes_attention(asked: Asked) -> None:
    plan = amp_fx.Plan.from_json(amp_fx.extra_files(program())["amp_fx.json"])
    for how, wanted in (("flash", (1, 0, 0)), ("products_low", (0, 2, 0)), ("products", (0, 2, 1))):
        (row,) = [row for row in plan.nodes if row.op == OP]
        row.computed_by = how
        amp_fx.package(program(plan=plan), "package.pt2")
        assert written(asked) == wanted


def test_a_program_of_any_other_origin_is_chosen_for_by_its_sizes(asked: Asked) -> None:
    net = Parts(lambda m, x: F.scaled_dot_product_attention(x, x, x), linear=nn.Linear(1, 1))
    plain = torch.export.export(net, (torch.randn(2, 2, 64, 64, dtype=torch.bfloat16),))
    amp_fx.package(plain, "package.pt2")
    assert written(asked) == (0, 2, 1)


def test_the_program_is_not_changed(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = program()
    (call,) = ours.graph.find_nodes(op="call_function", target=ATTENTION)
    before = dict(call.meta)
    amp_fx.package(ours, "package.pt2")
    assert call.meta == before
    monkeypatch.setattr(packaging, "compile_package", Asked(fails=True))
    with pytest.raises(RuntimeError, match=r"^no compiler$"):
        amp_fx.package(ours, "package.pt2")
    assert call.meta == before


def test_options_of_inductor_go_before_what_a_package_sets(asked: Asked) -> None:
    amp_fx.package(program(), "package.pt2", inductor_configs={"freezing": False, "max_autotune": True})
    assert (asked.configs["freezing"], asked.configs["max_autotune"]) == (False, True)
    assert (packed(asked), written(asked)) == ((0, 0), (0, 2, 1))
    # bit for bit as eager PyTorch
    amp_fx.package(
        program(numerics="eager"), "package.pt2", inductor_configs={"emulate_precision_casts": True}
    )
    assert asked.configs == {"emulate_precision_casts": True}


def test_weights_in_fp8_stay_so(asked: Asked, tmp_path: Path) -> None:
    FP8_CPU.save(tmp_path / "profile.json")
    given: Any = {"policy": "fp8", "fp8": "rowwise", "profile": str(tmp_path / "profile.json")}
    amp_fx.package(program(**given), "package.pt2")
    assert packed(asked) == (0, 0)


def in_int8(rows: int) -> ExportedProgram:
    """Two linears in int8 that read one value, and the last, which is in bf16."""

    def forward(model: Any, x: Tensor) -> Tensor:
        return model.down(model.gate(x).relu() * model.up(x))

    net = Parts(forward, gate=nn.Linear(64, 96), up=nn.Linear(64, 96), down=nn.Linear(96, 64)).eval()
    with torch.no_grad():
        return amp_fx.export(net, (torch.randn(rows, 64),), policy="int8", profile="off")


@pytest.mark.parametrize(
    ("rows", "multiplies", "wanted"),
    [(8, True, (2, 0)), (1, True, (0, 2)), (8, False, (0, 0))],
    ids=["rows", "a row", "without VNNI"],
)
def test_products_of_bytes_are_those_of_compiled_models(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, rows: int, multiplies: bool, wanted: tuple[int, int]
) -> None:
    monkeypatch.setattr(packaging, "multiplies_int8", lambda: multiplies)
    ours = in_int8(rows)
    assert len(ours.graph.find_nodes(op="call_function", target=INT8_MM)) == 2
    amp_fx.package(ours, "package.pt2")
    assert (asked.calls[LINEAR_INT8], asked.calls[INT8_MM]) == wanted


def test_convolutions_of_bytes_are_those_of_compiled_models(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packaging, "multiplies_int8", lambda: True)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)
    ).eval()
    x = torch.randn(2, 3, 9, 9)
    plan = amp_fx.calibrate(net, x, of="outputs", policy="int8", profile="off").plan(budget=100, verify=False)
    assert len([row for row in plan.plans[0].nodes if row.levels_below]) == 2
    with torch.no_grad():
        amp_fx.package(amp_fx.export(net, (x,), plan=plan), "package.pt2")
    assert asked.calls[CONVOLUTION_INT8] == 2


@pytest.mark.bf16
def test_convolutions_call_nothing_of_amp_fx_whether_the_weight_is_stored_or_given(asked: Asked) -> None:
    net = Parts(lambda m, x, w: F.conv2d(m.convolution(x), w), convolution=nn.Conv2d(3, 128, 3))
    args = torch.randn(2, 3, 9, 9), torch.randn(128, 128, 3, 3)
    with torch.no_grad():
        amp_fx.package(amp_fx.export(net.eval(), args), "package.pt2")
    assert asked.calls[CONVOLUTION] == 1
    assert asked.calls[WINDOW] == 1


def test_regions_of_autocast_stay_in_a_program_that_has_them(asked: Asked) -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.linear(x)

    plain = torch.export.export(Parts(forward, linear=nn.Linear(64, 64)), (torch.randn(2, 64),))
    amp_fx.package(plain, "package.pt2")
    # it casts what the linear reads, and nothing is packed
    assert (asked.calls[CAST], packed(asked)) == (3, (0, 0))


def test_a_product_that_nobody_reads_is_not_packed(asked: Asked) -> None:
    # as an encoder's pooler is: torch.export keeps it, and Inductor leaves it out
    net = Parts(
        lambda m, x: (m.pooler(x), m.linear(x))[1], pooler=nn.Linear(64, 64), linear=nn.Linear(64, 64)
    )
    amp_fx.package(torch.export.export(net, (torch.randn(2, 64),)), "package.pt2")
    assert asked.held == 1


@pytest.mark.bf16
def test_a_package_without_its_packed_weights_is_an_error(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packaging, "compile_package", lambda _, path, given: Path(path).touch())
    with pytest.raises(amp_fx.PassError, match=r"left out 1 of 1 packed weights"):
        amp_fx.package(program(), path := tmp_path / "package.pt2")
    assert not path.exists()


class Cache(nn.Module):
    """Writes to a buffer through a view of it."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("rows", torch.zeros(4, 64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.rows[:, :32].add_(y[:1, :32])
        return y @ self.rows.T


@pytest.mark.bf16
@pytest.mark.parametrize("how", ["exported", "loaded", "decomposed"])
def test_what_a_program_writes_to_is_not_folded_and_its_weights_are_packed(
    asked: Asked, tmp_path: Path, how: str
) -> None:
    with torch.no_grad():
        ours = amp_fx.export(Cache().eval(), (torch.randn(2, 64),))
    if how == "loaded":
        torch.export.save(ours, tmp_path / "program.pt2")
        ours = torch.export.load(tmp_path / "program.pt2")
    elif how == "decomposed":
        ours = ours.run_decompositions({})
    amp_fx.package(ours, "package.pt2")
    # not what is multiplied by the buffer
    assert packed(asked) == (1, 0)
    with pytest.raises(amp_fx.OptionsError, match="fold the values that rows had"):
        amp_fx.package(ours, "package.pt2", inductor_configs={"freezing": True})


def test_a_path_that_aotinductor_does_not_take_is_refused(asked: Asked) -> None:
    with pytest.raises(amp_fx.OptionsError, match=r"ends in \.pt2.*'package\.so'"):
        amp_fx.package(program(), "package.so")
    with pytest.raises(amp_fx.ExportError, match=r"cannot write .*no folder"):
        amp_fx.package(program(), "absent/package.pt2")
