"""Export: the passes on a ``torch.export`` program, with the weights stored in the dtypes they are read in.

    ep = amp_fx.export(model, (x,))
    torch.export.save(ep, "model.pt2", extra_files=amp_fx.extra_files(ep))

What comes out is a plain ExportedProgram whose casts are ordinary ops: nothing that loads it needs amp_fx.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    TensorArgument,
)
from torch.utils._pytree import tree_map

from amp_fx.errors import AmpFxError, OptionsError, did_you_mean
from amp_fx.graphs.capture import OUTPUT_META, REGION_META, graph_devices
from amp_fx.graphs.exported import adopt, ambient_dtype
from amp_fx.graphs.facts import is_eligible, output_nodes, tensors
from amp_fx.graphs.regions import Region
from amp_fx.options import Options
from amp_fx.passes import FoldWeights, KeepWeights, PassContext, export_pipeline, run_passes
from amp_fx.placement.devices import resolve
from amp_fx.plans.plan import CAST_META, PLAN_META
from amp_fx.policy.table import supported_devices

__all__ = ["REPORT_FILE", "convert", "export", "extra_files"]

logger = logging.getLogger(__name__)

#: name of the plan inside a saved program
REPORT_FILE = "amp_fx.json"

#: meta key of a converted program's graph module: its Plan
_PLAN = "amp_fx_plan"

#: option -> valid values, besides the options of the backend that export takes
_CHOICES = {"weights_beyond_range": ("raise", "clamp", "keep"), "tables": ("tied", "low", "keep")}
_SHARED_OPTIONS = ("dtype", "policy", "numerics", "profile")

_WEIGHT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def export(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    keep_io_dtypes: bool = True,
    **options: Any,
) -> torch.export.ExportedProgram:
    """Exports a model in mixed precision, as ``torch.export.export`` does in the model's own.

    Inside a ``torch.autocast`` block the program computes what the model would compute there.

    Args:
        model: usually in evaluation mode, fp32.
        args: example inputs.
        kwargs: example keyword inputs.
        dynamic_shapes: as in ``torch.export.export``.
        keep_io_dtypes: see :func:`convert`.
        options: see :func:`convert`.

    Raises:
        OptionsError: bad options, or weights beyond the range of the low dtype.
        CaptureError, PassError: the program cannot be rewritten.
    """
    opts = _ExportOptions.parse(options)
    program = torch.export.export(
        model, args, None if kwargs is None else dict(kwargs), dynamic_shapes=dynamic_shapes
    )
    return _convert(program, opts, keep_io_dtypes)


def convert(
    ep: torch.export.ExportedProgram, *, keep_io_dtypes: bool = True, **options: Any
) -> torch.export.ExportedProgram:
    """Rewrites an exported program in mixed precision.

    Args:
        ep: best as ``torch.export.export`` returns it: ``run_decompositions`` leaves fewer ops that the lists
            know. Not changed. Weights that keep their dtype are shared with the result.
        keep_io_dtypes: inputs and outputs of the user keep their dtypes. If False, those that are fp32 are in
            the low dtype.
        options: ``dtype``, ``policy``, ``numerics`` and ``profile`` as in ``options=`` of the backend;
            ``weights_beyond_range``: ``"raise"``, ``"clamp"`` to the largest value, or ``"keep"`` such a weight and
            the ops that read it in fp32;
            ``tables``: embedding tables are read in fp32. ``"tied"`` rounds one that is also a matmul's weight, as it
            is stored once; ``"low"`` rounds all of them, for a smaller file; ``"keep"`` rounds none (then a tied
            weight is stored in fp32 and cast at run time).

    Returns:
        A new program with explicit casts, no autocast and the same signature; ``extra_files`` gives its report.

    Raises:
        OptionsError: bad options, or weights beyond the range of the low dtype.
        CaptureError, PassError: the program cannot be rewritten.
    """
    return _convert(ep, _ExportOptions.parse(options), keep_io_dtypes)


def extra_files(ep: torch.export.ExportedProgram) -> dict[str, str]:
    """The report of a converted program, for ``extra_files=`` of ``torch.export.save``.

    Read it back with ``files = {"amp_fx.json": ""}; torch.export.load(path, extra_files=files)`` and
    ``amp_fx.Plan.from_json(files["amp_fx.json"])``.

    Raises:
        AmpFxError: the program was not made by :func:`export` or :func:`convert`.
    """
    plan = ep.graph_module.meta.get(_PLAN)
    if plan is None:
        raise AmpFxError(
            "this program has no report: it was not made by amp_fx.export or amp_fx.convert, or was decomposed "
            "or loaded since. Ask for the report of the program that they returned."
        )
    return {REPORT_FILE: plan.to_json()}


@dataclass(frozen=True)
class _ExportOptions:
    """Validated options of export; the first one holds those that the backend has, too."""

    shared: Options
    weights_beyond_range: str = "raise"
    tables: str = "tied"

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> _ExportOptions:
        own = {key: value for key, value in options.items() if key in _CHOICES}
        for key, value in own.items():
            if value not in _CHOICES[key]:
                raise OptionsError(
                    f"Unknown {key} {value!r}; valid: {', '.join(map(repr, _CHOICES[key]))}."
                    + did_you_mean(str(value), _CHOICES[key])
                )
        shared = {key: value for key, value in options.items() if key not in own}
        valid = sorted((*_SHARED_OPTIONS, *_CHOICES, "keep_io_dtypes"))
        for key in shared:
            if key not in _SHARED_OPTIONS:
                raise OptionsError(
                    f"Unknown option {key!r} for export; valid: {', '.join(valid)}. Options of Inductor go to "
                    f"torch._inductor.aoti_compile_and_package.{did_you_mean(str(key), valid)}"
                )
        return cls(Options.parse(None, shared), **own)


@dataclass(frozen=True)
class _Weight:
    """One input of the graph that is stored with the program."""

    name: str
    spec: InputSpec
    value: torch.Tensor

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for tied weights."""
        value = self.value
        storage = value.untyped_storage()._cdata
        return storage, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype


