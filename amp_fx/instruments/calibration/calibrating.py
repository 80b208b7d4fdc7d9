"""``amp_fx.calibrate(model, batches)``: from a model and data to what each rounding costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from amp_fx._torch import compile_id, graph_break, unwrapped_errors
from amp_fx.compiler.rewriting import outline_of
from amp_fx.compiler.settings import Options
from amp_fx.errors import AmpFxError, CaptureError, OptionsError, ScalerError, TargetError
from amp_fx.graphs.capture import capture
from amp_fx.graphs.regions import ambient_regions, not_ours
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import listed_devices
from amp_fx.instruments.batches import call_of, compiling, uncompiled
from amp_fx.instruments.calibration.calibration import Calibration
from amp_fx.instruments.calibration.equalising import Chosen, Products, Way, first_ways, narrowed
from amp_fx.instruments.calibration.measuring import run_measured
from amp_fx.instruments.calibration.meter import Meter, measure
from amp_fx.instruments.calibration.ranges import CallId, Ranges
from amp_fx.instruments.calibration.traced import MeasuredGraph, TargetGraph, read_matmuls
from amp_fx.instruments.progress import progress
from amp_fx.instruments.step import Step, apart
from amp_fx.instruments.targets import find_target
from amp_fx.instruments.targets.process import TargetProcess
from amp_fx.instruments.targets.tracing import Tracer
from amp_fx.passes import PassContext
from amp_fx.precision.placement.devices import resolve
from amp_fx.precision.placement.level_cost import OPERATIONS, LevelCost, auto_level
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.matching import match
from amp_fx.precision.plans.plan import Plan
from amp_fx.precision.plans.sensitivity import GRADIENTS, OF, OUTPUTS, GraphSensitivity, Sensitivity, combined
from amp_fx.precision.policy.levels import Level, levels_of
from amp_fx.runtime.scaling import find_scaler

logger = logging.getLogger(__name__)

#: where a scaler starts
FIRST_SCALE = 65536.0


@torch.inference_mode(False)
def calibrate(
    model: nn.Module,
    batches: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    of: str | Callable[[Any], Any] = GRADIENTS,
    dtype: str | torch.dtype = "auto",
    profile: str | DeviceProfile = "auto",
    target: str | None = None,
    scale: float | None = None,
    policy: Any = "autocast",
    fp8: str = "auto",
    probes: int = 1,
    seed: int = 0,
) -> Calibration:
    """Measures what each rounding to the low dtype does to the gradient of a model, or to what it returns.

    One forward, backward and, of gradients, double backward per batch, in the precision of the model's weights. The
    model and the states of the random generators are afterwards what they were. Code compiled earlier in this process
    is compiled again when it is next called.

    Args:
        model: fp32, in the mode it is trained in; a checkpoint that has been trained for a while, since sensitivities
            of the first steps say little about later ones. One that is compiled is taken as it was before.
        batches: a batch or an iterable of them, of any sizes, whose sensitivities are averaged. A batch is a tuple of
            positional arguments, a mapping of keyword arguments, or the only argument, a tensor.
        loss: what the model returns -> 0-d tensor. None: the model returns the loss, or has it in ``.loss``.
        of: ``"gradients"``, or ``"outputs"`` for a model that is called without gradients: then there is no loss, and
            what is judged is the relative L2 error of the floating tensors that the model returns, each weighing the
            same. A function: what the model returns -> those of them that count.
        dtype: the low dtype, as in ``options=`` of the backend.
        profile: rates by which time is counted, as in ``options=`` of the backend.
        target: a GPU to plan for, ``"cuda:h100"``, which need not be in this machine: its rates and its op lists count,
            and what its kernels round. The model is on the CPU, and compiled steps are checked there.
        scale: loss scale of fp16; None: that of the :class:`amp_fx.GradScaler` named "default", or 65536.
        policy: base list and rules; rules hold, whatever is measured. With base ``"fp8"``, what each matmul of linears
            would cost in fp8 is measured, too; with ``"int8"``, which is about outputs, what it would cost in int8.
        fp8: how policy fp8 scales, as in ``options=`` of the backend.
        probes: vectors of random signs per batch, each a double backward; the gradient's own direction is one more.
            More of them, or more batches, make the numbers surer where few values decide, as in a classifier's head.
        seed: of the random signs, and of random numbers that the step itself draws, as for dropout.

    Raises:
        OptionsError: bad options, or a loss that is no function.
        AmpFxError: not a module, no loss, a gradient that is zero or not finite, or an op without a second derivative.
    """
    program = uncompiled(model)
    if not isinstance(program, nn.Module):
        raise AmpFxError(f"calibrate needs a torch.nn.Module; got {type(model).__name__}.")
    given = {"dtype": dtype, "policy": policy, "fp8": fp8}
    if not callable(of) and of not in OF:
        raise OptionsError(f"of must be {', '.join(map(repr, OF))} or a function; got {of!r}.")
    training = of == GRADIENTS
    if not training and loss is not None:
        raise OptionsError("calibrate of outputs takes no loss; of=function picks what counts of them.")
    opts = Options.parse(None, given if not isinstance(profile, str) else {**given, "profile": profile})
    if opts.policy.sensitivity is not None:
        raise OptionsError(f"calibrate measures sensitivity; take 'sensitivity' out of policy {policy!r}.")
    parameters = [parameter for parameter in program.parameters() if parameter.requires_grad or not training]
    if not parameters:
        raise AmpFxError(f"the model has no parameter{' that requires a gradient' * training}.")
    device = parameters[0].device.type
    low = opts.low_dtype(device if target is None else "cuda")
    level = _level(opts, device, target, training=training)
    if target is not None and profile != "auto":
        raise OptionsError(f"target={target!r} and profile={profile!r} both say which rates count; drop one.")
    rates = profile if target is None else find_target(target).profile
    opts = replace(opts, dtype=low, profile=rates, level=level)
    scale = loss_scale(scale, low) if training else 1.0
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 1:
        raise OptionsError(f"probes must be an integer from 1 on; got {probes!r}.")
    pick = of if callable(of) else loss
    steps = [
        Step(program, call_of(program, batch), pick, seed + number, of_outputs=not training)
        for number, batch in enumerate(_each(batches))
    ]
    if not steps:
        raise AmpFxError("calibrate needs at least one batch; got none.")
    graphs = _Graphs(opts, low, None if target is None else TargetProcess(target), training=training)
    graphs.run(steps, scale, probes)
    found = graphs.sensitivities()
    # a value is continuous where its derivative jumps
    jumps = [row for graph in found for row in graph.outline.nodes if has_trait(row.op, Trait.KINK)]
    sensitivity = Sensitivity(
        type(program).__name__,
        low,
        scale,
        len(steps),
        kinks=len(jumps) if training else 0,
        of=GRADIENTS if training else OUTPUTS,
        level="" if graphs.level is None else graphs.level.name,
        graphs=found,
    )
    return Calibration(sensitivity, graphs.traced, opts, steps)


class _Graphs:
    """The graphs of a model, in the order of their compilation, and what was measured of them."""

    def __init__(
        self, opts: Options, low: torch.dtype, process: TargetProcess | None, *, training: bool
    ) -> None:
        self._opts, self._low, self._process, self._training = opts, low, process, training
        self.level = levels_of(opts.policy.base).get(opts.level)
        #: one a step
        self._meters: list[Meter] = []
        #: the graphs, and their calls here and there, on the device that is planned for
        self.traced: list[MeasuredGraph] = []
        self._outlines: list[tuple[Plan, Plan]] = []
        #: numbers of the graphs that have the same calls and weights, as for batches of several sizes: what is measured
        #: of one of them counts for all, under the first number
        self._same: dict[Hashable, list[int]] = {}

    def run(self, steps: Sequence[Step], scale: float, probes: int) -> None:
        """Runs every step with each value observed; scale is that of the loss.

        AmpFxError where Dynamo makes no graph that is rewritten.
        """
        with apart(), unwrapped_errors(AmpFxError):
            # a function: Lightning's torch.compile copies what it is given, and would copy a method's graphs
            compiled = torch.compile(
                steps[0].model, backend=lambda *given: self._backend(*given), dynamic=False
            )
            is_ranged = self.level is not None and not self.level.dtype.is_floating_point
            with progress("calibrate", len(steps) * (1 + is_ranged)) as say:
                products, ways = Products(), dict[CallId, list[Way]]()
                if is_ranged:
                    ways = self._ways(steps, compiled, products, say)
                chosen = dict[CallId, Chosen]()
                for step in steps:
                    say("what roundings do")
                    meter = Meter(
                        self._low, scale, of_outputs=not self._training, level=self.level, ways=ways
                    )
                    self._meters.append(meter)
                    with compiling(step.model, step.call):
                        measure(step, meter, compiled, probes)
                    # the first batch that a value counts in decides
                    chosen = products.chosen(ways, meter.tried) | chosen
                    ways = ways | {call: narrowed(each) for call, each in chosen.items()}
                    say("what roundings do", 1)
        for meter in self._meters:
            meter.chosen = first_ways(meter.ways) | chosen
        if not self.traced:
            raise AmpFxError(
                "Dynamo made no graph that amp_fx rewrites; nothing was measured. "
                "amp_fx.explain(model, *args) says why."
            )

    def _ways(
        self, steps: Sequence[Step], compiled: Any, products: Products, say: Callable[..., None]
    ) -> dict[CallId, list[Way]]:
        """The ways to read what calls multiply in integers; in one forward of each step, which the products see."""
        assert self.level is not None
        device = "cuda" if self._process is not None else next(steps[0].model.parameters()).device.type
        measured = any(each.measured and each.device in (None, device) for each in self.level.kernels)
        ranges = Ranges()
        meter = Meter(self._low, 1.0, of_outputs=True, level=self.level, ranges=ranges, products=products)
        self._meters.append(meter)
        say("ranges of values")
        for step in steps:
            with compiling(step.model, step.call), step.returned(compiled):
                pass
            say("ranges of values", 1)
        self._meters.pop()
        return products.ways(ranges.scales() if measured else {})

    def sensitivities(self) -> list[GraphSensitivity]:
        """The means over the steps, by the names that calls have where they are planned."""
        found = []
        same_as = {number: same for same in self._same.values() for number in same}
        for number, (measured, outline) in enumerate(self._outlines):
            first, times = same_as[number][0], len(same_as[number])
            # errors of all graphs are added up: each of these has its share of what was found in all
            rows = combined(
                [meter.rows(first) for meter in self._meters],
                lambda parts, times=times: fmean(parts) / times,
            )
            calls = GraphSensitivity(measured, rows).renamed(outline)
            found.append(GraphSensitivity(outline, calls))
        return found

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """A backend of ``torch.compile`` that observes each value."""
        devices = listed_devices(gm)
        if reason := not_ours(gm):
            logger.debug("graph is not measured: %s", reason)
            return gm.forward
        ambient = ambient_regions(dict.fromkeys(devices, self._low))
        try:
            captured = capture(gm, ambient)
        except CaptureError as error:
            logger.warning("graph %s is not measured: %s", compile_id(), error)
            return gm.forward
        measured = outline_of(captured, PassContext(self._opts.policy, training=self._training))
        measured.graph_break = graph_break(gm)
        number = len(self.traced)
        graph, outline = MeasuredGraph(gm, ambient, measured.graph, self._training), measured
        if self._process is not None and "cuda" not in devices:
            tracer = Tracer()
            tracer(gm, example_inputs)
            (traced,) = tracer.graphs
            graph = TargetGraph(traced, self._training, self._process, self._low)
            outline = graph.outline(self._opts)
            outline.graph_break = measured.graph_break
            if moved := match(measured, outline).moved:
                raise TargetError(
                    f"graph {measured.graph} has other calls on the target than here, where it is measured: "
                    f"{'; '.join(moved[:4])}. Calibrate on that device, or leave target out."
                )
        asks = (value.requires_grad for value in example_inputs if isinstance(value, torch.Tensor))
        if self.level is not None and (not self._training or any(asks)):
            names = {here.name: row.name for here, row in match(measured, outline).pairs}
            profile = resolve(self._opts.profile, graph.device_type)
            if not self._training and profile is not None and profile.is_slower_in(self._low):
                graph.wide = profile
            costs = graph.wide, _cost(profile, self._low, self.level)
            graph.below = read_matmuls(
                gm, example_inputs, ambient, self._opts, *costs, names, training=self._training
            )
        self.traced.append(graph)
        self._outlines.append((measured, outline))
        calls = tuple((row.name, row.module_path, row.op, row.traced, row.low) for row in measured.nodes)
        weights = tuple(id(value) for value in example_inputs if isinstance(value, nn.Parameter))
        same = self._same.setdefault((calls, weights or number), [])
        same.append(number)
        return lambda *args: run_measured(captured, self._meters[-1], same[0], args)


def _each(batches: Any) -> list[Any]:
    if isinstance(batches, (tuple, Mapping, torch.Tensor)):
        return [batches]
    if not isinstance(batches, Iterable):
        raise AmpFxError(
            f"batches should be a tuple, a mapping, a tensor or an iterable of them; got {type(batches).__name__}."
        )
    return list(batches)


def _level(opts: Options, device: str, target: str | None, *, training: bool) -> str:
    """How matmuls are measured below 16 bits: ``"auto"`` settled for the device that is planned for."""
    base = opts.policy.base
    if not levels_of(base):
        return opts.level
    if not levels_of(base, training=training):
        raise OptionsError(
            f"policy {base!r} is about graphs without gradients; calibrate them with of='outputs'."
        )
    if target is None:
        level = auto_level(base, opts.level, device)
    else:
        level = auto_level(base, opts.level, "cuda", find_target(target).gpu.capability)
    return level.name if training else level.evaluated or level.name


def _cost(profile: DeviceProfile | None, low: torch.dtype, level: Level) -> LevelCost:
    """The times of matmuls and copies on the device that is planned for."""
    if profile is None:
        return OPERATIONS
    if (cost := LevelCost.of(profile, low, level)) is None:
        what = f"{profile.device_type} {profile.name} has no {level.policy} rate"
        raise OptionsError(
            f"policy {level.policy!r} has nothing to choose: {what}. Plan for a GPU that has one (target='cuda:h100'), "
            f"give a profile with {level.rate!r} in its peak, or profile='off'."
        )
    return cost


def loss_scale(scale: float | None, low: torch.dtype, name: str = "default") -> float:
    """The loss scale that was given for a low dtype, else that of a scaler, else where such a scaler starts.

    OptionsError for a scale that is no positive number.
    """
    if low is torch.bfloat16:
        return 1.0
    if scale is None:
        try:
            return float(find_scaler(name).get_scale())
        except ScalerError:
            return FIRST_SCALE
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise OptionsError(f"scale must be a positive number; got {scale!r}.")
    return float(scale)
