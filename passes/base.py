"""The base class of passes, and the runner that enforces its contract.

A pass takes a GraphModule whose nodes carry a correct ``meta["val"]``, leaves it so, and says what it changed. The
runner lints what a pass has changed, and names a pass that fails together with those that ran before it.

On Inductor's graphs a pass reads only what the keys of the compile caches hold. AOTAutograd and Inductor find what they
have compiled by a graph's code, the metadata of its inputs, their options and the uuids of passes. ``node.meta`` is in
none of these: two graphs that differ there alone are one to them, and the second gets what was compiled for the first.
"""

from __future__ import annotations

import abc
import difflib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch.fx as fx

from amp_fx._torch import HigherOrderOperator, joint_roles, log_artifact
from amp_fx.errors import PassError, PlanError
from amp_fx.graphs.keys import CUSTOM, GONE, MARK, REGION_META
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.label import Label, label_of
from amp_fx.precision.plans.plan import Plan
from amp_fx.precision.plans.reading import add_graph, node_plan, row_label
from amp_fx.precision.policy import Policy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassContext:
    """The facts that passes may read besides the graph."""

    policy: Policy = Policy()
    numerics: str = "compiled"  # or "eager"
    profile: DeviceProfile | None = None  # None: every listed op goes low, as autocast would have it
    training: bool = False  # the graph will be differentiated
    path: str = ""  # prefix of node names, the path of the body being rewritten: "wrap_body_0."
    #: names of inputs whose casts cost nothing, because they are made once and stored; and of what widens an input that
    #: is stored low
    folded: frozenset[str] = frozenset()
    weight_bits: int = 8  # of weights in int8
    times_calls: bool = (
        False  # the graph runs on this machine, and calls whose prices are uncertain may be timed
    )
    disabled: frozenset[str] = frozenset()  # names of passes that do not run


class Note:
    """The notes of passes, by name."""

    MATCHED = "matched"  #: the user's rules that are about a call of the graph
    CHOICES = "choices"  #: (name in the plan, role) of a matmul -> its level below 16 bits, or None, and why
    SENSITIVITY = "sensitivity"  #: of the placement that was chosen, and of torch.autocast's
    KEPT = "kept"  #: values that a forward keeps for its backward, each with its bits, None where it is not rounded
    HELD = "held"  #: addresses of the constants that packed weights have taken the place of


#: name of a note -> what was noted, of each graph that a pass ran on
Notes = dict[str, list[Any]]


@dataclass(frozen=True)
class PassResult:
    """The result of a pass on one graph.

    Attributes:
        summary: one line for the log.
        changed: how many nodes it has changed, added, erased, labelled or marked; 0: the code is as it was.
        notes: what a later stage or the report needs to know: a value for a name in :class:`Note`.
    """

    summary: str
    changed: int
    notes: Mapping[str, Any] = field(default_factory=dict)


