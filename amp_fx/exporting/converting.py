"""Export: the passes on a ``torch.export`` program, with the weights stored in the dtypes they are read in.

    ep = amp_fx.export(model, (x,))
    torch.export.save(ep, "model.pt2", extra_files=amp_fx.extra_files(ep))

What comes out is a plain ExportedProgram whose casts are ordinary ops: nothing that loads it needs amp_fx.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from amp_fx._torch import multiplies_int8
from amp_fx.compiler.level_passes import policy_levels
from amp_fx.compiler.rewriting import replay
from amp_fx.compiler.settings import LEVEL_OPTIONS, Options
from amp_fx.errors import AmpFxError, ExportError, OptionsError, did_you_mean, one_of
from amp_fx.exporting.program import (
    beyond_range,
    lift_weights,
    narrow_ends,
    new_program,
    stored_weights,
    tied,
)
from amp_fx.exporting.shapes import check_shapes
from amp_fx.graphs.exported import adopt, ambient_dtype
from amp_fx.graphs.keys import PLAN_META
from amp_fx.graphs.regions import Region
from amp_fx.graphs.values import graph_device, listed_devices, tensors
from amp_fx.instruments.batches import compiling, inputs_of, raised, uncompiled
from amp_fx.instruments.progress import progress
from amp_fx.passes import (
    FuseCasts,
    KeepWeights,
    MarkStored,
    PassContext,
    PassSelection,
    captured_passes,
    run_in_order,
    run_passes,
)
from amp_fx.precision.placement.devices import resolve
from amp_fx.precision.plans.reading import casts_in, input_plans, unused_rules
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.engines import ANY, ENGINES, Engine
from amp_fx.precision.policy.levels import AUTO, levels_of

logger = logging.getLogger(__name__)

#: name of the plan inside a saved program
REPORT_FILE = "amp_fx.json"
#: options that export has and the backend has not -> their values, the default first
CHOICES = {
    "weights_beyond_range": ("raise", "clamp", "keep"),
    "tables": ("tied", "low", "keep"),
    "int8_range": ("full", "reduced"),
    "engine": (ANY, *ENGINES),
}
_SHARED_OPTIONS = ("dtype", "policy", "numerics", "profile", "plan", "disable_passes", *LEVEL_OPTIONS)


def export(
    model: torch.nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    keep_io_dtypes: bool = True,
    **options: Any,
) -> torch.export.ExportedProgram:
    """Exports a model in mixed precision, as ``torch.export.export`` does in the model's own.

    Inside a ``torch.autocast`` block the program computes what the model would compute there.

    Args:
        model: usually in evaluation mode, fp32. One that is compiled is taken as it was before.
        args: example inputs: a tuple, or one batch as :func:`amp_fx.calibrate` takes it.
        kwargs: example keyword inputs.
        dynamic_shapes: as in ``torch.export.export``.
        keep_io_dtypes: see :func:`convert`.
        options: see :func:`convert`.

    Raises:
        InputError: the model does not take the inputs.
        ExportError: torch.export does not take the model, or ``dynamic_shapes`` has a dimension that an input has not,
            or a dynamic one of size 0 or 1.
        OptionsError, CaptureError, PassError: see :func:`convert`.
    """
    opts, own = _parse(options)
    model = uncompiled(model)
    given, named = inputs_of(model, args, kwargs)
    if remedy := training_remedy(model):
        logger.warning("export: %s", remedy)
    # plans of graphs that are called without gradients are about what is traced so
    is_trained = torch.is_grad_enabled() and opts.plan is None
    try:
        with (
            progress("export: traces the model"),
            compiling(model, (given, named)),
            torch.set_grad_enabled(is_trained),
        ):
            if dynamic_shapes is not None:
                check_shapes(model, given, named, dynamic_shapes)
            program = torch.export.export(model, given, named, dynamic_shapes=dynamic_shapes)
    except AmpFxError:
        raise
    except Exception as error:
        # nothing of amp_fx has run yet
        raise ExportError(
            f"torch.export.export(model, args, kwargs) fails on the model: {raised(error)}."
        ) from error
    return _convert(program, opts, own, keep_io_dtypes)


def training_remedy(model: Any) -> str:
    """The remedy for a model that draws, or takes statistics of its batch, when it is served; empty for any other."""
    kinds = torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._BatchNorm
    for path, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        # a dropout of nothing draws nothing
        if module.training and isinstance(module, kinds) and getattr(module, "p", 1.0):
            return (
                f"Module {path!r} ({type(module).__name__}) is in training mode, and the program computes as in "
                "training. For inference call model.eval() first."
            )
    return ""


def convert(
    ep: torch.export.ExportedProgram, *, keep_io_dtypes: bool = True, **options: Any
) -> torch.export.ExportedProgram:
    """Rewrites an exported program in mixed precision.

    Args:
        ep: best as ``torch.export.export`` returns it: ``run_decompositions`` leaves fewer ops that the lists
            know. Not changed. Weights that keep their dtype are shared with the result.
        keep_io_dtypes: inputs and outputs of the user keep their dtypes. If False, those that are fp32 are in
            the low dtype; ``module()`` of the program raises :class:`amp_fx.InputError` for others.
        options: ``dtype``, ``policy``, ``plan``, ``fp8``, ``int8``, ``numerics`` and ``disable_passes`` as in
            ``options=`` of the backend; ``profile`` as well, but ``"off"`` by default, since the program may run on
            another machine;
            ``weights_beyond_range``: ``"raise"``, ``"clamp"`` to the largest value, or ``"keep"`` such a weight and
            the ops that read it in fp32;
            ``tables``: which embedding tables are rounded: one that is also a matmul's weight (``"tied"``, stored
            once), all (``"low"``), or none (``"keep"``);
            ``engine``: what serves the file, ``"onnxruntime"``, ``"openvino"``, ``"tensorrt"``, ``"executorch"`` or
            None. Its row of :data:`amp_fx.precision.policy.engines.ENGINES` says which dtype is the default, and what
            stays in 16 bits because the engine does not multiply its form in integers;
            ``int8_range``: ``"reduced"`` has weights in int8 from -64 to 64, for runtimes on x86 without VNNI, torch's
            ``_int_mm`` among them.
            Weights in fp8 are stored as e4m3 (columns, contracted), with factors (columns, 1) under ``..._fp8_scale``.

    Returns:
        A new program with explicit casts, no autocast and the same signature; ``extra_files`` gives its report.

    Raises:
        OptionsError: bad options, or weights beyond the range of the low dtype.
        CaptureError, PassError: the program cannot be rewritten.
    """
    return _convert(ep, *_parse(options), keep_io_dtypes)


def extra_files(ep: torch.export.ExportedProgram) -> dict[str, str]:
    """The report of a converted program, for ``extra_files=`` of ``torch.export.save``; AmpFxError where it has none.

    Read it back with ``files = {"amp_fx.json": ""}; torch.export.load(path, extra_files=files)`` and
    ``amp_fx.Plan.from_json(files["amp_fx.json"])``.
    """
    if (plan := ep.graph_module.meta.get(PLAN_META)) is None:
        raise AmpFxError(
            "this program has no report: it was not made by amp_fx.export or amp_fx.convert, or was decomposed "
            "or loaded since. Ask for the report of the program that they returned."
        )
    return {REPORT_FILE: plan.to_json()}


def _parse(options: Mapping[str, Any]) -> tuple[Options, dict[str, str]]:
    """The options that the backend has, too, and those of :data:`CHOICES`."""
    named = {key: value for key, value in options.items() if (key, value) != ("engine", None)}
    own = {key: one_of(key, valid, named.get(key, valid[0])) for key, valid in CHOICES.items()}
    shared = {key: value for key, value in options.items() if key not in own}
    valid = sorted((*_SHARED_OPTIONS, *CHOICES, "keep_io_dtypes"))
    if unknown := [key for key in shared if key not in _SHARED_OPTIONS]:
        raise OptionsError(
            f"Unknown option {unknown[0]!r} for export; valid: {', '.join(valid)}. Options of Inductor go to "
            f"torch._inductor.aoti_compile_and_package.{did_you_mean(unknown[0], valid)}"
        )
    # a file is for other machines: this one's rates say nothing about them
    parsed = Options.parse(None, {"profile": "off", **shared})
    if parsed.policy.sensitivity is not None:
        raise OptionsError(
            "export does not place by measured sensitivity; got a policy with "
            f"sensitivity={parsed.policy.sensitivity!r}. Give the plan that amp_fx.calibrate(..., of='outputs').plan() "
            "makes."
        )
    wide = next((rule for rule in parsed.policy.rules if rule.result is not None), None)
    if wide is not None:
        raise OptionsError(
            f"'result' in policy rule {wide} is for torch.compile: no op that every runtime has multiplies low "
            "operands and returns fp32. Use 'precision': 'fp32' for the call."
        )
    return _for_engine(parsed, ENGINES.get(own["engine"])), own


def _for_engine(opts: Options, engine: Engine | None) -> Options:
    """The options with what the row of an engine adds; OptionsError for what it does not take."""
    if engine is None:
        return opts
    dtype = opts.dtype or engine.dtypes[0]
    if dtype not in engine.dtypes:
        raise OptionsError(
            f"engine={engine.name!r} has no kernels on a CPU for dtype={str(dtype).removeprefix('torch.')!r}; valid: "
            f"{', '.join(str(each).removeprefix('torch.') for each in engine.dtypes)}."
        )
    below = bool(levels_of(opts.policy.base)) or any(plan.decides_levels for plan in opts.plan or ())
    if below and engine.int8 is None:
        raise OptionsError(
            f"engine={engine.name!r} does not run what is written below 16 bits: {engine.otherwise}. Export with "
            "policy='autocast', or by a plan without such levels."
        )
    if not below or engine.int8 in (None, AUTO):
        return replace(opts, dtype=dtype)
    if opts.level not in (AUTO, engine.int8):
        raise OptionsError(
            f"engine={engine.name!r} contradicts {opts.policy.base}={opts.level!r}: {engine.otherwise}. Drop one."
        )
    if opts.plan is None:
        logger.warning(
            "policy %r finds scales in each call. engine=%r: %s, so that all products stay in 16 bits. Measure scales: "
            "amp_fx.calibrate(model, batches, of='outputs', policy=%r).plan(budget=2, engine=%r).",
            opts.policy.base,
            engine.name,
            engine.otherwise,
            opts.policy.base,
            engine.name,
        )
    return replace(opts, dtype=dtype, level=engine.int8)


@progress("export: places casts, and rounds weights")
def _convert(
    ep: torch.export.ExportedProgram, opts: Options, own: Mapping[str, str], keep_io_dtypes: bool
) -> torch.export.ExportedProgram:
    devices = listed_devices(ep.graph_module)
    # what surrounded the export counts, not what surrounds this call
    regions = {device: Region(True, opts.low_dtype(device), by_user=False) for device in devices}
    gm = adopt(ep.graph_module, regions)
    if (ambient := ambient_dtype(gm)) is not None:
        regions = {device: Region(True, ambient, by_user=True) for device in devices}
        gm = adopt(ep.graph_module, regions)
    device = graph_device(gm, regions)
    low = regions[device].dtype if regions else opts.low_dtype(device)
    narrowed = {} if keep_io_dtypes else narrow_ends(gm, ep.graph_signature, low)
    weights = stored_weights(ep)
    groups = tied(weights)
    kept = beyond_range(weights, low) if own["weights_beyond_range"] == "keep" else []
    store = MarkStored(
        tuple(tuple(weight.name for weight in group) for group in groups),
        "keep" if opts.numerics == "eager" else own["tables"],
    )
    profile = resolve(opts.profile, device)
    if own["int8_range"] == "reduced" and any(v.dtype is torch.int8 for v in tensors(ep.state_dict)):
        raise OptionsError(
            "int8_range='reduced' is for weights that the export quantises, and this model holds weights in int8, as "
            "amp_fx.store_low leaves them. Export the model as it was before, or with int8_range='full'."
        )
    names, bits = frozenset(weight.name for weight in weights), 7 if own["int8_range"] == "reduced" else 8
    context = PassContext(
        opts.policy,
        opts.numerics,
        profile,
        folded=names,
        weight_bits=bits,
        disabled=opts.disable_passes,
        times_calls=opts.profile == "auto",
    )
    selection, means = PassSelection(keep=KeepWeights(tuple(w.name for w in kept)), store=store), ""
    if opts.plan is not None:
        plan = replay(gm, opts, device, selection, context)
    else:
        if levels_of(opts.policy.base):
            levels, means = policy_levels(opts, profile, device, low, training=False)
            selection = replace(selection, levels=levels)
        plan = run_passes(gm, captured_passes(selection), context)
        plan.meaning = means
    folds = devices == {"cpu"} and opts.numerics != "eager"
    stored = lift_weights(gm, groups, own["weights_beyond_range"], folds=folds)
    # where a norm was, a value may have been widened and narrowed
    run_in_order(gm, (FuseCasts(),), context)
    plan.inputs = input_plans(gm, names)
    plan.casts = [*casts_in(gm), *(cast for cast in plan.casts if "." in cast.name)]
    program = new_program(ep, gm, stored, narrowed)
    program.graph_module.meta[PLAN_META] = plan
    for text in unused_rules([plan]):
        logger.warning("%s", text)
    logger.debug("converted %d nodes, %d casts", len(gm.graph.nodes), len(plan.casts))
    int8_mm = gm.graph.find_nodes(op="call_function", target=torch.ops.aten._int_mm.default)
    if int8_mm and device == "cpu" and bits == 8 and not multiplies_int8():
        logger.warning(
            "Without VNNI, as here, torch._int_mm clamps sums of products in int8, and the program calls it. It is "
            "right elsewhere, and in a package of amp_fx.package; for CPUs like this one export with "
            "int8_range='reduced'."
        )
    listed = [row for row in plan.nodes if row.op_class is OpClass.LOW and row.low is not None]
    in_fp32 = sum(row.dtype is torch.float32 for row in listed)
    if in_fp32 and profile is not None:
        logger.warning(
            "%d of %d ops that could run in %s stay in fp32: by the rates of %s, their casts would cost more than they "
            "save. If the program is to run elsewhere, export with profile='off', or with a profile that was measured "
            "there.",
            in_fp32,
            len(listed),
            listed[0].low,
            profile.name,
        )
    return program
