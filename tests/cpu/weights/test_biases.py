"""What is left of a folded norm is a bias in fp32 beside weights in 16 bits, whatever oneDNN adds as well."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.checks.below_16_bits import error_of
from support.tracing.captured_graphs import DEFAULTS

KINDS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(32, 32, 3, padding=1), lambda: nn.BatchNorm2d(32), (4, 32, 12, 12)),
    "convolution of a signal": (
        lambda: nn.Conv1d(32, 32, 3, padding=1),
        lambda: nn.BatchNorm1d(32),
        (4, 32, 64),
    ),
    "product": (lambda: nn.Linear(64, 64), lambda: nn.BatchNorm1d(64), (64, 64)),
}


class Residual(nn.Module):
    """A sum, or a difference, behind a norm, and another call behind that."""

    def __init__(self, kind: str, behind: str) -> None:
        super().__init__()
        call, norm, _ = KINDS[kind]
        self.first, self.norm, self.last, self.behind = call(), norm(), call(), behind
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        # large beside what is multiplied: rounded it would be most of the error
        self.norm.bias.data.normal_(std=30)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        if self.behind == "nothing":
            return y
        if self.behind == "sum in place":
            # nobody else reads what is added: oneDNN writes over it
            return y + self.last(x)
        y = y - x if self.behind == "difference" else y + x
        return self.last(y.relu() if self.behind == "sum, relu" else y)


@pytest.mark.bf16
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("behind", ["nothing", "sum", "sum, relu", "sum in place", "difference"])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_and_norms_err_no_more_than_autocast(kind: str, behind: str, dynamic: bool | None) -> None:
    torch.manual_seed(0)
    model, x = Residual(kind, behind).eval(), torch.randn(KINDS[kind][2])
    run = torch.compile(model, backend="amp_fx", options=dict(DEFAULTS), dynamic=dynamic)
    with torch.inference_mode():
        exact = copy.deepcopy(model).double()(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            autocast = error_of(model(x), exact)
        assert error_of(run(x), exact) < 1.05 * autocast
        model.norm.bias.data.mul_(2)
        assert error_of(run(x), copy.deepcopy(model).double()(x.double())) < 1.1 * autocast
