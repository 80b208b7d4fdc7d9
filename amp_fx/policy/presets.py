"""Names of policies that other systems use, as what they mean here: a base list, rules, and the low dtype.

Keras: https://keras.io/api/mixed_precision/policy, layers compute and return the low dtype, variables are float32.
Apex: https://nvidia.github.io/apex/amp.html, ``O1`` has op lists, ``O2`` a low model with master weights, ``O3`` runs
all low; here, what may overflow stays float32 even so.
JMP: https://github.com/google-deepmind/jmp, parameters and inputs are cast to the compute dtype.
FSDP and DeepSpeed: as JMP, ``param_dtype`` is what parameters are cast to for compute.

Where a whole model is low there, the base is ``fast``: it stores as much low, and keeps losses and sums in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amp_fx.errors import OptionsError, one_of

__all__ = ["PRESETS", "dtypes_preset", "preset"]


_FLOAT32: dict[str, Any] = {"base": "autocast", "rules": [{"module": ".*", "precision": "fp32"}]}

#: name -> the policy in its object form
PRESETS: dict[str, dict[str, Any]] = {
    # Keras
    "float32": _FLOAT32,
    "mixed_float16": {"base": "fast", "dtype": "float16"},
    "mixed_bfloat16": {"base": "fast", "dtype": "bfloat16"},
    # Apex
    "O0": _FLOAT32,
    "O1": {"base": "autocast", "dtype": "float16"},
    "O2": {"base": "fast", "dtype": "float16"},
    "O3": {"base": "fast", "dtype": "float16", "rules": [{"module": ".*", "precision": "low"}]},
}

#: what JMP, FSDP and DeepSpeed call the dtypes -> why it can only be float32; only that of the computation may be low
_COMPUTE = ""
_KEYS = {
    **dict.fromkeys(("params", "p"), "parameters stay as the model and the optimizer have them"),
    **dict.fromkeys(("compute", "c", "param_dtype"), _COMPUTE),
    **dict.fromkeys(
        ("output", "o", "output_dtype"), "a compiled model returns the dtypes that the eager program returns"
    ),
    "reduce_dtype": "gradients leave in float32; FSDP's own reduce_dtype or a communication hook narrows what is sent",
    "buffer_dtype": "buffers stay as the model has them",
}

_DTYPES = {
    **dict.fromkeys(("float32", "f32", "full", "fp32"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "f16", "fp16", "half"), "float16"),
}


def preset(text: str) -> tuple[str, dict[str, Any]] | None:
    """A key of :data:`PRESETS`, or dtypes by name, as it is printed back, and its object form; None for another text.

    OptionsError for dtypes by name, ``"params=float32,compute=bfloat16"``, with an unknown name or one that cannot be.
    """
    if text in PRESETS:
        return text, PRESETS[text]
    if "=" not in text:
        return None
    parts = [part.partition("=") for part in text.split(",")]
    return dtypes_preset({key.strip(): value.strip() for key, _, value in parts})


def dtypes_preset(dtypes: Mapping[Any, Any]) -> tuple[str, dict[str, Any]] | None:
    """As :func:`preset`, of a mapping such as ``{"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}``."""
    if not _KEYS.keys() & dtypes.keys():
        return None
    compute, given, where = "float32", dict[str, str](), f"policy {dict(dtypes)!r}"
    for key, value in dtypes.items():
        one_of("key", _KEYS, key, where)
        if value is None:  # FSDP: left as it is
            continue
        dtype = _DTYPES[one_of("dtype", _DTYPES, str(value).removeprefix("torch."), f"{key!r} of {where}")]
        if _KEYS[key] is _COMPUTE:
            compute = dtype
        elif dtype != "float32":
            raise OptionsError(f"{key}={dtype} cannot be: {_KEYS[key]}. Give {key}=float32, or leave it out.")
        given[key] = dtype
    # nothing is lowered where FSDP is given no dtype
    text = ",".join(f"{key}={dtype}" for key, dtype in given.items()) or "float32"
    return text, _FLOAT32 if compute == "float32" else {"base": "fast", "dtype": compute}
