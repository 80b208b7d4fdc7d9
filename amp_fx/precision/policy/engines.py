"""Engines that serve what is exported: one row for each, of what it was seen to compute (``docs/engines.md``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from amp_fx.precision.policy.levels import AUTO

#: the value of the option for a file that is for no engine in particular
ANY = "any"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What an engine takes, and what of it the engine computes as it is written."""

    name: str  # the value of the option
    #: what it has kernels for on a CPU; the first where the option dtype says nothing
    dtypes: tuple[torch.dtype, ...]
    #: the kernels of level int8 whose form it multiplies in integers: all, those of one name, or none
    int8: str | None
    #: True where it convolves in integers only what has its result rounded
    rounds_results: bool = False
    #: what it does with the other forms
    otherwise: str = ""


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            name="onnxruntime",
            dtypes=(torch.float16,),
            int8=AUTO,
            rounds_results=True,
        ),
        Engine(
            name="openvino",
            dtypes=(torch.bfloat16, torch.float16),
            int8="int8_measured",
            otherwise="it multiplies in fp32 what has scales that are found in each call",
        ),
        # by its documentation: no file was tried in it
        Engine(
            name="tensorrt",
            dtypes=(torch.float16, torch.bfloat16),
            int8=None,
            otherwise="by its documentation it takes values in int8 without zero points alone, and amp_fx writes uint8",
        ),
        Engine(
            name="executorch",
            dtypes=(torch.bfloat16, torch.float16),
            int8=None,
            otherwise="it has no kernel for aten._int_mm, nor out variants of quantized_decomposed's ops",
        ),
    )
}
