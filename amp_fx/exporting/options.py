"""The options of export: some of the backend's, and its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from amp_fx.errors import OptionsError, did_you_mean
from amp_fx.settings import LEVEL_OPTIONS, Options

__all__ = ["ExportOptions"]

#: option -> valid values, besides the options of the backend that export takes
_CHOICES = {"weights_beyond_range": ("raise", "clamp", "keep"), "tables": ("tied", "low", "keep")}
_SHARED_OPTIONS = ("dtype", "policy", "numerics", "profile", "plan", *LEVEL_OPTIONS)


@dataclass(frozen=True)
class ExportOptions:
    """Validated options of export; the first one holds those that the backend has, too."""

    shared: Options
    weights_beyond_range: str = "raise"
    tables: str = "tied"

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> ExportOptions:
        """Builds them from the keywords of :func:`amp_fx.export`.

        Raises:
            OptionsError: unknown key or bad value.
        """
        own = {key: value for key, value in options.items() if key in _CHOICES}
        for key, value in own.items():
            if value not in _CHOICES[key]:
                raise OptionsError(
                    f"Unknown {key} {value!r}; valid: {', '.join(map(repr, _CHOICES[key]))}."
                    + did_you_mean(str(value), _CHOICES[key])
                )
        shared = {key: value for key, value in options.items() if key not in own}
        valid = sorted((*_SHARED_OPTIONS, *_CHOICES, "keep_io_dtypes"))
        for key in shared:
            if key not in _SHARED_OPTIONS:
                raise OptionsError(
                    f"Unknown option {key!r} for export; valid: {', '.join(valid)}. Options of Inductor go to "
                    f"torch._inductor.aoti_compile_and_package.{did_you_mean(str(key), valid)}"
                )
        # a file is for other machines: this one's rates say nothing about them
        parsed = Options.parse(None, {"profile": "off", **shared})
        if parsed.policy.sensitivity is not None:
            raise OptionsError(
                f"export does not place by measured sensitivity; got a policy with "
                f"sensitivity={parsed.policy.sensitivity!r}. Give the "
                "plan that amp_fx.calibrate(..., of='outputs').plan() makes."
            )
        wide = next((rule for rule in parsed.policy.rules if rule.result is not None), None)
        if wide is not None:
            raise OptionsError(
                f"'result' in policy rule {wide} is for torch.compile: no op that every runtime has multiplies low "
                "operands and returns fp32. Use 'precision': 'fp32' for the call."
            )
        return cls(parsed, **own)