def _convert(
    ep: torch.export.ExportedProgram, opts: _ExportOptions, keep_io_dtypes: bool
) -> torch.export.ExportedProgram:
    gm, regions = _open(ep, opts.shared)
    device = "cuda" if "cuda" in regions else next(iter(sorted(regions)), "cpu")
    low = regions[device].dtype if regions else opts.shared.low_dtype(device)
    users = {spec.arg.name for spec in ep.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT}
    if not keep_io_dtypes:
        _narrow_ends(gm, ep.graph_signature, users, low)
    weights = _weights(ep)
    groups: dict[tuple[Any, ...], list[_Weight]] = {}
    for weight in weights:
        groups.setdefault(weight.key, []).append(weight)
    kept = _beyond_range(weights, low) if opts.weights_beyond_range == "keep" else []
    fold = FoldWeights(
        tuple(tuple(weight.name for weight in group) for group in groups.values()),
        "keep" if opts.shared.numerics == "eager" else opts.tables,
    )
    context = PassContext(
        opts.shared.policy,
        opts.shared.numerics,
        resolve(opts.shared.profile, device),
        folded=frozenset(weight.name for weight in weights),
    )
    plan = run_passes(gm, export_pipeline(KeepWeights(tuple(w.name for w in kept)), fold), context)
    for given in plan.inputs:
        given.parameter = given.name in context.folded
    program = _program(ep, gm, _stored(gm, groups, opts), users)
    program.graph_module.meta[_PLAN] = plan
    logger.debug("converted %d nodes, %d casts", len(gm.graph.nodes), len(plan.casts))
    if not any(row.dtype is low for row in plan.nodes):
        logger.warning(
            "nothing runs in %s: by the profile of this machine, or the policy, it would not pay. If the program is "
            "to run elsewhere, export with profile='off', or with a profile that was measured there.",
            low,
        )
    return program


def _open(ep: torch.export.ExportedProgram, opts: Options) -> tuple[fx.GraphModule, dict[str, Region]]:
    """The program's graph for the passes, and the autocast state at its start."""
    devices = graph_devices(ep.graph_module).intersection(supported_devices())
    # what surrounded the export counts, not what surrounds this call
    regions = {device: Region(True, opts.low_dtype(device), by_user=False) for device in devices}
    gm = adopt(ep.graph_module, regions)
    ambient = ambient_dtype(gm)
    if ambient is not None:
        regions = {device: Region(True, ambient, by_user=True) for device in devices}
        gm = adopt(ep.graph_module, regions)
    return gm, regions


def _weights(ep: torch.export.ExportedProgram) -> list[_Weight]:
    """Floating tensors that are stored with the program and that it does not write to."""
    signature = ep.graph_signature
    written = {*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()}
    found = []
    for spec in signature.input_specs:
        if spec.kind not in _WEIGHT_KINDS or spec.target is None or spec.target in written:
            continue
        value = ep.state_dict.get(spec.target, ep.constants.get(spec.target))
        if is_eligible(value):
            found.append(_Weight(spec.arg.name, spec, value))
    return found


def _beyond_range(weights: list[_Weight], low: torch.dtype) -> list[_Weight]:
    return [weight for weight in weights if bool(_overflows(weight.value.detach(), low).any())]


