"""What fails in one version of torch without amp_fx, too: see "Versions of torch" in docs/conformance.md."""

from __future__ import annotations

import pytest
import torch

__all__ = ["IS_2_11", "fails_in_2_11"]

IS_2_11 = torch.__version__.startswith("2.11.")


def fails_in_2_11(fault: str) -> pytest.MarkDecorator:
    """A test that cannot pass in torch 2.11, and says so when it does."""
    return pytest.mark.xfail(IS_2_11, reason=f"torch 2.11: {fault}", strict=True)
