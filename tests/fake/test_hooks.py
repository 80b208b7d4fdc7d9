"""What is hooked into torch calls whoever listens; what is kept in a process is forgotten by one call."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch import nn

import amp_fx.compiler.backend
from amp_fx._torch import dynamo as hooks
from amp_fx.compiler import notices
from amp_fx.precision.policy import table
from support.document_blocks import ROOT


@pytest.fixture(autouse=True)
def _nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    amp_fx.compiler.backend.listen()
    notices.graph_arrived()
    for hook in hooks.HOOKS:
        monkeypatch.setattr(hook, "listeners", ())


def new_step() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter])


def compile_something() -> None:
    torch.compile(torch.sin, backend="eager")(torch.ones(2))


def test_who_listens_is_called_once_and_may_leave_while_hooks_are_called() -> None:
    calls = list[str]()

    def once(*_: object) -> None:
        calls.append("once")
        hooks.AFTER_STEP.leave(once)
        hooks.AFTER_STEP.listen(then)

    def then(*_: object) -> None:
        calls.append("then")

    for _ in range(2):
        hooks.AFTER_STEP.listen(once)
    assert len(optimizers._global_optimizer_post_hooks) == 1
    optimizer = new_step()
    for _ in range(3):
        optimizer.step()
    assert calls == ["once", "then", "then"]


def test_dynamos_reset_keeps_ours_and_drops_the_others() -> None:
    from torch._dynamo.callback import callback_handler

    calls = list[str]()
    hooks.COMPILE_STARTS.listen(lambda _: calls.append("ours"))
    callback_handler.register_start_callback(lambda _: calls.append("theirs"))
    compile_something()
    torch.compiler.reset()
    compile_something()
    assert calls == ["ours", "theirs", "ours"]


def test_what_torch_calls_is_not_compiled_by_dynamo() -> None:
    seen = list[bool]()
    for hook in (hooks.BEFORE_STEP, hooks.AFTER_STEP):
        hook.listen(lambda *_: seen.append(torch.compiler.is_compiling()))
    torch.compile(new_step().step, backend="eager")()
    assert seen == [False, False]


def test_dynamo_traces_what_models_are_made_of_and_nothing_else_of_amp_fx() -> None:
    from torch._dynamo import trace_rules

    root = str(Path(amp_fx.__file__).parent) + os.sep
    ours = [each.removeprefix(root) for each in trace_rules.SKIP_DIRS if each.startswith(root)]
    assert {os.path.join("runtime", "scaling"), "compiler"} <= set(ours)
    assert {os.path.join("runtime", "widened.py"), "runtime", "integrations"}.isdisjoint(ours)
    assert len(set(ours)) == len(ours), "hooked in once"


# ---- what is kept ----


def test_results_are_cached_in_one_way() -> None:
    texts = [(path.name, path.read_text("utf-8")) for path in (ROOT / "amp_fx").rglob("*.py")]
    assert len(texts) > 100
    found = {name for name, text in texts if re.search(r"\b(lru_cache|functools\.cache)\b", text)}
    assert found <= {"state.py"}, "where it is made"


def test_what_is_kept_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        notices.say_wide("a device")
    assert len(caplog.messages) == 1
    rows = table.rows_of("cpu")
    assert table.rows_of("cpu") is rows
    amp_fx.reset()
    notices.say_wide("a device")
    assert len(caplog.messages) == 2
    assert table.rows_of("cpu") is not rows