def _overflows(value: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """Where a finite value is infinite in the low dtype."""
    return value.isfinite() & value.to(low).isinf()


def _stored(
    gm: fx.GraphModule, groups: Mapping[Any, list[_Weight]], opts: _ExportOptions
) -> dict[str, torch.Tensor]:
    """The weights that change, by their names in the state dict or among the constants.

    Raises:
        OptionsError: values that the low dtype cannot hold.
    """
    dtypes = {
        node.name: node.meta["val"].dtype
        for node in gm.graph.find_nodes(op="placeholder")
        if tensors(node.meta.get("val"))
    }
    stored: dict[str, torch.Tensor] = {}
    refused: list[str] = []
    for group in groups.values():
        value, dtype = group[0].value.detach(), dtypes[group[0].name]
        if value.dtype is dtype:
            continue
        beyond = _overflows(value, dtype)
        low = value.to(dtype)
        if bool(beyond.any()):
            names = " = ".join(str(weight.spec.target) for weight in group)
            refused.append(f"{names} (largest magnitude {value[beyond].abs().max().item():g})")
            low = torch.where(beyond, value.sign().to(dtype) * torch.finfo(dtype).max, low)
        for weight in group:
            is_parameter = isinstance(weight.value, torch.nn.Parameter)
            stored[str(weight.spec.target)] = (
                torch.nn.Parameter(low, weight.value.requires_grad) if is_parameter else low
            )
    if refused and opts.weights_beyond_range == "raise":
        raise OptionsError(
            f"weights beyond the range of the low dtype: {', '.join(refused)}. Use dtype='bfloat16', or say what to do "
            "with weights_beyond_range='clamp' or 'keep' (in fp32, with the ops that read them)."
        )
    return stored


def _narrow_ends(
    gm: fx.GraphModule, signature: ExportGraphSignature, users: set[str], low: torch.dtype
) -> None:
    """Puts the user's fp32 inputs and outputs into the low dtype; the casts inside are fused by the passes."""
    written = set(signature.user_inputs_to_mutate.values())
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name in users - written and is_eligible(value) and value.dtype is torch.float32:
            node.meta["val"] = value.to(low)
            node.meta.pop("tensor_meta", None)
            wide = _cast(node, value.dtype, before=_first_call(gm.graph))
            node.replace_all_uses_with(wide, delete_user_cb=lambda user, wide=wide: user is not wide)
    output = gm.graph.output_node()
    ends = list(output.args[0])  # type: ignore[arg-type]  # a tuple
    for index, spec in enumerate(signature.output_specs):
        value = ends[index].meta.get("val") if isinstance(ends[index], fx.Node) else None
        if spec.kind is OutputKind.USER_OUTPUT and is_eligible(value) and value.dtype is torch.float32:
            ends[index] = _cast(ends[index], low, before=output)
    output.args = (tuple(ends),)
    output.meta[OUTPUT_META] = [[v.dtype for v in tensors(n.meta.get("val"))] for n in output_nodes(gm)]


def _first_call(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


def _cast(node: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
    with node.graph.inserting_before(before):
        cast = node.graph.call_function(torch.ops.aten.to.dtype, (node, dtype))
    neighbour = next((user for user in node.users if REGION_META in user.meta), node)
    cast.meta = {
        key: neighbour.meta[key] for key in ("nn_module_stack", "stack_trace") if key in neighbour.meta
    }
    cast.meta.update(
        {CAST_META: True, REGION_META: neighbour.meta.get(REGION_META, {}), "val": node.meta["val"].to(dtype)}
    )
    return cast


def _program(
    ep: torch.export.ExportedProgram, gm: fx.GraphModule, stored: Mapping[str, torch.Tensor], users: set[str]
) -> torch.export.ExportedProgram:
    """The program with a new graph and new weights."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            for key in (REGION_META, PLAN_META, CAST_META, OUTPUT_META):
                node.meta.pop(key, None)
    signature = ep.graph_signature
    outputs = [
        replace(spec, arg=TensorArgument(node.name))
        if isinstance(node, fx.Node) and isinstance(spec.arg, TensorArgument)
        else spec
        # fx has no type for a tuple of outputs
        for spec, node in zip(signature.output_specs, gm.graph.output_node().args[0], strict=True)  # type: ignore[arg-type]
    ]
    return torch.export.ExportedProgram(
        root=gm,
        graph=gm.graph,
        graph_signature=ExportGraphSignature(list(signature.input_specs), outputs),
        state_dict={name: stored.get(name, value) for name, value in ep.state_dict.items()},
        range_constraints=dict(ep.range_constraints),
        module_call_graph=[_own_entry(entry) for entry in ep.module_call_graph],
        example_inputs=_examples(ep, gm, users),
        constants={name: stored.get(name, value) for name, value in ep.constants.items()},
        verifiers=ep.verifiers,
    )


def _own_entry(entry: torch.export.ModuleCallEntry) -> torch.export.ModuleCallEntry:
    """A copy whose names the new program may change."""
    if entry.signature is None:
        return replace(entry)
    called = replace(
        entry.signature, inputs=list(entry.signature.inputs), outputs=list(entry.signature.outputs)
    )
    return replace(entry, signature=called)


def _examples(ep: torch.export.ExportedProgram, gm: fx.GraphModule, users: set[str]) -> Any:
    """The example inputs, in the dtypes that the program takes now."""
    lows = {
        value.dtype
        for node in gm.graph.find_nodes(op="placeholder")
        if node.name in users
        for value in tensors(node.meta.get("val"))
        if is_eligible(value)
    }
    if torch.float32 in lows or not lows:
        return ep.example_inputs
    low = lows.pop()
    return tree_map(
        lambda v: v.to(low) if isinstance(v, torch.Tensor) and v.dtype is torch.float32 else v,
        ep.example_inputs,
    )
