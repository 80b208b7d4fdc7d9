"""What a step keeps between forward and backward: the option ``activation_memory``."""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import Halves, partitioner, saves_through_hooks
from amp_fx.compiler.settings import Options
from amp_fx.errors import OptionsError
from amp_fx.graphs.partition import Partition, kept_storages
from amp_fx.passes import KeepLess, Note, Notes, Pass, PassContext, run_in_order
from amp_fx.passes.inductor.keep_less import described, masters_of
from amp_fx.precision.placement.kept import KeptValue, least_bytes

logger = logging.getLogger(__name__)

#: steps in which the share that torch computes again is looked for
_STEPS = 16
#: bytes that a graph keeps from which a budget that cannot be met is an error: of less nobody notices the rest
_NOTICED = 2**20

Run = Callable[[fx.GraphModule, tuple[Pass, ...]], None]


def keeping_hook(
    sources: str, example_inputs: Sequence[Any], opts: Options, notes: Notes | None
) -> dict[str, Any]:
    """The Inductor option that makes forward and backward of its joint graphs; none where the option is "keep".

    Nor where hooks take what is saved: a hook may do arithmetic, and that of integers is another one.

    ``sources`` is a hash of the code of passes; what they note is added to ``notes``.
    """
    context, memory = PassContext(disabled=opts.disable_passes), opts.activation_memory
    if memory == "keep":
        return {}
    if saves_through_hooks():
        logger.info("activation_memory=%r means 'keep' in graphs compiled under saved_tensors_hooks", memory)
        return {}

    def run(forward: fx.GraphModule, passes: tuple[Pass, ...]) -> None:
        run_in_order(forward, passes, context, notes)

    # Dynamo guards on the type: a parameter is one in every call
    weights = tuple(at for at, value in enumerate(example_inputs) if isinstance(value, torch.nn.Parameter))
    uuid = f"{sources} {memory} {weights} {sorted(opts.disable_passes)}"
    return partitioner(uuid, lambda halves: divide(halves, run, memory, weights), opts.inductor)


def told_of_hooks(compiled: Callable[..., Any], opts: Options) -> Callable[..., Any]:
    """A compiled graph that warns once where hooks take what it saves, and were not there when it was compiled.

    Dynamo guards on no hooks but those that it compiles in.
    """
    if opts.activation_memory == "keep" or saves_through_hooks():
        return compiled
    told = False

    def run(*args: Any) -> Any:
        nonlocal told
        if not told and saves_through_hooks() and torch.is_grad_enabled():
            told = True
            warnings.warn(
                "saved_tensors_hooks take 8-bit integers and their scales "
                f"(activation_memory={opts.activation_memory!r}): the graph was compiled without hooks. Hooks that "
                "move or copy tensors are right; hooks that compute give wrong gradients: "
                "call torch._dynamo.reset(), then call the model first under them.",
                stacklevel=2,
            )
        return compiled(*args)

    return run


def saved_for_backward(notes: Notes) -> dict[str, int]:
    """What a step saves with the option, and without; empty where nothing was noted, as a cache had the code."""
    found: Counter[str] = Counter()
    for value, bits in (row for rows in notes.get(Note.KEPT, ()) for row in rows):
        found["before"] += value.size
        found["after"] += {8: value.eight, 4: value.four}.get(bits, value.size)
        if bits is not None:
            lossless = "1 bit" if value.eight else "cast again"
            found[f"{bits} bits" if value.error else lossless] += 1
    return dict(found)


def divide(
    halves: Halves, run: Run, memory: str | float, weights: tuple[int, ...]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward of a joint graph, with what one keeps for the other as the option says.

    For a budget: 8 bits, in as few values as can be. Where that is too much, torch computes values again, as few as
    can be, and the rest is kept in 8 bits; where this is too much as well, values are in 4 bits.

    Args:
        halves: cuts the graph in two.
        run: runs passes on a forward.
        memory: "int8", or the share of the bytes that are kept without the option.
        weights: positions of parameters among the program's inputs.

    Raises:
        OptionsError: the share is smaller than the smallest that can be; with that one.
    """
    partition, most = Partition(*halves(1.0)), None
    if isinstance(memory, float):
        values = _values(partition, weights)
        whole = sum(value.size for value in values)
        most = int(memory * whole)
        if least_bytes(values, 8) > most:
            partition = _again(halves, partition, whole, most, weights)
            most = max(most, least_bytes(_values(partition, weights), 4))
    run(partition.forward, (KeepLess(weights, most),))
    partition.hand_over()
    return partition.forward, partition.backward


def _again(halves: Halves, at_once: Partition, whole: int, most: int, weights: tuple[int, ...]) -> Partition:
    """The halves that compute as little again as a budget lets them."""
    last = Partition(*halves(0.0))
    for bits in (8, 4):
        if least_bytes(_values(last, weights), bits) > most:
            continue
        if bits == 4 and least_bytes(_values(at_once, weights), bits) <= most:
            return at_once
        # the largest share that fits, by halving: 0 does, 1 does not
        low, high = 0, _STEPS
        while high - low > 1:
            middle = (low + high) // 2
            tried = Partition(*halves(middle / _STEPS))
            if least_bytes(_values(tried, weights), bits) <= most:
                low, last = middle, tried
            else:
                high = middle
        return last
    fewest = min(least_bytes(_values(each, weights), 4) for each in (at_once, last))
    if whole >= _NOTICED:
        smallest = math.ceil(100 * fewest / whole) / 100
        raise OptionsError(
            f"activation_memory={most / whole:.2f} cannot be met: a graph keeps {whole / 1e6:.1f} MB for its backward, "
            f"and {fewest / 1e6:.1f} MB at least; the smallest share for it is {smallest:.2f}."
        )
    return last


def _values(partition: Partition, weights: tuple[int, ...]) -> Sequence[KeptValue]:
    return described(kept_storages(partition.forward), masters_of(partition.forward, weights))
