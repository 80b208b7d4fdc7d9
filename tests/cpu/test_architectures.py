"""Architectures by generated code: no warning, the gradient of each parameter and each output as accurate as
autocast's, and at least its share of FLOPs in 16 bits.

``pytest tests/cpu/test_architectures.py -k vae`` runs some. A model of one layer has errors of few roundings, so that
errors are those of several batches together.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import amp_fx
from support.checks.step_errors import AMP_FX, AUTOCAST, EAGER_AUTOCAST, FP64, far_off, run
from support.models.architectures import ARCHITECTURES, make
from support.models.zoo import Case

pytestmark = [
    pytest.mark.slow,
    # of functions of transformers and diffusers that ask which libraries there are; stock Inductor warns alike
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
]

#: of the batches
_SEEDS = range(4)
_LOW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_train_as_accurately_as_under_autocast_and_with_its_share_of_low_flops(
    name: str,
) -> None:
    case = make(name)
    with amp_fx.record() as recording:
        ours = run(case, AMP_FX, torch.enable_grad, _SEEDS)
    exact, eager, compiled = (
        run(case, arm, torch.enable_grad, _SEEDS) for arm in (FP64, EAGER_AUTOCAST, AUTOCAST)
    )
    failed = far_off(ours, exact, eager, compiled)
    counted, low = _flops(case)
    planned = [node for plan in recording.plans if plan.phase == "forward" for node in plan.nodes]
    total = max(counted, sum(node.flops for node in planned))
    if (share := sum(node.flops for node in planned if node.computed in _LOW) / total) < low / counted - 1e-3:
        failed["share of FLOPs in 16 bits"] = f"{share:.3f}, autocast's {low / counted:.3f}"
    assert not failed


class _Flops(TorchDispatchMode):
    """Counts FLOPs of a forward, and those of calls in 16 bits."""

    total = low = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            flops = count(*args, **(kwargs or {}), out_val=result)
            self.total += flops
            first = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            self.low += flops * (first.dtype in _LOW)
        return result


def _flops(case: Case) -> tuple[int, int]:
    """FLOPs of a forward under eager autocast, and those of them in 16 bits."""
    model, batch = copy.deepcopy(case.model), case.inputs(0)
    with _Flops() as counter, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        case.run(model, batch)
    return counter.total, counter.low
