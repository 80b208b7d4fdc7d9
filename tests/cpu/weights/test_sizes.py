"""What is kept, joined, folded and packed of weights, where sizes are known, where they are not, and where they change.

In fp32 oneDNN packs weights on any CPU; in bf16 and int8 as this one does. A fallback is a warning, and so an error.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from amp_fx._torch import onednn_computes
from support.checks.below_16_bits import error
from support.models.any_length import SIZED, make

#: rows and lengths of a session's calls
CALLS = ((2, 6), (2, 9), (3, 7), (1, 1))

#: how sizes become unknown: by a second length, from the first call on, or where the program says so
FORMS = ("a second length", "dynamic=True", "mark_dynamic")

#: of what the profile decides about: bf16 where this CPU multiplies in it
_BY_PROFILE = 1e-2 if onednn_computes(torch.bfloat16) else 1e-5
#: options, and the error that they may have; the first is packed on any CPU
OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "cache": ({"weights": "cache"}, _BY_PROFILE),
    "freeze": ({"weights": "freeze"}, _BY_PROFILE),
    "defaults": ({}, _BY_PROFILE),
    "cache, bf16": ({"weights": "cache", "profile": "off"}, 1e-2),
    "auto, bf16": ({"profile": "off"}, 1e-2),
    "cast, bf16": ({"weights": "cast", "profile": "off"}, 1e-2),
    "freeze, fast": ({"weights": "freeze", "policy": "fast", "profile": "off"}, 1e-2),
    "cache, int8": ({"weights": "cache", "policy": "int8", "profile": "off"}, 0.03),
    "cast, int8": ({"weights": "cast", "policy": "int8", "profile": "off"}, 0.03),
    "freeze, int8": ({"weights": "freeze", "policy": "int8", "profile": "off"}, 0.03),
}


def exact(model: Any, args: Any) -> list[Tensor]:
    """Results in fp64; the model is not changed."""
    wide = tree_map(lambda value: value.double() if value.is_floating_point() else value, args)
    return [value.detach() for value in tree_leaves(copy.deepcopy(model).double()(*wide))]


def check(name: str, options: dict[str, Any], allowed: float, form: str) -> None:
    """Every call of a session is as near to fp64 as it may be; weights change before the third."""
    model = make(name)
    dynamic = True if form == "dynamic=True" else None
    run = torch.compile(model, backend="amp_fx", options=options, dynamic=dynamic)
    with torch.inference_mode():
        for place, sizes in enumerate(CALLS):
            args = SIZED[name].inputs(*sizes)
            if form == "mark_dynamic":
                for value in args:
                    # which takes back what the program itself fixes
                    torch._dynamo.maybe_mark_dynamic(value, [*range(value.ndim)])
            if place == 2:
                for weight in model.parameters():
                    weight.data.mul_(1.25)
            wanted, got = exact(model, args), tree_leaves(run(*args))
            assert [value.shape for value in got] == [value.shape for value in wanted]
            assert error(got, wanted) < allowed, f"call {place}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", SIZED)
@pytest.mark.slow
@pytest.mark.usefixtures("op_by_op")
def test_weights_serve_batches_of_any_size(name: str, options: str, form: str) -> None:
    check(name, *OPTIONS[options], form)


@pytest.mark.quick_rows("tied", "cached keys")
@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("name", SIZED)
def test_packed_weights_serve_batches_of_any_size(name: str) -> None:
    check(name, *OPTIONS["cache"], FORMS[0])
