"""What is hooked into torch comes when it is needed and goes when it is not, also in the middle of a step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import amp_fx.backend
from amp_fx._torch import hooks
from amp_fx.graphs import uncompiled


@pytest.fixture(autouse=True)
def _nothing_hooked() -> Iterator[None]:
    hooks.remove_all()
    yield
    hooks.remove_all()
    amp_fx.backend.listen()
    # when the tests end, there is nothing to tell
    uncompiled._settle()


def step() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter]).step()


def compile_something() -> None:
    torch.compile(torch.sin, backend="eager")(torch.ones(2))


def installed() -> list[hooks.Hook]:
    return [hook for hook in hooks.HOOKS if hook.is_installed]


def test_a_hook_is_there_while_somebody_listens() -> None:
    one, other = list[object](), list[object]()
    hooks.AFTER_STEP.listen(one.extend)
    for _ in range(2):
        hooks.AFTER_STEP.listen(other.extend)
    assert len(optimizers._global_optimizer_post_hooks) == 1
    hooks.AFTER_STEP.leave(one.extend)
    assert installed() == [hooks.AFTER_STEP]
    hooks.AFTER_STEP.leave(other.extend)
    assert installed() == []
    assert not optimizers._global_optimizer_post_hooks


def test_who_leaves_while_hooks_are_called_is_called_no_more_and_the_hook_goes_with_the_next_compile() -> (
    None
):
    calls = list[str]()

    def once(*_: object) -> None:
        calls.append("once")
        hooks.AFTER_STEP.leave(once)

    hooks.AFTER_STEP.listen(once)
    # torch would stop with an error if hooks went while it goes through them
    other = register_optimizer_step_post_hook(lambda *_: calls.append("other"))
    try:
        step()
        step()
        assert calls == ["once", "other", "other"]
        compile_something()
        assert installed() == []
        step()
        assert calls[3:] == ["other"]
    finally:
        other.remove()


def test_who_begins_to_listen_while_hooks_are_called_is_called_after_the_next_compile() -> None:
    calls = list[object]()

    def listen(*_: object) -> None:
        hooks.AFTER_STEP.listen(lambda *_: calls.append("called"))

    first = register_optimizer_step_post_hook(listen)
    second = register_optimizer_step_post_hook(lambda *_: calls.append("other"))
    try:
        step()
        assert calls == ["other"]
        first.remove()
        compile_something()
        step()
        assert calls == ["other", "other", "called"]
    finally:
        second.remove()


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
    hooks.AFTER_STEP.listen(lambda *_: seen.append(torch.compiler.is_compiling()))
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.compile(torch.optim.SGD([parameter]).step, backend="eager")()
    assert seen == [False]


def test_all_can_be_taken_out_and_come_again() -> None:
    amp_fx.backend.listen()
    before = installed()
    assert {hooks.COMPILE_STARTS, hooks.COMPILE_ENDS, hooks.UNTRACED} <= set(before)
    hooks.remove_all()
    assert installed() == []
    amp_fx.backend.listen()
    assert installed() == before
