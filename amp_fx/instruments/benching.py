"""``amp_fx.bench(model, args)``: a model of the user's in eager, autocast, amp_fx, a package, int8 and OpenVINO."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import gc
import importlib.util
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amp_fx.compiler.settings import Options, compile
from amp_fx.errors import InputError, MissingLibraryError, OptionsError, did_you_mean, install_hint
from amp_fx.exporting import export, package
from amp_fx.graphs.values import program_device, tensors
from amp_fx.instruments.batches import called, inputs_of, raised, uncompiled
from amp_fx.instruments.calibration import quantize
from amp_fx.instruments.progress import progress
from amp_fx.instruments.reports.figures import check_figure, new_figure, save_figure
from amp_fx.instruments.step import relative_error
from amp_fx.precision.placement.devices import builtin
from amp_fx.precision.placement.profile import DEVICE_TYPES
from amp_fx.precision.plans.files import as_data, write_text

#: a call of the model as one of the ways runs it; returns what the model returns, in the order of its tensors
Call = Callable[[], Any]

_BAR, _LEAST_CALLS = 24, 5
#: name -> (what it is, devices); the order of the table
WAYS = {
    "eager": ("fp32, without torch.compile", ("cpu", "cuda")),
    "autocast": ("torch.compile under torch.autocast", ("cpu", "cuda")),
    "amp_fx": ('torch.compile(backend="amp_fx")', ("cpu", "cuda")),
    "package": ("amp_fx.export and amp_fx.package", ("cpu",)),
    "int8": ("amp_fx.quantize", ("cpu",)),
    "openvino": ("OpenVINO in its own precision", ("cpu",)),
}


@dataclass(frozen=True)
class Timed:
    """One way to run the model.

    Attributes:
        name: a key of ``WAYS``.
        median: seconds of a call.
        p90: seconds that nine of ten calls take at most.
        throughput: samples a second, by dimension 0 of the first input; of calls where that has none.
        memory: bytes that a call holds at most beyond what is held before it; None where nobody counts, and for
            OpenVINO, which holds the buffers of its calls between them.
        error: relative L2 distance of the outputs from eager fp32.
        first: seconds until the first result: compiling, calibrating, packaging.
        calls: how many were timed.
        failed: why there are no numbers, or an empty string.
    """

    name: str
    median: float = 0.0
    p90: float = 0.0
    throughput: float = 0.0
    memory: int | None = None
    error: float = 0.0
    first: float = 0.0
    calls: int = 0
    failed: str = ""


@dataclass(frozen=True)
class Bench:
    """The findings of :func:`bench`; ``str`` is a table with bars.

    Attributes:
        title: class of the model, shapes of the inputs.
        machine: device, threads, versions.
        rows: one for each way, in the order of ``WAYS``.
    """

    title: str
    machine: str
    rows: tuple[Timed, ...]

    def __str__(self) -> str:
        longest = max((row.median for row in self.rows), default=0.0) or 1.0
        head = f"  {'':<10}{'median':>10}{'p90':>10}{'samples/s':>12}{'peak memory':>13}{'error':>10}{'first call':>12}"
        units = f"  {'':<10}{'[ms]':>10}{'[ms]':>10}{'':>12}{'[MB]':>13}{'':>10}{'[s]':>12}"
        lines = [self.title, self.machine, "", head, units]
        for row in self.rows:
            if row.failed:
                lines.append(f"  {row.name:<10}{row.failed}"[:100])
                continue
            memory = "-" if row.memory is None else f"{row.memory / 1e6:.1f}"
            times = f"{1e3 * row.median:>10.3f}{1e3 * row.p90:>10.3f}{row.throughput:>12.5g}{memory:>13}"
            bar = "#" * max(1, round(_BAR * row.median / longest))
            lines.append(f"  {row.name:<10}{times}{row.error:>10.1e}{row.first:>12.1f}  {bar}")
        return "\n".join([*lines, "", "error: relative distance of the outputs from eager's, in fp32"])

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form."""
        return as_data(vars(self))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes ``.json``, or the medians and p90 as bars: ``.png``, ``.svg`` or ``.pdf``."""
        path = Path(path)
        check_figure(path, ".json")
        if path.suffix == ".json":
            write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")
            return path
        rows = [row for row in self.rows if not row.failed][::-1]
        figure = new_figure(7, 1.2 + 0.4 * len(rows))
        axes = figure.subplots()
        late = [1e3 * (row.p90 - row.median) for row in rows]
        bars = axes.barh(
            [row.name for row in rows],
            [1e3 * row.median for row in rows],
            xerr=[[0.0] * len(rows), late],
            color="#0072b2",
        )
        axes.bar_label(bars, [f"{1e3 * row.median:.3g} ms" for row in rows], padding=4)
        axes.margins(x=0.15)
        axes.set_xlabel("latency [ms]: median, and p90 as a line")
        axes.set_title(f"{self.title}\n{self.machine}", fontsize=9)
        save_figure(figure, path)
        return path


def bench(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    ways: Sequence[str] | None = None,
    batches: Any = None,
    seconds: float = 10.0,
    options: Mapping[str, Any] | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Bench:
    """Times inference of a model as users run it: calls in turn, each way as often, until the time is over.

    Args:
        model: fp32, in evaluation mode; on its device.
        args: a tuple of inputs, or one batch as :func:`amp_fx.calibrate` takes it.
        kwargs: more inputs by name.
        ways: some of ``"eager"``, ``"autocast"``, ``"amp_fx"``, ``"package"``, ``"int8"``, ``"openvino"``; None: all
            that the device has and that are installed.
        batches: what int8 is calibrated on; None: the inputs that are timed, on which scales fit best.
        seconds: of timing, all ways together; compiling comes on top.
        options: of amp_fx, as for the backend; int8 takes ``profile`` and ``dtype`` of them.
        say: is told each way that begins, in words.

    Raises:
        InputError: a model in training mode, or one that does not take the inputs.
        OptionsError: an unknown way, or bad options. MissingLibraryError: OpenVINO is asked for, and not installed.
    """
    program: Any = uncompiled(model)
    if program.training:
        raise InputError("bench takes a model in evaluation mode; call model.eval() first.")
    given, named = inputs_of(program, args, kwargs)
    device = program_device(program, (given, named))
    for way in ways or ():
        if way not in WAYS:
            raise OptionsError(f"Unknown way {way!r}; valid: {', '.join(WAYS)}.{did_you_mean(way, WAYS)}")
    if "openvino" in (ways or ()) and importlib.util.find_spec("openvino") is None:
        raise MissingLibraryError(f"the way 'openvino' takes OpenVINO: {install_hint('openvino')}.")
    opts = Options.parse(None, options)
    names = [name for name in WAYS if name in ways] if ways else [*_available(device)]
    known = _Ways(program, given, named, device, opts, dict(options or {}), batches)
    rows: dict[str, Timed] = {}
    calls: dict[str, Call] = {}
    with progress("bench") as show, torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        wanted = _results(called(program, *given, **named))
        for name in names:
            say(f"{name}: {WAYS[name][0]}")
            show(name)
            start = time.perf_counter()
            try:
                calls[name] = known.make(name, Path(folder))
                found = _results(calls[name]())
            except Exception as error:
                # one that fails leaves the others; it is in the table
                if name in ("eager", "amp_fx"):
                    raise
                calls.pop(name, None)
                rows[name] = Timed(name, failed=f"failed: {raised(error)}")
                continue
            _wait(device)
            rows[name] = Timed(name, first=time.perf_counter() - start, error=distance(found, wanted))
        show("warms up")
        # calibration has Dynamo forget what was compiled before
        for call in (*calls.values(), *calls.values()):
            call()
        show("times calls in turn")
        times = _times(calls, device, seconds)
        samples = next((len(each) for each in tensors((given, named)) if each.ndim), 1)
        for name, found in times.items():
            row, median = rows[name], statistics.median(found)
            p90 = sorted(found)[min(len(found) - 1, int(0.9 * len(found)))]
            rows[name] = Timed(
                name,
                median,
                p90,
                samples / median,
                None if name == "openvino" else _peak(calls[name], device),
                row.error,
                row.first,
                len(found),
            )
    shapes = ", ".join(f"{str(each.dtype)[6:]}{list(each.shape)}" for each in tensors((given, named)))
    where = builtin(device).name if device in DEVICE_TYPES else device
    machine = f"{device} ({where}), torch {torch.__version__}, inference"
    return Bench(f"{type(program).__name__}({shapes})", machine, tuple(rows[name] for name in names))


def _available(device: str) -> Iterator[str]:
    for name, (_, devices) in WAYS.items():
        if device in devices and (name != "openvino" or importlib.util.find_spec(name) is not None):
            yield name


@dataclass(frozen=True)
class _Ways:
    """Makes the calls of one model and its inputs."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: str
    opts: Options
    options: dict[str, Any]
    batches: Any

    def make(self, name: str, folder: Path) -> Call:
        """The call of one way, warm or not."""
        run: Any = getattr(self, f"_{name}")(folder)
        return lambda: run(*self.args, **self.kwargs)

    def _eager(self, _: Path) -> Any:
        return self.model

    def _autocast(self, _: Path) -> Any:
        compiled, low = torch.compile(self.model), self.opts.low_dtype(self.device)

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(self.device, low):
                return compiled(*args, **kwargs)

        return run

    def _amp_fx(self, _: Path) -> Any:
        return compile(self.model, **self.options)

    def _package(self, folder: Path) -> Any:
        exported = {key: self.options[key] for key in ("dtype", "policy", "plan") if key in self.options}
        # AOTInductor traces for programs that are called without gradients
        with torch.inference_mode(False), torch.no_grad():
            program = export(self.model, self.args, self.kwargs, **exported)
            return torch._inductor.aoti_load_package(package(program, folder / "bench.pt2"))

    def _int8(self, _: Path) -> Any:
        known = {key: self.options[key] for key in ("dtype", "profile") if key in self.options}
        batch = (self.kwargs or self.args) if not (self.args and self.kwargs) else None
        batches = self.batches if self.batches is not None else batch
        if batches is None:
            raise InputError("int8 takes batches=..., as the model has positional and keyword inputs.")
        return quantize(self.model, batches, **known)

    def _openvino(self, _: Path) -> Any:
        from openvino import compile_model, convert_model

        with torch.inference_mode(False), torch.no_grad():
            program = torch.export.export(self.model, self.args, self.kwargs)
        settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        compiled = compile_model(convert_model(program), "CPU", settings)

        def run(*args: Any, **kwargs: Any) -> list[Tensor]:
            found = compiled([value.numpy() for value in tensors((args, kwargs))])
            return [torch.from_numpy(found[at]) for at in range(len(compiled.outputs))]

        return run


