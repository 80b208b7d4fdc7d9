"""Weights that are stored below 16 bits under two names."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from support.checks.below_16_bits import FP8_CPU


class Tied(nn.Module):
    """A matrix whose columns are multiplied, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.columns = nn.Parameter(torch.randn(32, 64) / 8)
        self.again = self.columns

    def forward(self, tokens: Tensor) -> Tensor:
        return self.first(F.one_hot(tokens, 64).float()) @ self.columns + F.one_hot(tokens, 64).float()


def test_inputs_have_the_sizes_of_what_is_stored_under_either_name_of_a_tied_matrix(tmp_path: Path) -> None:
    FP8_CPU.save(tmp_path / "profile.json")
    model = Tied().eval().requires_grad_(False)
    profile = str(tmp_path / "profile.json")
    program = amp_fx.export(model, (torch.randint(64, (3, 5)),), policy="fp8", profile=profile)
    inputs = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    held = {
        spec.arg.name: program.state_dict[spec.target]
        for spec in program.graph_signature.input_specs
        if spec.target
    }
    assert {name: (value.shape, value.dtype) for name, value in held.items()} == {
        name: (inputs[name].shape, inputs[name].dtype) for name in held
    }
    assert [tuple(program.state_dict[name].shape) for name in ("columns", "again")] == [(64, 32)] * 2
