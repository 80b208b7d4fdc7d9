"""Reports for tests of pictures, written by hand: no model has to be traced for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from amp_fx.instruments.reports.report import Report
from amp_fx.precision.plans.label import Reason, ReasonKind
from amp_fx.precision.plans.plan import CastPlan, CastSum, Cost, InputPlan, ModuleCasts, NodePlan, Plan
from amp_fx.precision.policy import OpClass

__all__ = ["NASTY", "blocks", "call", "cast", "chain", "compared", "nasty", "parameter"]

LOW, HIGH = torch.bfloat16, torch.float32

#: labels that mean something to dot, HTML, JavaScript or JSON
NASTY = (
    "a,a->a",
    "say \"hi\" and 'bye'",
    "<b>bold</b> & <i>&amp;</i>",
    "{left|right} <port>",
    "</script><script>document.title='owned'</script>",
    "<!-- comment --> ]]>",
    "back\\slash\\n \\l \\N \\",
    "<<TABLE><TR><TD>x</TD></TR></TABLE>>",
    "{{data}} {{script}} ${x} `y`",
    "<img src=x onerror=\"document.title='owned'\">",
    "\N{GREEK SMALL LETTER ALPHA} \N{SNOWMAN}",
)


def call(name: str, *inputs: str, module: str = "", why: str = "", **fields: Any) -> NodePlan:
    """A call that reads values of these names, a linear in bf16 if nothing else is said."""
    row = {"op": "linear", "dtype": LOW, "op_class": OpClass.LOW, "bytes": 64, "shape": (2, 8), **fields}
    row.setdefault("source", f"net.py:{len(name)} in forward")
    reasons = (Reason.of(ReasonKind.LISTED, why=why or f"reason of {name}"),)
    row |= {"traced": HIGH, "low": LOW, "inputs": inputs, "reasons": reasons}
    return NodePlan(name=name, module_path=module, **row)


def cast(
    name: str, value: str, *users: str, before: torch.dtype = HIGH, after: torch.dtype = LOW, nbytes: int = 96
) -> CastPlan:
    """A cast that amp_fx inserted."""
    return CastPlan(name, value, before, after, nbytes, users, inserted=True, source="")


def parameter(name: str, module: str = "net") -> InputPlan:
    """A parameter by the name that Dynamo gives it."""
    return InputPlan(f"l_self_modules_{module}_parameters_{name}_", True, HIGH, (8, 8), 256)


def chain(count: int) -> Report:
    """A forward of ``count`` calls in a row with links across, every tenth in fp32."""
    plan = Plan(inputs=[InputPlan("x", False, HIGH, (2, 8), 64)])
    for index in range(count):
        inputs = [f"op_{index - 1}" if index else "x"]
        if index % 7 == 6:
            inputs.append(f"op_{index - 6}")
        before, after = (LOW, HIGH) if index % 10 == 9 else (HIGH, LOW)
        if index and index % 10 in (9, 0):
            plan.casts.append(cast(f"cast_{index}", inputs[0], f"op_{index}", before=before, after=after))
            inputs[0] = f"cast_{index}"
        plan.nodes.append(call(f"op_{index}", *inputs, dtype=after))
    return Report([plan], f"chain of {count}")


def blocks(count: int = 3, odd: Sequence[int] = (), policy: str = "autocast") -> Report:
    """Equal blocks, forward and backward: a norm in fp32, a linear, in ``odd`` blocks in fp32 too, and a sum."""
    forward = Plan("0/0", policy, inputs=[InputPlan("x", False, HIGH, (2, 8), 64)])
    wide: dict[str, Any] = {"dtype": HIGH, "op_class": OpClass.PROMOTE}
    embed = {"op": "embedding", "dtype": HIGH, "op_class": OpClass.FOLLOW}
    forward.nodes.append(call("embed", "x", module="net.embed", **embed))
    value = "embed"
    for index in range(count):
        module, tag = f"net.layers.{index}", f"_{index}"
        dtype = HIGH if index in odd else LOW
        weight = parameter("weight", f"layers_modules_{index}")
        forward.inputs.append(weight)
        inputs = f"norm{tag}", weight.name
        if dtype is LOW:
            forward.casts += [
                cast(f"cast{tag}", f"norm{tag}", f"linear{tag}"),
                cast(f"castw{tag}", weight.name, f"linear{tag}"),
            ]
            inputs = f"cast{tag}", f"castw{tag}"
        gelu = {"op": "gelu", "dtype": dtype, "op_class": OpClass.PROMOTE}
        forward.nodes += [
            call(f"norm{tag}", value, op="layer_norm", module=f"{module}.norm", **wide),
            call(f"linear{tag}", *inputs, module=f"{module}.mlp.up", dtype=dtype, flops=1000),
            call(f"gelu{tag}", f"linear{tag}", module=f"{module}.mlp", **gelu),
            call(f"add{tag}", f"gelu{tag}", value, op="add.Tensor", module=module, **wide),
        ]
        value = f"add{tag}"
    forward.nodes.append(call("head", "cast_head", op="linear", module="head"))
    forward.casts += [
        cast("cast_head", value, "head"),
        cast("cast_out", "head", "output", before=LOW, after=HIGH),
    ]
    return Report([forward, _backward(count, policy)], "Blocks")


def _backward(count: int, policy: str) -> Plan:
    plan = Plan("0/0", policy, phase="backward", inputs=[InputPlan("tangents_1", False, HIGH, (2, 8), 64)])
    wide: dict[str, Any] = {"dtype": HIGH, "op_class": OpClass.FOLLOW}
    value = "tangents_1"
    for index in reversed(range(count)):
        module, tag = f"net.layers.{index}", f"_{index}"
        plan.casts += [
            cast(f"low{tag}", value, f"mm{tag}"),
            cast(f"grad{tag}", f"mm{tag}", "output", before=LOW, after=HIGH),
        ]
        plan.nodes += [
            call(f"mm{tag}", f"low{tag}", op="mm", module=f"{module}.mlp.up", flops=1000),
            call(f"norm{tag}", f"mm{tag}", op="mul.Tensor", module=f"{module}.norm", **wide),
            call(f"sum{tag}", f"norm{tag}", value, op="add.Tensor", **wide),
        ]
        value = f"sum{tag}"
    return plan


def nasty(labels: Sequence[str] = NASTY) -> Report:
    """A graph whose ops, modules, reasons and source lines are ``labels``."""
    plan = Plan("0/0", graph_break=labels[4], inputs=[InputPlan("x", False, HIGH, (2, 8), 64)])
    for index, text in enumerate(labels):
        module = f"{text.replace('.', '')}.inner"
        fields: dict[str, Any] = {"op": text, "why": text, "source": text, "module": module}
        plan.nodes.append(call(f"n{index}", f"m{index - 1}" if index else "x", **fields))
        # a second call, so that the module is drawn
        plan.nodes.append(call(f"m{index}", f"n{index}", **fields))
    return Report([plan], labels[4])


def compared() -> Report:
    """A report whose costs are measured: amp_fx has no kernels that widen the gradients of weights."""

    def sums(name: str, what: str, phase: str, kernels: int, each: int) -> CastSum:
        before, after = (HIGH, LOW) if what == "weight" else (LOW, HIGH)
        return CastSum(name, phase, what, before, after, 3, 3 * each, kernels, kernels * each)

    report = blocks(3)
    report.costs = {
        "amp_fx": Cost(20, 1_200_000, 6, 600_000, 9_700_000),
        "torch.autocast": Cost(24, 1_500_000, 9, 900_000, 10_000_000),
    }
    both = ("torch.autocast", "amp_fx")
    weights = [sums(name, "weight", "forward", 3, 200_000) for name in both]
    fused = [CastSum(name, "forward", "activation", HIGH, LOW, 2, 2000, 0, 0) for name in both]
    gradients = [sums(name, "weight gradient", "backward", 3 * (name != "amp_fx"), 100_000) for name in both]
    dtypes: dict[str, str] = dict.fromkeys(both, "bfloat16")
    report.modules = [ModuleCasts("layers.*.mlp.up", 3, dtypes, [*weights, *fused, *gradients[:1]])]
    return report