def _times(calls: Mapping[str, Call], device: str, seconds: float) -> dict[str, list[float]]:
    """Seconds of each call, one after another in turn, at least five of each."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while calls and (time.perf_counter() < end or len(next(iter(found.values()))) < _LEAST_CALLS):
        for name, call in calls.items():
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            found[name].append(time.perf_counter() - start)
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _results(returned: Any) -> list[Tensor]:
    """The floating tensors that a model returns, in order, in fp64 on the CPU."""
    return [value.detach().cpu().double() for value in tensors(returned) if value.is_floating_point()]


def distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Relative L2 distance of all results together; infinite where one is not finite, or of another size."""
    if [value.shape for value in found] != [value.shape for value in wanted]:
        return float("inf")
    named = ({str(at): value for at, value in enumerate(values)} for values in (found, wanted))
    return relative_error(*named)


def _peak(call: Call, device: str) -> int | None:
    """Bytes that a call holds at most beyond what is held before: by torch's allocator on CUDA, else resident pages."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    libc = ctypes.util.find_library("c")
    # resetting the peak of a process is Linux's; a container may refuse it
    with contextlib.suppress(OSError):
        if libc is not None:
            # pages that freed tensors left behind would hide what the call asks for
            ctypes.CDLL(libc).malloc_trim(0)
            before = _resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            call()
            return max(_resident("VmHWM") - before, 0)
    return None


def _resident(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return 1024 * int(found[1]) if found else 0
