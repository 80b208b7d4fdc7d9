"""What fails in one version of torch without amp_fx, too: see "Versions" in docs/contributors/conformance.md."""

from __future__ import annotations

import pytest
import torch


def _is(*versions: str) -> bool:
    return torch.__version__.startswith(tuple(f"{version}." for version in versions))


IS_2_11 = _is("2.11")
UP_TO_2_12 = _is("2.11", "2.12")
UP_TO_2_13 = _is("2.11", "2.12", "2.13")
UP_TO_2_14 = UP_TO_2_13 or _is("2.14")


def fails_in(*versions: str, fault: str) -> pytest.MarkDecorator:
    """A test that cannot pass in some versions of torch, and says so when it does."""
    return pytest.mark.xfail(_is(*versions), reason=f"torch {', '.join(versions)}: {fault}", strict=True)
