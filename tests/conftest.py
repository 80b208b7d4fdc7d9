"""What every test needs: fresh compilers and seeds, and GPU tests only where there is a GPU."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from torch import fx

import amp_fx
import amp_fx.compiler.compiling
from amp_fx._torch import multiplies_int8, onednn_computes
from amp_fx.errors import PassError
from amp_fx.graphs.keys import ATTENTION_MARK, CUSTOM, MARK, RESULT_MARK
from amp_fx.passes import PASSES, Notes, Pass, PassContext, PassResult
from amp_fx.passes.specs import spec_after
from amp_fx.precision.placement.devices import builtin
from support.checks.held_memory import Held
from support.torch_versions import IS_2_11


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # before -m looks
    for item in items:
        quick = item.get_closest_marker("quick_rows")
        if quick and isinstance(item, pytest.Function) and item.callspec.id not in quick.args:
            item.add_marker(pytest.mark.slow)
    has = {
        "gpu": (torch.cuda.is_available(), "a CUDA device"),
        "bf16": (bf16 := onednn_computes(torch.bfloat16), "a CPU on which oneDNN multiplies in bf16"),
        "int8": (bf16 and multiplies_int8(), "a CPU with bf16 and VNNI"),
        "int8_rate": ("int8" in builtin("cpu").peak, "a CPU with a rate for int8"),
    }
    for item in items:
        for name, (is_here, what) in has.items():
            if item.get_closest_marker(name) and not is_here:
                item.add_marker(pytest.mark.skip(reason=f"needs {what}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tests of fp8 run on CPUs, for which torch 2.11 has ``_scaled_mm`` with one scale for each operand alone."""
    report = yield
    if IS_2_11 and "_scaled_mm only supports per-tensor scaling for CPU" in report.longreprtext:
        report.outcome, report.longrepr = "skipped", (report.fspath, 0, "torch 2.11: scales on a CPU")
    return report


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Torch's own seed is another one in each process: what a module draws when it is imported is to be the same."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """What was imported lives as long as the tests: whoever collects garbage need not look at it, which takes 0.5 s."""
    # when it is imported, it looks for what refers to some objects
    import hypothesis  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture
def held() -> Held:
    """Bytes of the copies and constants that the test's models hold."""
    return Held()


@pytest.fixture(name="op_by_op")
def _op_by_op() -> Iterator[None]:
    """Inductor's passes run, and no code is generated."""
    from support.tracing.captured_graphs import op_by_op

    with op_by_op():
        yield


@pytest.fixture(name="without_inductor")
def _without_inductor() -> Iterator[None]:
    """No code is generated: for what is decided before."""
    from support.tracing.captured_graphs import without_inductor

    with without_inductor():
        yield


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Each test starts with nothing compiled, a fixed seed, and must leave the ambient autocast as it was."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    # weights of other tests, and graphs that wait for an optimizer to warn of missing loss scaling
    amp_fx.reset()
    yield
    for device in ("cpu", "cuda"):
        assert not torch.is_autocast_enabled(device), f"the test left torch.autocast({device!r}) on"
    # while it is not zero, autocast keeps its casts of weights: eager code would go on with old ones
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    assert depth == 0, f"the test left {depth} of autocast's regions open"


#: node.meta keys that tracing makes of a graph's code and inputs, and of nothing else
_KEYED = frozenset({"desc", "original_aten", "partitioner_tag", "val"})


@pytest.fixture(autouse=True, scope="session")
def _only_keyed() -> Iterator[None]:
    """Passes on Inductor's graphs read of a node what the keys of the compile caches hold, and the marks they name."""
    run = amp_fx.compiler.compiling.run_in_order

    def guarded(
        gm: fx.GraphModule, pipeline: Sequence[Pass], context: PassContext, notes: Notes | None = None
    ) -> None:
        marks = {name for step in pipeline for name in getattr(step, "marks", ())}
        marks |= {name for step in pipeline for name, _ in getattr(step, "computed_by", ())}

        def shown(key: str, value: Any) -> Any:
            if key == CUSTOM and isinstance(value, dict):
                return _Marks(value, marks)
            return value if key in _KEYED else _Unread(key, value)

        for node in gm.graph.nodes:
            node.meta = {key: shown(key, value) for key, value in node.meta.items()}
        try:
            run(gm, pipeline, context, notes)
        finally:
            for node in gm.graph.nodes:
                node.meta = {
                    key: value.whole if isinstance(value, (_Unread, _Marks)) else value
                    for key, value in node.meta.items()
                }

    with mock.patch.object(amp_fx.compiler.compiling, "run_in_order", guarded):
        yield


@pytest.fixture(autouse=True, scope="session")
def _as_specified() -> Iterator[None]:
    """What holds of a graph at a stage is checked after each pass, and that one that has changed nothing says so."""
    with contextlib.ExitStack() as stack:
        for kind in PASSES.values():
            stack.enter_context(mock.patch.object(kind, "call", _checked(kind.call)))
        yield


def _checked(call: Callable[..., PassResult]) -> Callable[..., PassResult]:
    def checked(self: Pass, gm: fx.GraphModule, context: PassContext) -> PassResult:
        before = _calls(gm)
        result = call(self, gm, context)
        if not result.changed and _calls(gm) != before:
            raise AssertionError(f"{self.name} says that it has changed nothing: {result.summary}")
        for holds in spec_after(self):
            if wrong := [node.name for node in gm.graph.nodes if not holds(node)]:
                raise AssertionError(f"after {self.name}, {holds.__name__} does not hold of {wrong}")
        return result

    return checked


def _calls(gm: fx.GraphModule) -> list[Any]:
    return [(node, node.target, node.args, node.kwargs) for node in gm.graph.nodes]


class _Marks(dict[str, Any]):
    """Of what is in ``node.meta["custom"]``, the marks that are in a uuid."""

    def __init__(self, whole: dict[str, Any], marks: Collection[str]) -> None:
        keys = (MARK, RESULT_MARK, ATTENTION_MARK)
        super().__init__({key: whole[key] for key in keys if whole.get(key) in marks})
        self.whole = whole


class _Unread:
    """Stands for a value of ``node.meta`` in a pass that may not depend on it, but hand it on."""

    def __init__(self, key: str, whole: Any) -> None:
        self.key, self.whole = key, whole

    def _refuse(self, *_: object) -> NoReturn:
        raise PassError(f"a pass reads node.meta[{self.key!r}], which is in no key of the compile caches")

    __bool__ = __contains__ = __eq__ = __getitem__ = __hash__ = __iter__ = __len__ = __str__ = _refuse  # type: ignore[assignment]

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()
