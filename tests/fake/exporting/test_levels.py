"""Programs that are exported in fp8, or by a plan: what is stored, what they compute. No code is generated."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import amp_fx
from amp_fx import Plan
from levels import FP8_CPU, calls, error
from small_models import Parts

FP8 = torch.float8_e4m3fn

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")


class Net(nn.Module):
    """A linear whose weight is a buffer, two that share one, one whose columns are multiplied, and a tied head."""

    up: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 32)
        self.register_buffer("up", torch.randn(64, 32) / 6)
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.columns = nn.Parameter(torch.randn(64, 32) / 8)
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        y = F.gelu(F.linear(x, self.up))
        y = self.second(F.gelu(self.first(y)))
        return F.linear(self.norm(x + y @ self.columns), self.table.weight)


@pytest.fixture(scope="module")
def model() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


TOKENS = torch.randint(48, (3, 5), generator=torch.Generator().manual_seed(1))


def exported(model: nn.Module, folder: Path, **options: Any) -> ExportedProgram:
    FP8_CPU.save(folder / "profile.json")
    batch = {"tokens": {0: Dim("batch", min=1, max=64)}}
    options = {"policy": "fp8", "profile": str(folder / "profile.json"), **options}
    return amp_fx.export(model, (TOKENS,), dynamic_shapes=batch, **options)


@pytest.mark.parametrize(("recipe", "dtype"), [("rowwise", "bfloat16"), ("tensorwise", "float16")])
def test_a_program_computes_what_the_model_computes_and_is_saved(
    model: Net, tmp_path: Path, recipe: str, dtype: str
) -> None:
    program = exported(model, tmp_path, fp8=recipe, dtype=dtype)
    exact = copy.deepcopy(model).double()(TOKENS)
    found = program.module()(TOKENS)
    assert found.dtype is torch.float32
    assert 0.005 < error([found], [exact]) < 0.06
    files, path = {"amp_fx.json": ""}, tmp_path / "program.pt2"
    torch.export.save(program, path, extra_files=amp_fx.extra_files(program))
    again = torch.export.load(path, extra_files=files)
    assert torch.equal(again.module()(TOKENS), found)
    more = torch.cat([TOKENS, TOKENS.flip(0)])
    assert error([again.module()(more)], [copy.deepcopy(model).double()(more)]) < 0.06
    plan = Plan.from_json(files["amp_fx.json"])
    assert plan.meaning == recipe
    assert [row.computed is FP8 for row in plan.nodes if row.flops] == [True] * 4 + [False]


def test_weights_are_stored_in_fp8_with_their_factors(model: Net, tmp_path: Path) -> None:
    program = exported(model, tmp_path)
    low = torch.bfloat16
    stored = {name: (tuple(value.shape), value.dtype) for name, value in program.state_dict.items()}
    assert stored == {
        # what is contracted comes last
        "up": ((64, 32), FP8),
        "up_fp8_scale": ((64, 1), torch.float32),
        "first.weight": ((64, 64), FP8),
        # of tied weights, the name that the graph reads
        "second.weight_fp8_scale": ((64, 1), torch.float32),
        "second.weight": ((64, 64), FP8),
        "columns": ((32, 64), FP8),
        "columns_fp8_scale": ((32, 1), torch.float32),
        "first.bias": ((64,), low),
        "second.bias": ((64,), low),
        "table.weight": ((48, 32), low),
        "norm.weight": ((32,), torch.float32),
        "norm.bias": ((32,), torch.float32),
    }
    first, second = (program.state_dict[f"{name}.weight"] for name in ("first", "second"))
    assert first.data_ptr() == second.data_ptr()
    kept = program.state_dict["columns"].float() * program.state_dict["columns_fp8_scale"]
    assert error([kept.t()], [model.columns.detach().double()]) < 0.03
    # nothing is converted but what is not stored
    assert all(
        node.all_input_nodes[0].op != "placeholder"
        for node in calls(program.graph_module, torch.ops.aten.abs.default)
    )
    names = [spec.target for spec in program.graph_signature.input_specs if spec.target]
    assert sorted(names) == sorted(stored)


def test_what_reads_a_weight_otherwise_keeps_it_as_it_is(tmp_path: Path) -> None:
    class Read(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) * self.columns.sum()

    torch.manual_seed(0)
    model = Read().eval().requires_grad_(False)
    program = exported(model, tmp_path)
    assert program.state_dict["columns"].dtype is torch.float32
    assert "columns_fp8_scale" not in program.state_dict
    assert len(calls(program.graph_module, torch.ops.aten._scaled_mm.default)) == 4
    assert error([program.module()(TOKENS)], [copy.deepcopy(model).double()(TOKENS)]) < 0.1


def test_a_device_without_fp8_has_the_program_of_policy_autocast(model: Net) -> None:
    fp8, low = (amp_fx.export(model, (TOKENS,), policy=policy) for policy in ("fp8", "autocast"))
    assert torch.equal(fp8.module()(TOKENS), low.module()(TOKENS))
    assert Plan.from_json(amp_fx.extra_files(fp8)["amp_fx.json"]).meaning.startswith("as autocast: cpu ")


def _dtypes(plan: Plan) -> list[tuple[str, torch.dtype | None]]:
    """Of all calls; in Dynamo's graph of attention, ``contiguous`` stands where a program has none."""
    return [(row.op, row.dtype) for row in plan.nodes if row.op != "contiguous"]


@torch.no_grad()
def test_a_plan_of_the_compiled_model_is_followed_by_its_export() -> None:
    parts = {"attend": nn.MultiheadAttention(64, 4, batch_first=True), "out": nn.Linear(64, 64)}
    model = Parts(lambda m, x: m.out(m.attend(x, x, x, need_weights=False)[0]), **parts).eval()
    x = torch.randn(2, 16, 64)
    plan = amp_fx.explain(model, x, options={"profile": "off"}).plan
    program = amp_fx.export(model, (x,), plan=plan)
    followed = Plan.from_json(amp_fx.extra_files(program)["amp_fx.json"])
    assert _dtypes(followed) == _dtypes(plan)
    assert dict(_dtypes(followed))["scaled_dot_product_attention"] is torch.bfloat16
    back = amp_fx.explain(model, x, options={"profile": "off", "plan": (followed,)}).plan
    assert [(row.op, row.dtype) for row in back.nodes] == [(row.op, row.dtype) for row in plan.nodes]
    exact = model.double()(x.double())
    assert error([program.module()(x)], [exact]) < 4 * torch.finfo(torch.bfloat16).eps