class Pass(abc.ABC):
    """Base of all passes. Subclasses are frozen dataclasses; their fields are their options."""

    #: the class in kebab case, for logs and errors
    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.name = re.sub("(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()

    @abc.abstractmethod
    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """Rewrites ``gm`` in place."""


def run_passes(
    gm: fx.GraphModule, pipeline: Sequence[Pass], context: PassContext, notes: Notes | None = None
) -> Plan:
    """As :func:`run_in_order` on a captured graph and on the bodies inside it; returns the plan of all of them."""
    notes = {} if notes is None else notes
    plan = Plan(policy=str(context.policy))
    for name, body in bodies(gm):
        within = replace(context, path=f"{context.path}{name}.", folded=frozenset())
        inner = run_passes(body, pipeline, within, notes)
        plan.nodes += inner.nodes
        plan.casts += inner.casts
        plan.inputs += inner.inputs
    run_in_order(gm, pipeline, context, notes)
    matched = [rule.to_dict() for rules in notes.get(Note.MATCHED, ()) for rule in rules]
    users_rules = [rule.to_dict() for rule in context.policy.users_rules]
    plan.unused_rules = [rule for rule in users_rules if rule not in matched]
    log_artifact(f"amp_fx_{context.path}rewritten", lambda: _readable(gm))
    add_graph(plan, gm, context.path)
    return plan


def run_in_order(
    gm: fx.GraphModule, pipeline: Sequence[Pass], context: PassContext, notes: Notes | None = None
) -> None:
    """Runs passes on one graph, bodies left out; what they note is added to ``notes``.

    Raises:
        PassError: a pass fails; with its cause.
        PlanError: a plan that is followed has what cannot be.
    """
    done: list[str] = []
    is_heard = logger.isEnabledFor(logging.DEBUG)
    for step in pipeline:
        if step.name in context.disabled:
            logger.debug("%s%s: disabled", context.path, step.name)
            continue
        before, start = _readable(gm) if is_heard else "", time.perf_counter()
        try:
            result = step.call(gm, context)
            if result.changed:
                gm.graph.lint()
        except (PassError, PlanError):
            raise
        except Exception as error:
            # chained: tests run strict, users get a named reason with the fallback
            what = f"pass {step.name!r} failed after {done or 'no other pass'}"
            raise PassError(f"{what}: {type(error).__name__}: {error}") from error
        done.append(step.name)
        if notes is not None:
            for name, note in result.notes.items():
                notes.setdefault(name, []).append(note)
        if is_heard:
            name, took = f"{context.path}{step.name}", 1e3 * (time.perf_counter() - start)
            lines = difflib.unified_diff(
                before.splitlines(), _readable(gm).splitlines(), name, name, "", "", 1, ""
            )
            logger.debug(
                "%s: %s (%.1f ms)%s", name, result.summary, took, "".join(f"\n{line}" for line in lines)
            )
    gm.recompile()


def _readable(gm: fx.GraphModule) -> str:
    return gm.print_readable(print_output=False)


def bodies(gm: fx.GraphModule) -> list[tuple[str, fx.GraphModule]]:
    """Captured bodies of the graph's higher-order ops, by attribute name, each once."""
    found: dict[str, fx.GraphModule] = {}
    for node in gm.graph.nodes:
        if not isinstance(node.target, HigherOrderOperator):
            continue
        for source in node.all_input_nodes:
            body = getattr(gm, str(source.target), None) if source.op == "get_attr" else None
            if isinstance(body, fx.GraphModule) and any(REGION_META in n.meta for n in body.graph.nodes):
                found[str(source.target)] = body
    return list(found.items())


def erase(node: fx.Node, path: str = "") -> None:
    """Erases what nothing reads; the row of a call of the program stays in the plan, as graphs that follow it have one.

    ``path`` is the prefix of names in a body.
    """
    label, before = row_label(node), node.prev.meta
    gone = [] if label is None else [node_plan(label, node, {}, path)]
    before[GONE] = [*gone, *node.meta.get(GONE, ()), *before.get(GONE, ())]
    node.graph.erase_node(node)


def mark(node: fx.Node, key: str, name: str) -> None:
    """Marks a captured call, by a key of :mod:`amp_fx.graphs.keys`, with its name in the plan."""
    node.meta[CUSTOM] = {**node.meta.get(CUSTOM, {}), key: name}


def mark_where(gm: fx.GraphModule, key: str, says: Callable[[Label], Any]) -> tuple[tuple[str, Any], ...]:
    """Marks the low calls of whose label ``says`` gives a value; returns their names with the values.

    A pass on Inductor's graphs takes these as a field: a mark alone is in no key of a cache.
    """
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    rows = [
        (node, label) for graph in graphs for node in graph.nodes if (label := label_of(node)) is not None
    ]
    found = [
        (node, label.name, value)
        for node, label in rows
        if label.dtype in LOW_DTYPES and (value := says(label))
    ]
    for node, name, _ in found:
        mark(node, key, name)
    return tuple((name, value) for _, name, value in found)


def marked(node: fx.Node, key: str = MARK) -> str | None:
    """The name in the plan of the call that a node comes from, if that has such a mark."""
    return (node.meta.get(CUSTOM) or {}).get(key)


def gradients_in(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes that depend on a gradient that enters the backward; none in a graph without one."""
    roles = joint_roles(gm)
    found = set() if roles is None else set(roles.tangents)
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found
