"""The process that compiles for a target: nothing is patched in the one that asks."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from amp_fx.errors import AmpFxError, TargetError
from amp_fx.targets._torch import enter
from amp_fx.targets.process import TargetProcess
from targets import needs_a_target, process

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]


def test_errors_arrive_with_their_class_and_with_the_traceback_of_the_process() -> None:
    with pytest.raises(AmpFxError, match="a reason") as raised:
        process().call("targets:fail", "a reason")
    assert "in fail" in str(raised.value.__cause__)


class Unreadable:
    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


def test_what_cannot_be_sent_or_handed_back_is_an_error_of_that_call_alone() -> None:
    with pytest.raises(ValueError, match="no number"):
        process().call("operator:add", Unreadable(), 3)
    with pytest.raises(TargetError, match="TypeError"):
        process().call("threading:Lock")
    assert process().call("operator:add", 2, 3) == 5


def test_one_process_has_one_target_which_is_known_before_anything_is_started() -> None:
    with pytest.raises(TargetError, match="'cuda:h100'"):
        TargetProcess("cuda:h1000")
    with pytest.raises(TargetError, match=r"cuda:h100.*cuda:a100"):
        process().call("amp_fx.targets._torch:enter", "cuda:a100")
    assert process().call("amp_fx.targets._torch:enter", "cuda:h100") is None
    # the asking process stays as it is
    assert not torch.cuda.is_available()


def test_a_process_that_dies_says_what_it_wrote_last() -> None:
    message = "ended with code 3: what C\\+\\+ wrote"
    with contextlib.closing(TargetProcess("cuda:h100")) as dying, pytest.raises(TargetError, match=message):
        dying.call("targets:die")


def test_a_machine_without_triton_or_a_compiler_says_in_one_line_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(TargetError, match=r"^compiling for an absent GPU takes a C.. compiler.*install g"):
        enter("cuda:h100")
    monkeypatch.setattr("torch.utils._triton.has_triton_package", lambda: False)
    with pytest.raises(TargetError, match=r"^compiling for CUDA takes Triton: pip install triton"):
        enter("cuda:h100")
