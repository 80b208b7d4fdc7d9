"""The speed of a device: matmul rate per dtype, memory bandwidth, and the cost of a kernel.

The cost model weighs casts against faster arithmetic with them. ``devices.py`` has them in tables, keyed only on what
the device is, so that runs and ranks decide alike. ``measuring.py`` finds them out on this machine, and
``amp-fx profile`` writes them to a file for ``options={"profile": "FILE"}``.

Rates are FLOP/s (a multiply-add counts two), bandwidth is bytes/s, read plus written, times are seconds.
Two ratios decide most placements: low precision to float32, and arithmetic to bandwidth. Both vary far less
between devices of one kind than the rates themselves.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_fx.errors import AmpFxError, did_you_mean
from amp_fx.precision.plans.files import SchemaError, decode, dtype_name, read_object, write_text
from amp_fx.precision.policy.levels import LEVELS
from amp_fx.precision.policy.table import DEVICES

#: device types that have profiles
DEVICE_TYPES = tuple(device.name for device in DEVICES.values() if device.has_rates)
#: dtypes that every device multiplies in, and that are measured
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: the key of the rate of scaled matmuls in fp8, which few devices have
FLOAT8 = "float8_e4m3fn"
#: the key of the rate of products of 8-bit integers
INT8 = "int8"
#: what the flash kernel for attention on a CPU takes for an element of a key and one of a value where each head has a
#: single query
FLASH_QUERY = "flash_query"
#: what it takes for a block of queries and one of keys, and for an operation of their products, forward and backward
FLASH_BLOCKS = ("flash_block", "flash_product"), ("flash_block_backward", "flash_product_backward")
FLASH = (FLASH_QUERY, *FLASH_BLOCKS[0], *FLASH_BLOCKS[1])
#: what two products around a softmax take in place of it, forward and backward, for a head, a score, and an element of
#: a query or a key
PRODUCTS = (
    ("products_head", "products_score", "products_element"),
    ("products_head_backward", "products_score_backward", "products_element_backward"),
)
#: what a profile may have a matmul rate for, and parts of calls of libraries that it may have times of
_KEYS = {
    "peak": tuple(dict.fromkeys(level.rate for level in LEVELS.values())),
    "calls": (*FLASH, *PRODUCTS[0], *PRODUCTS[1]),
}

_FORMAT = "amp_fx device profile"
_VERSION = 1


class ProfileError(AmpFxError, ValueError):
    """A device profile is wrong, cannot be read, or does not fit the device."""


@dataclass(frozen=True)
class DeviceProfile:
    """Rates of one device."""

    name: str  # what was looked up or measured, for reports
    device_type: str  # "cpu" or "cuda"
    #: dtype name -> sustained rate of a large matmul, in FLOP/s; always has "float32". Without "float8_e4m3fn" nothing
    #: runs in fp8, without "int8" nothing in int8
    peak: Mapping[str, float] = field(hash=False)
    bandwidth: float  # of main or device memory, in bytes/s, reads and writes together
    #: what a kernel of its own costs at least, in seconds: the launch on CUDA, the call and a parallel region on CPU
    launch: float
    #: name -> seconds, on all threads together, that a part of attention takes: the flash kernel's blocks and their
    #: products, and what is written in its place, where they were measured
    calls: Mapping[str, float] = field(default_factory=dict, hash=False)

    def is_slower_in(self, low: torch.dtype | None) -> bool:
        """True where matmuls take longer in a 16-bit dtype than in fp32."""
        return low is not None and self.peak.get(dtype_name(low), math.inf) < self.peak["float32"]

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form, with its format and version."""
        maps = {"peak": dict(self.peak), "calls": dict(self.calls)}
        return {"format": _FORMAT, "version": _VERSION, **vars(self), **maps}

    def to_json(self) -> str:
        """The profile as indented JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeviceProfile:
        """Reads what :meth:`to_dict` wrote; ProfileError for another version, or a field that is wrong or missing."""
        values = dict(data)
        found = values.pop("format", None), values.pop("version", None)
        if found != (_FORMAT, _VERSION):
            raise ProfileError(
                f"not a profile of this amp_fx: format {_short(found[0])}, version {_short(found[1])}; "
                f"expected {_FORMAT!r}, {_VERSION}. Write a new one with: python -m amp_fx profile"
            )
        try:
            profile = decode(cls, values, "device profile")
        except SchemaError as error:
            raise ProfileError(f"not a device profile: {error}") from error
        check_device_type(profile.device_type)
        if "float32" not in profile.peak:
            raise ProfileError(f"device profile.peak has {_short([*profile.peak])}; float32 must be there.")
        numbers = {"bandwidth": profile.bandwidth, "launch": profile.launch}
        for name, valid in _KEYS.items():
            for key, number in getattr(profile, name).items():
                if key not in valid:
                    raise ProfileError(
                        f"device profile.{name} has {_short(key)}; valid: {', '.join(valid)}."
                        + did_you_mean(str(key)[:60], valid)
                    )
                numbers[f"{name}.{key}"] = number
        for name, number in numbers.items():
            if not 0 < number < math.inf:
                raise ProfileError(
                    f"device profile.{name} should be a positive number; got {_short(number)}."
                )
        return profile

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes :meth:`to_json` to a file: all of it, or nothing and the old file stays."""
        write_text(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DeviceProfile:
        """Reads a file that :meth:`save` wrote; ProfileError if it cannot be read, or is none."""
        # it has about 400 bytes
        return read_object(path, "a device profile", cls.from_dict, ProfileError, most=64 * 1024)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_device_type(value: object) -> str:
    """The value, if it names a type of device that has profiles; else ProfileError."""
    if value not in DEVICE_TYPES:
        raise ProfileError(
            f"Unknown device type {_short(value)}; valid: {', '.join(map(repr, DEVICE_TYPES))}."
            + did_you_mean(str(value)[:60], DEVICE_TYPES)
        )
    return str(value)
