"""Random options of a compilation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import torch

from amp_fx.compiler.settings import Options
from amp_fx.precision.placement.profile import DeviceProfile

#: ops that rules are about
_OPS = (
    "add", "bmm", "cat", "clone", "einsum", "exp", "gelu", "layer_norm", "linear", "matmul", "mean",
    "mse_loss", "mul", "relu", "reshape", "softmax", "sum", "tanh", "to", "view", "where",
)  # fmt: skip

#: rates by which every listed op gains, also where a cast costs more than it saves elsewhere
_GAINS = DeviceProfile("gains", "cpu", {"float32": 1e6, "bfloat16": 1e9, "float16": 1e9}, 1e12, 1e-12)

#: rates by which some gain and others do not
_MIXED = DeviceProfile("mixed", "cpu", {"float32": 1e9, "bfloat16": 2e9, "float16": 2e9}, 1e10, 1e-9)

_PROFILES: Mapping[str, Any] = {"off": "off", "auto": "auto", "gains": _GAINS, "mixed": _MIXED}


@dataclass(frozen=True)
class DrawnOptions:
    low: torch.dtype = torch.bfloat16  # where the program has no autocast of its own
    base: str = "autocast"
    rules: tuple[tuple[str, str], ...] = ()  # op and precision
    profile: str = "off"  # a key of _PROFILES
    replayed: bool = False  # the program follows the plan that was made of it

    @property
    def is_autocast(self) -> bool:
        """True where every op runs in the dtype that autocast has for it."""
        return self.base == "autocast" and not self.rules and self.profile == "off"

    def options(self, numerics: str) -> Options:
        """The options as the backend takes them."""
        rules: list[dict[str, Any]] = [{"op": op, "precision": precision} for op, precision in self.rules]
        own = {"dtype": self.low, "policy": {"base": self.base, "rules": rules}}
        given = Options.parse(None, {**own, "numerics": numerics, "strict": True})
        return replace(given, profile=_PROFILES[self.profile])


DEFAULTS = DrawnOptions()


def drawn_options() -> st.SearchStrategy[DrawnOptions]:
    """Options, the defaults as often as not."""
    rule = st.tuples(st.sampled_from(_OPS), st.sampled_from(["fp32", "low"]))
    drawn = st.builds(
        DrawnOptions,
        low=st.sampled_from([torch.bfloat16, torch.float16]),
        base=st.sampled_from(["autocast", "fast"]),
        rules=st.lists(rule, max_size=3).map(tuple),
        profile=st.sampled_from(list(_PROFILES)),
        replayed=st.booleans(),
    )
    return st.one_of(st.just(DEFAULTS), drawn)
