"""Models with trained weights, exported and compiled in bf16: no less accurate than eager torch.autocast.

The weights come inside of the packages of ``benchmarks/trained/requirements.txt``; without them tests are skipped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import amp_fx
from benchmarks.errors import distance
from benchmarks.trained.models import MODELS
from benchmarks.workloads import Batch, Workload
from support.tracing.captured_graphs import op_by_op

pytestmark = [
    pytest.mark.slow,
    # of the packages
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

BF16 = torch.bfloat16


@pytest.fixture(params=MODELS)
def workload(request: pytest.FixtureRequest) -> Workload:
    try:
        return MODELS[request.param]()
    except ImportError as missing:
        pytest.skip(f"{missing}: see benchmarks/trained/requirements.txt")


def outputs(model: Callable[..., Tensor], batches: Sequence[Batch]) -> list[Tensor]:
    with torch.inference_mode():
        return [model(**batch).double() for batch in batches]


def test_outputs_are_at_least_as_accurate_as_autocasts(workload: Workload) -> None:
    model, batches = workload.model, workload.held_out[:3]
    wide = [{k: v.double() if v.is_floating_point() else v for k, v in batch.items()} for batch in batches]
    exact = outputs(copy.deepcopy(model).double(), wide)
    try:
        with torch.autocast("cpu", BF16):
            autocast = distance(outputs(model, batches), exact)
    except RuntimeError as error:
        pytest.skip(f"torch.autocast does not run it here: {error}")
    found = {}
    # of CHGNet torch.export makes no program: how many atoms a graph has depends on data
    if "CHGNet" not in str(model):
        program = amp_fx.export(model, (), batches[0], profile="off")
        found["exported"] = distance(outputs(program.module(), batches), exact) / autocast
    compiled = torch.compile(model, backend="amp_fx", options={"profile": "off"})
    with op_by_op():
        found["compiled"] = distance(outputs(compiled, batches), exact) / autocast
    print(f"error of autocast {autocast:.2e}, of that:", found)
    # one program differs from the other in where it rounds, by two in a hundred
    assert max(found.values()) <= 1.02
