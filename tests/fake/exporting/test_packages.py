"""What AOTInductor is asked for, of which programs; real packages are in tests/cpu/exporting."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import amp_fx
from amp_fx.exporting import packaging
from amp_fx.placement import devices
from amp_fx.plans.label import Kind, Reason
from levels import FP8_CPU
from small_models import Parts

ZEN5 = devices._cpu_profile(next(row for row in devices._CPUS if row.name == "avx512_bf16 zen5"), 1)
FLASH, BMM, MASKED = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
)
OP = "scaled_dot_product_attention"
ATTENTION = getattr(torch.ops.aten, OP).default


class Asked:
    """Takes the place of AOTInductor: its options, and what its graph has after the passes on joint graphs."""

    def __init__(self, *, fails: bool = False) -> None:
        self.configs: dict[str, Any] = {}
        self.calls: Counter[object] = Counter()
        self._fails = fails

    def __call__(self, program: ExportedProgram, path: str, configs: dict[str, Any]) -> None:
        assert path.endswith(".pt2")
        if self._fails:
            raise RuntimeError("no compiler")
        # as AOTAutograd does on a CPU
        kernels = {ATTENTION: lambda query, key, value: FLASH(query, key, value)[0]}
        gm, self.configs = program.run_decompositions(kernels).graph_module, configs
        if "joint_custom_pre_pass" in configs:
            configs["joint_custom_pre_pass"](gm.graph)
        self.calls = Counter(node.target for node in gm.graph.nodes if node.op == "call_function")


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


def test_weights_are_folded_and_attention_is_products_where_this_cpu_takes_less_time_for_them(
    asked: Asked, tmp_path: Path
) -> None:
    path = tmp_path / "package.pt2"
    assert amp_fx.package(program(), path) == str(path)
    assert asked.configs["freezing"] is True
    assert written(asked) == (0, 2, 1)
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
    for kind, wanted in ((Kind.FLASH, (1, 0, 0)), (Kind.LOW_PRODUCTS, (0, 2, 0)), (Kind.PRODUCTS, (0, 2, 1))):
        (row,) = [row for row in plan.nodes if row.op == OP]
        row.reasons += (Reason.of(kind, why="measured"),)
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
    assert written(asked) == (0, 2, 1)
    # bit for bit as eager PyTorch
    amp_fx.package(
        program(numerics="eager"), "package.pt2", inductor_configs={"emulate_precision_casts": True}
    )
    assert asked.configs == {"emulate_precision_casts": True}


def test_weights_in_fp8_stay_so(asked: Asked, tmp_path: Path) -> None:
    FP8_CPU.save(tmp_path / "profile.json")
    given: Any = {"policy": "fp8", "fp8": "rowwise", "profile": str(tmp_path / "profile.json")}
    amp_fx.package(program(**given), "package.pt2")
    assert "freezing" not in asked.configs


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


@pytest.mark.parametrize("how", ["exported", "loaded", "decomposed"])
def test_what_a_program_writes_to_is_not_folded(asked: Asked, tmp_path: Path, how: str) -> None:
    with torch.no_grad():
        ours = amp_fx.export(Cache().eval(), (torch.randn(2, 64),))
    if how == "loaded":
        torch.export.save(ours, tmp_path / "program.pt2")
        ours = torch.export.load(tmp_path / "program.pt2")
    elif how == "decomposed":
        ours = ours.run_decompositions({})
    amp_fx.package(ours, "package.pt2")
    assert "freezing" not in asked.configs
    with pytest.raises(amp_fx.OptionsError, match="fold the values that rows had"):
        amp_fx.package(ours, "package.pt2", inductor_configs={"freezing": True})


def test_a_path_that_aotinductor_does_not_take_is_refused(asked: Asked) -> None:
    with pytest.raises(amp_fx.OptionsError, match=r"ends in \.pt2.*'package\.so'"):
        amp_fx.package(program(), "package.so")
