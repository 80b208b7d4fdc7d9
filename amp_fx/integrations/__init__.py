"""The ways into amp_fx from other libraries: one file per library, which imports it.

Here: a plugin for Accelerate, callbacks for the Trainer of transformers, precision plugins for Lightning and Fabric, a
scaler's numbers as metrics; and what these files share: checked options, and compiling a module in place.
Not here: recipes that need no class of ours (``examples/``: timm, diffusers, torchtitan). No file outside this folder
imports one of these libraries, and ``import amp_fx`` imports none of these files.
Open ``accelerate.py`` first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from amp_fx.compiler.settings import Options
from amp_fx.errors import MissingLibraryError, OptionsError, install_hint
from amp_fx.runtime.scaling import GradScaler

__all__ = ["backend_options", "compile_in_place", "needed"]


@contextlib.contextmanager
def needed(library: str) -> Iterator[None]:
    """Around the imports of a library: says how to install it, by the extra of its name, if it is missing.

    The exception is MissingLibraryError.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # a module that the library itself does not find stays the error that it is
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise MissingLibraryError(
            f"amp_fx.integrations.{library} needs {library}, which is not installed: {install_hint(library)}."
        ) from error


def backend_options(
    options: Mapping[str, Any] | None = None,
    *,
    mode: str | None = None,
    dtype: str | torch.dtype | None = None,
    scaler: GradScaler | None = None,
) -> dict[str, Any]:
    """The options of ``torch.compile(backend="amp_fx")`` with a dtype and a scaler's name, checked beforehand.

    OptionsError for two values of one option.
    """
    merged = dict(options or {})
    for key, value in (("dtype", dtype), ("scaler", scaler.name if scaler is not None else None)):
        if value is None:
            continue
        if merged.get(key, value) != value:
            raise OptionsError(
                f"{key}={value!r} contradicts options={{{key!r}: {merged[key]!r}}}; give one of the two."
            )
        merged[key] = value
    Options.parse(mode, merged)
    return merged


def compile_in_place(module: nn.Module, options: Mapping[str, Any]) -> None:
    """``module.compile(backend="amp_fx", options=options)``, for modules of torch.nn too.

    Dynamo skips functions of torch itself, so ``nn.Sequential(...).compile()`` compiles nothing. A function of ours
    that calls the module is compiled instead.
    """
    if not type(module).__module__.startswith("torch."):
        module.compile(backend="amp_fx", options=dict(options))
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    # Dynamo counts recompiles by code object: each module has one of its own
    call.__code__ = call.__code__.replace()
    module._compiled_call_impl = torch.compile(call, backend="amp_fx", options=dict(options))
