"""Packages of programs with sizes that are not known, up to AOTInductor; real ones are in tests/cpu/exporting."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.export import Dim, ExportedProgram

import amp_fx
from amp_fx._torch import LINEAR
from amp_fx.exporting import packaging
from support.models.any_length import SIZED, make

#: model -> the dimensions of its inputs that are not known, and how many products by packed weights its package has
CASES: dict[str, tuple[tuple[tuple[int, ...], ...], int]] = {
    "grouped": (((0, 1),), 2),
    "gated": (((0, 1),), 2),
    "learned queries": (((0, 1),), 3),
    "queries of a batch": (((0, 1),), 2),
    "tied": (((0, 1),), 2),
    "experts": (((0, 1),), 2),
    "memory": (((0, 1), (0, 1)), 3),
}


@pytest.mark.parametrize("sizes", ["fixed", "unknown"])
@pytest.mark.parametrize("name", CASES)
def test_packages_join_and_pack_alike_whether_sizes_are_known(
    name: str, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims, products = CASES[name]
    asked: list[ExportedProgram] = []
    monkeypatch.setattr(packaging, "compile_package", lambda program, *_: asked.append(program))
    # Inductor would hold what is packed
    monkeypatch.setattr(packaging, "HoldPacked", lambda *_: SimpleNamespace(packed=()))
    shapes = tuple(dict.fromkeys(given, Dim.AUTO) for given in dims)
    # in fp32, which oneDNN packs on any CPU
    rules = {"rules": [{"op": op, "precision": "fp32"} for op in ("linear", "bmm")]}
    with torch.no_grad():
        given = SIZED[name].inputs(2, 6)
        dynamic = (shapes,) if sizes == "unknown" else None
        program = amp_fx.export(make(name), given, dynamic_shapes=dynamic, policy=rules)
    amp_fx.package(program, "package.pt2")
    calls = [node.target for node in asked[0].graph.nodes if node.op == "call_function"]
    assert calls.count(LINEAR) == products
