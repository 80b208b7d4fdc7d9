"""``amp_fx.store_low(model, *batch)``: a model that is only called keeps its weights in the dtype they are read in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from amp_fx._torch import unwrapped_errors
from amp_fx.compiler.rewriting import rewrite
from amp_fx.compiler.settings import Options
from amp_fx.errors import AmpFxError, CaptureError, PassError
from amp_fx.graphs.calls import is_cast
from amp_fx.graphs.keys import KEPT_META
from amp_fx.graphs.regions import ambient_regions, not_ours
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import LOW_DTYPES, listed_devices
from amp_fx.instruments.batches import arguments_of, call_of, uncompiled
from amp_fx.instruments.step import apart, entry_of
from amp_fx.precision.plans.plan import dtype_name
from amp_fx.precision.policy.forms import ScaledRows
from amp_fx.precision.policy.levels import LEVELS
from amp_fx.runtime.weights.lift import kept_copies, steps_to
from amp_fx.runtime.widened import Identity, Unscaled, identity, replace_by_pair, replace_parameter

logger = logging.getLogger(__name__)

#: in which a parameter is read: cast to a dtype, or rows with scales
Form = torch.dtype | ScaledRows


@dataclass(frozen=True)
class StoredLow:
    """The result of :func:`store_low`; as text, one line.

    Attributes:
        stored: name of a parameter -> name of the dtype that it has now.
        kept: names of the others.
        bytes_before: of all parameters, tied ones once.
        bytes_after: the same now.
    """

    stored: Mapping[str, str]
    kept: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    @property
    def saved(self) -> int:
        """Bytes."""
        return self.bytes_before - self.bytes_after

    def __str__(self) -> str:
        dtypes = ", ".join(sorted(set(self.stored.values()))) or "a low dtype"
        return (
            f"{len(self.stored)} of {len(self.stored) + len(self.kept)} parameters in {dtypes}: "
            f"{self.bytes_before / 1e6:.1f} -> {self.bytes_after / 1e6:.1f} MB, {self.saved / 1e6:.1f} MB saved"
        )


def store_low(
    model: nn.Module, *batch: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> StoredLow:
    """Replaces parameters of a model, in place, by low ones, where nothing reads them in fp32.

    For a model that is called and not trained. The model is called on the batch without gradients, op by op, to see
    what is compiled of it. A parameter is stored low if all that the graphs read of it is one low form, as they are
    planned under ``torch.inference_mode``: a cast, or in int8 and fp8 a matrix with factors. A table of embeddings that
    is a head's weight as well stays in fp32, and on a CPU so do weights that a BatchNorm is folded into. Afterwards,
    ``torch.compile(model, backend="amp_fx")`` computes there what it did before, bit for bit; code compiled earlier is
    compiled again.

    ``state_dict`` has the parameters under the names they had, and ``load_state_dict`` rounds what is fp32.

    Args:
        model: usually fp32; one that is compiled is taken as it was before.
        *batch: arguments of one call, or a list of batches, each a tuple of positional arguments, a mapping of keyword
            arguments or the only argument: what one of them reads in fp32 stays. None at all: the parameters that are
            in a low dtype already are taken to be stored so, as after ``load_state_dict(..., assign=True)``.
        options: as in ``torch.compile(model, backend="amp_fx", options=...)``.
        **kwargs: of one call.

    Raises:
        InputError: the model does not take a batch.
        OptionsError: bad options.
        AmpFxError: not a module.
    """
    program = uncompiled(model)
    if not isinstance(program, nn.Module):
        raise AmpFxError(f"store_low needs a torch.nn.Module; got {type(model).__name__}.")
    opts = Options.parse(None, options)
    # path of a parameter -> its module and attribute; what is parametrized is left out
    own = {
        f"{path}.{name}" if path else name: (module, name)
        for path, module in program.named_modules()
        if not isinstance(module, ParametrizationList)
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
    }
    before = _bytes(program)
    if batch or kwargs:
        batches = batch[0] if len(batch) == 1 and isinstance(batch[0], list) and not kwargs else ()
        calls = [call_of(program, each) for each in batches] or [arguments_of(program, batch, kwargs)]
        wanted = _read_low(program, calls, opts)
    else:
        low = [value for value in program.parameters() if value.dtype in LOW_DTYPES]
        wanted: dict[Identity, Form] = {identity(value): value.dtype for value in low}
    done: dict[Identity, Any] = {}
    stored: dict[str, str] = {}
    for path, (module, name) in own.items():
        value = module.get_parameter(name)
        form = wanted.get(key := identity(value))
        if isinstance(form, torch.dtype):
            if key not in done:
                done[key] = nn.Parameter(value.detach().to(form), value.requires_grad)
            replace_parameter(module, name, done[key])
            stored[path] = dtype_name(form)
        elif form is not None:
            level = LEVELS[form.level]
            held = Unscaled(form, f"_{level.policy}_scale")
            done[key] = replace_by_pair(module, name, held, done.get(key))
            stored[path] = dtype_name(level.dtype)
    result = StoredLow(stored, tuple(path for path in own if path not in stored), before, _bytes(program))
    logger.info("%s: %s", type(program).__name__, result)
    return result


def _bytes(program: nn.Module) -> int:
    """Bytes of all parameters, tied ones once."""
    return sum({identity(value): value.nbytes for value in program.parameters()}.values())


def _read_low(
    program: nn.Module, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], opts: Options
) -> dict[Identity, Form]:
    """The parameters that all graphs read in one low form only, and that form."""
    reads: dict[Identity, set[Form | None]] = {}

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        lows = _low_reads(gm, opts)
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
            if isinstance(value, nn.Parameter):
                reads.setdefault(identity(value), set()).add(lows.get(node.name))
        return gm.forward

    with apart(), torch.no_grad(), unwrapped_errors(AmpFxError):
        for args, kwargs in calls:
            torch.compile(entry_of(program), backend=backend)(*args, **kwargs)
    return {key: form for key, (form, *others) in reads.items() if form is not None and not others}


def _low_reads(gm: fx.GraphModule, opts: Options) -> dict[str, Form]:
    """Names of the inputs of a graph that are read in one low form and in no other, and that form."""
    devices = listed_devices(gm)
    if not_ours(gm):
        return {}
    ambient = ambient_regions({device: opts.low_dtype(device) for device in devices})
    try:
        rewritten, _ = rewrite(gm, ambient, replace(opts, weights="cache"))
    except (CaptureError, PassError):
        if opts.strict:
            raise
        # compiled in a plainer way, which casts weights in each call
        logger.info("a graph cannot be rewritten; its weights stay", exc_info=True)
        return {}
    folds = devices == {"cpu"} and opts.weights != "cast" and opts.numerics != "eager"
    copies = kept_copies(rewritten.graph)
    steps = {*steps_to(copies)}
    inputs = rewritten.graph.find_nodes(op="placeholder")
    stays = {node.name for node in inputs if any(user not in steps for user in node.users)}
    found: dict[str, Form] = {}
    for node in copies:
        weight, form = node.meta[KEPT_META].weight, node.meta[KEPT_META].form
        if found.setdefault(weight, form) != form or (folds and _is_scaled_after(node)):
            stays.add(weight)
    return {name: form for name, form in found.items() if name not in stays}


def _is_scaled_after(node: fx.Node) -> bool:
    """True for a weight into whose fp32 values a BatchNorm is folded, on a CPU, before they are rounded."""
    results = [user for call in node.users for user in call.users]
    results += [user for cast in results if is_cast(cast) for user in cast.users]
    return any(has_trait(user, Trait.BATCH_NORM) for user in results)
