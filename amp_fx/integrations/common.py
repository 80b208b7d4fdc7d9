"""What every integration needs: its library, or an error that says how to install it; and valid options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from amp_fx.errors import MissingLibraryError, OptionsError
from amp_fx.scaling import GradScaler
from amp_fx.settings import Options

__all__ = ["backend_options", "compile_in_place", "needed"]


@contextlib.contextmanager
def needed(library: str) -> Iterator[None]:
    """Around the imports of a library: without it, the error says how to install it.

    Args:
        library: the name it is imported by, which is also the name of amp_fx's extra.

    Raises:
        MissingLibraryError: the library is not installed. A module that the library itself does not find stays
            the error that it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise MissingLibraryError(
            f"amp_fx.integrations.{library} needs {library}, which is not installed: "
            f'pip install "amp_fx[{library}]".'
        ) from error


def backend_options(
    options: Mapping[str, Any] | None = None,
    *,
    mode: str | None = None,
    dtype: str | torch.dtype | None = None,
    scaler: GradScaler | None = None,
) -> dict[str, Any]:
    """The options of ``torch.compile(backend="amp_fx")``, checked before anything is compiled.

    Args:
        options: as the user gives them.
        mode: a ``torch.compile`` mode.
        dtype: the low dtype, if it is not among the options.
        scaler: whose name becomes the option "scaler".

    Raises:
        OptionsError: bad options, or a dtype or scaler given twice and differently.
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
