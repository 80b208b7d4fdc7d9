"""Kernels for many tensors at once, as gradient scaling uses them."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["find_nonfinite_", "largest_magnitudes", "update_scale"]


def update_scale(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """One update of a loss scale, in place and on its device: what torch.amp.GradScaler does.

    Args:
        scale: fp32, 0-d.
        growth_tracker: int32, 0-d; updates since the last change.
        found_inf: fp32, 0-d; not zero: something was inf or nan.
        growth_factor: the scale's factor after ``growth_interval`` updates without a finding.
        backoff_factor: the scale's factor after a finding.
        growth_interval: see ``growth_factor``.
    """
    torch._amp_update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)


def find_nonfinite_(values: Sequence[torch.Tensor], found: torch.Tensor) -> None:
    """Sets ``found`` (fp32, 0-d) to 1.0 if a value is inf or nan, by one kernel and without waiting.

    Args:
        values: of one floating dtype, on the device of ``found``.
        found: keeps its value if nothing is found.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(list(values), found, torch.ones_like(found))


def largest_magnitudes(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The largest magnitude in each tensor, 0-d; inf or nan where an element is. On a GPU by one pass of kernels."""
    return list(torch._foreach_norm(list(values), torch.inf))
