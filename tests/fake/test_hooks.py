"""What is hooked into torch comes with the first compile, calls whoever listens, and can be taken out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch import nn

import amp_fx.backend
from amp_fx import notices
from amp_fx._torch import hooks


@pytest.fixture(autouse=True)
def _nothing_hooked() -> Iterator[None]:
    hooks.remove_all()
    yield
    hooks.remove_all()
    amp_fx.backend.listen()
    # when the tests end, there is nothing to tell
    notices.graph_arrived()


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
    hooks.remove_all()
    assert callback_handler.start_callbacks == []


def test_what_torch_calls_is_not_compiled_by_dynamo() -> None:
    seen = list[bool]()
    for hook in (hooks.BEFORE_STEP, hooks.AFTER_STEP):
        hook.listen(lambda *_: seen.append(torch.compiler.is_compiling()))
    torch.compile(new_step().step, backend="eager")()
    assert seen == [False, False]


def test_all_can_be_taken_out_and_come_again() -> None:
    from torch._dynamo import trace_rules
    from torch._dynamo.callback import callback_handler

    skipped, calls = list(trace_rules.SKIP_DIRS), list[str]()
    for _ in range(2):
        amp_fx.backend.listen()
        assert all(hook.is_installed for hook in hooks.HOOKS)
        ours = {Path(each).name for each in trace_rules.SKIP_DIRS[len(skipped) :]}
        assert {"scaling", "notices.py"} <= ours
        # what models are made of, and what is around them, is traced
        assert ours.isdisjoint({"widened.py", "integrations"})
        for hook in hooks.HOOKS:
            hook.listen(lambda *_: calls.append("told"))
        hooks.remove_all()
        assert not any(hook.is_installed for hook in hooks.HOOKS)
        assert not optimizers._global_optimizer_pre_hooks
        assert not optimizers._global_optimizer_post_hooks
        assert skipped == trace_rules.SKIP_DIRS
        assert callback_handler.start_callbacks == []
    for hook in hooks.HOOKS:
        hook._call_listeners()
    assert calls == [], "who listened is forgotten"
