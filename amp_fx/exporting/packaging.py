"""AOTInductor packages of exported programs, as fast on a CPU as ``torch.compile`` with amp_fx.

    amp_fx.package("model.pt2", "model.aoti.pt2")
    run = torch._inductor.aoti_load_package("model.aoti.pt2")

What loads a package needs no amp_fx. It is for CPUs of the kind that it is compiled on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from amp_fx._torch import compile_package, multiplies_int8, quantised_ops
from amp_fx.compiler.compiling import hook
from amp_fx.errors import ExportError, OptionsError, PassError
from amp_fx.exporting.converting import REPORT_FILE
from amp_fx.exporting.program import new_program, weights_of
from amp_fx.graphs.exported import adopt
from amp_fx.graphs.keys import ATTENTION_MARK, PLAN_META, REGION_META
from amp_fx.graphs.values import graph_devices, storage_of, storages_written_in
from amp_fx.instruments.batches import raised
from amp_fx.instruments.progress import progress
from amp_fx.passes import HoldPacked, Note, Notes, PassContext, joint_passes, package_passes
from amp_fx.passes.base import mark
from amp_fx.passes.forward.choose_attention import choice
from amp_fx.precision.placement.attention import SCORES_AT_ONCE
from amp_fx.precision.placement.devices import resolve
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.plan import Plan
from amp_fx.precision.policy import Policy
from amp_fx.precision.policy.levels import is_narrow
from amp_fx.runtime.weights.lift import SHIFT, Lift, is_plain
from amp_fx.runtime.weights.patterns import apply_patterns
from amp_fx.runtime.weights.products import compute_zeros, write_in_int8, write_out_int8

logger = logging.getLogger(__name__)

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def package(
    program: torch.export.ExportedProgram | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    profile: str | DeviceProfile = "auto",
    inductor_configs: Mapping[str, Any] | None = None,
) -> str:
    """Compiles a program with AOTInductor into a package.

    On a CPU weights are folded and packed, as ``torch.compile`` with amp_fx has them, but for those that the program
    writes to, and where weights are in fp8. What was packed has other names in the package. Attention in bf16 is two
    products around a softmax where this CPU takes less time for them, or where the program's plan has it so.

    Args:
        program: as :func:`amp_fx.export` returns it, or the file that it was saved in with :func:`amp_fx.extra_files`.
            Of any other program the policy's rules about attention are not known. Not changed.
        path: of the package; ends in ``.pt2``.
        profile: of the CPU, as in ``options=`` of the backend; ``"off"`` keeps attention as it is but for what the
            program's policy or plan asks for.
        inductor_configs: as in ``torch._inductor.aoti_compile_and_package``, before what is set here. With
            ``emulate_precision_casts``, which goes with ``numerics="eager"``, nothing is set here. With ``freezing``
            weights are left to Inductor: True folds and packs them, False leaves them as they are.

    Returns:
        The path, for ``torch._inductor.aoti_load_package``.

    Raises:
        OptionsError: the path ends in something else, the profile is none, or Inductor is to fold buffers that the
            program writes to.
        PassError: Inductor left packed weights out.
        ExportError: the file is not there, or holds no exported program, or the package's folder cannot be written.
    """
    path, given = os.fspath(path), dict(inductor_configs or {})
    if not path.endswith(".pt2"):
        raise OptionsError(f"a package ends in .pt2, as AOTInductor wants; got {path!r}.")
    if not os.access(folder := Path(path).absolute().parent, os.W_OK):
        raise ExportError(f"cannot write {path!r}: {str(folder)!r} is no folder to write to.")
    with progress("package") as say:
        say("opens the program")
        return _compiled(program, path, profile, given, say)


def _compiled(
    program: torch.export.ExportedProgram | str | os.PathLike[str],
    path: str,
    profile: str | DeviceProfile,
    given: dict[str, Any],
    say: Callable[[str], object],
) -> str:
    """Compiles a program with what is given to Inductor, and ours; errors are those of :func:`package`."""
    program, plan = _opened(program)
    if given.get("freezing") and (written := _written(program)):
        raise OptionsError(
            f"freezing=True would fold the values that {', '.join(written)} had at the export, and the program writes "
            "to them. Leave it out."
        )
    hold, before, notes = HoldPacked(), {}, Notes()
    if graph_devices(program.graph_module) == {"cpu"} and not given.get("emulate_precision_casts"):
        if "freezing" not in given:
            say("computes what it holds of weights")
            program, hold = _packed(program)
        calls = program.graph.find_nodes(op="call_function", target=_ATTENTION)
        before = {node: {**node.meta} for node in calls}
        attention = _attention(plan, calls, resolve(profile, "cpu"))
        scores = SCORES_AT_ONCE * torch.get_num_threads()
        joint = joint_passes({"cpu"}, attention=attention, scores_at_once=scores)
        given |= {**hook("joint", joint, given), **hook("post_grad", package_passes(hold), given, notes)}
    say("AOTInductor compiles")
    try:
        compile_package(program, path, given)
    finally:
        for node, meta in before.items():
            node.meta = meta
    if left := len(hold.packed) - len(set().union(*notes.get(Note.HELD, ()))):
        Path(path).unlink(missing_ok=True)
        raise PassError(
            f"Inductor left out {left} of {len(hold.packed)} packed weights: {path} would give wrong numbers. "
            "inductor_configs={'freezing': True} compiles the program without them; please report it."
        )
    return path


def _opened(
    program: torch.export.ExportedProgram | str | os.PathLike[str],
) -> tuple[torch.export.ExportedProgram, Plan]:
    """The program, and its plan, which is empty where it has none."""
    if isinstance(program, torch.export.ExportedProgram):
        return program, program.graph_module.meta.get(PLAN_META, Plan())
    if not Path(program).is_file():
        raise ExportError(
            f"there is no file {os.fspath(program)!r}: give a program that torch.export.save has written."
        )
    quantised_ops()  # a file may name them
    files = {REPORT_FILE: ""}
    try:
        loaded = torch.export.load(program, extra_files=files)
    except Exception as error:
        # nothing of amp_fx has run yet
        raise ExportError(
            f"torch.export.load cannot read {os.fspath(program)!r}: {raised(error)}."
        ) from error
    return loaded, Plan.from_json(files[REPORT_FILE]) if files[REPORT_FILE] else Plan()


def _written(program: torch.export.ExportedProgram) -> list[str]:
    """Names of the buffers that a program writes to."""
    signature = program.graph_signature
    named = [*signature.buffers_to_mutate.values()]
    if not storages_written_in(program.graph):
        return named
    # in a program that was loaded, views do not share the storage of their base
    gm = adopt(program.graph_module, {})
    written = storages_written_in(gm.graph)
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    inputs = gm.graph.find_nodes(op="placeholder")
    return named + [held[node.name] for node in inputs if node.name in held and storage_of(node) in written]


def _attention(
    plan: Plan, calls: list[fx.Node], profile: DeviceProfile | None
) -> tuple[tuple[str, str], ...]:
    """Marks calls in bf16, and says what computes each, for :func:`joint_passes`."""
    rows = {row.name: row for row in plan.nodes}
    context = PassContext(Policy.parse(plan.policy), profile=profile)
    found: list[tuple[str, str]] = []
    for node in calls:
        if node.meta["val"].dtype is not torch.bfloat16:
            continue
        row = rows.get(node.name)
        rule = None if row is None else context.policy.rule_for(row.op, row.module_path)
        planned = "" if row is None else row.computed_by
        chosen, why = choice(node, rule, context)
        how = planned or chosen
        logger.debug("%s by %s: %s", node.name, how, "as the plan has it" if planned else why)
        found.append((node.name, how))
        mark(node, ATTENTION_MARK, node.name)
    return tuple(found)


def _packed(program: torch.export.ExportedProgram) -> tuple[torch.export.ExportedProgram, HoldPacked]:
    """A program that holds what it computes of its weights, and the pass that has Inductor hold them packed."""
    gm = adopt(program.graph_module, {})
    # Inductor would leave out what nobody reads, and packed weights with it
    gm.graph.eliminate_dead_code()
    inputs, written = gm.graph.find_nodes(op="placeholder"), storages_written_in(gm.graph)
    values = {weight.name: weight.value for weight in weights_of(program)}
    weights = [n for n in inputs if n.name in values and is_plain(n) and storage_of(n) not in written]
    # in a graph that was opened up, ops inside a region of autocast would run in their own dtypes
    in_autocast = any(
        region.enabled for node in gm.graph.nodes for region in node.meta.get(REGION_META, {}).values()
    )
    if in_autocast or any(map(is_narrow, values.values())):
        return program, HoldPacked()
    if any(value.dtype is torch.int8 for value in values.values()):
        if multiplies_int8():
            compute_zeros(gm.graph, {node for node in weights if not values[node.name].any()})
            write_in_int8(gm.graph, weights)
        else:
            write_out_int8(gm.graph)
    lift = Lift(gm, weights)
    lift.shifts.update(node for node in weights if node.name.endswith(SHIFT))
    lift.extend()
    apply_patterns(lift, wide=True)
    lift.take_the_rest()
    split = lift.split()
    parameters: dict[str, nn.Parameter] = {}
    packed: dict[int, Tensor] = {}
    made = split.prepare([values[node.name] for node in split.weights])
    for node, value in zip(split.inputs, made, strict=True):
        if value.is_mkldnn:
            # no program holds such a tensor: Inductor finds it by the address of one in its place
            like = torch.zeros(value.shape, dtype=value.dtype)
            packed[like.data_ptr()], value = value, like
        parameters[node.name] = nn.Parameter(value, requires_grad=False)
    for node in inputs:
        if node.name in values and not node.users:
            gm.graph.erase_node(node)
    return new_program(program, gm, {}, {}, parameters), HoldPacked(packed)
