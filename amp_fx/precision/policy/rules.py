r"""User policies: a base list and rules on top, as plain data.

A policy is ``"autocast"`` or, with rules, an object (or its JSON text)::

    {"base": "autocast",
     "rules": [{"op": "softmax", "precision": "fp32"},
               {"module": r"decoder\.layers\.0\..*", "precision": "fp32"},
               {"op": "layer_norm", "module": "encoder", "precision": "low"},
               {"module": "lm_head", "precision": "low", "result": "fp32"}]}

The last rule that matches a node wins. A name of another system, ``"mixed_bfloat16"`` or ``"O1"``, is a policy, too,
and may be a base: the rules come after its own. ``str(policy)`` prints the form it parses.
With ``"sensitivity"``, what ``amp_fx.calibrate`` has measured decides instead of the base list.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from amp_fx.errors import OptionsError, did_you_mean, one_of
from amp_fx.precision.policy.classes import OpClass
from amp_fx.precision.policy.table import check_op

#: name -> one line about it
BASES = {
    "autocast": "the numerics of torch.autocast on that device, with cheaper casts",
    "fast": "as autocast, but sums of mixed precision may be stored low, and nothing is saved twice",
    "fp8": "as autocast, and low matmuls run in fp8 where the device gains from it",
    "int8": "as autocast, and without gradients linears run in int8 where the device gains from it",
}

#: what a rule can force, and the class a forced node gets
PRECISIONS = {"fp32": OpClass.FP32, "low": OpClass.LOW, "int8": OpClass.LOW}
#: those that are levels below 16 bits, which a rule may ask for under the policy of its name -> the ops that have it.
#: No other is matched: a rule about a module leaves its softmax alone
BELOW = {"int8": ("addmm", "linear", "matmul", "mm")}
#: what a rule can say of the result of a low product -> what it means
RESULTS = {"fp32": "the sum as it is, which the product is added up in"}
#: how attention in 16 bits is computed on a CPU -> what it means
IMPLEMENTATIONS = {
    "flash": "by the flash kernel of torch",
    "products": "as two products around a softmax",
}
_ATTENTION = "scaled_dot_product_attention"

_RULE_KEYS = ("op", "module", "precision", "result", "implementation")
_POLICY_KEYS = ("base", "dtype", "rules", "sensitivity", "budget")
_POLICY_DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Rule:
    """Forces the nodes it matches to one precision.

    Attributes:
        precision: ``"fp32"``, ``"low"``, or under policy "int8" ``"int8"``, which matches linears only: they run in it,
            even the last one, and whatever it costs.
        op: ATen name, with or without overload: ``"softmax"`` matches ``softmax.int`` too; None matches any.
        module: regular expression searched for in the module path (``"encoder.layer.0.attention"``); None
            matches any node.
        result: a key of :data:`RESULTS`: a product of low operands is not rounded; None: its result is low.
        implementation: a key of :data:`IMPLEMENTATIONS`, of attention; None: the cheaper one.
    """

    precision: str
    op: str | None = None
    module: str | None = None
    result: str | None = None
    implementation: str | None = None

    def matches(self, op_name: str, module_path: str) -> bool:
        """True when the rule is about this node."""
        if self.op is not None and self.op not in (op_name, op_name.partition(".")[0]):
            return False
        if self.precision in BELOW and op_name.partition(".")[0] not in BELOW[self.precision]:
            return False
        return self.module is None or re.search(self.module, module_path) is not None

    def to_dict(self) -> dict[str, str]:
        """The rule in the form :meth:`parse` reads."""
        return {key: value for key in _RULE_KEYS if (value := getattr(self, key)) is not None}

    def __str__(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def parse(cls, data: object) -> Rule:
        """Builds a rule from a mapping.

        Raises:
            OptionsError: unknown key, precision, result or op, a pattern that does not compile, a result of what is not
                low, or neither ``op`` nor ``module`` given.
        """
        if isinstance(data, Rule):
            return data
        if not isinstance(data, Mapping):
            raise OptionsError(
                f"A policy rule must be an object with keys {', '.join(_RULE_KEYS)}; got {data!r}."
            )
        where = f"policy rule {dict(data)!r}"
        _check_keys(data, _RULE_KEYS, where)
        precision = one_of("precision", PRECISIONS, data.get("precision"), where)
        op, module, result, way = map(data.get, ("op", "module", "result", "implementation"))
        for key, value in (("op", op), ("module", module)):
            if value is not None and not isinstance(value, str):
                raise OptionsError(f"{key!r} in {where} must be a string; got {value!r}.")
        if op is None and module is None:
            raise OptionsError(
                f"{where[0].upper()}{where[1:]} names neither 'op' nor 'module', so it would match every node; "
                "give at least one (module='.*' if every node is meant)."
            )
        if op is not None:
            op = op.removeprefix("aten.").removeprefix("aten::").removesuffix(".default")
            check_op(op, dict(data))
            if precision in BELOW and op.partition(".")[0] not in BELOW[precision]:
                raise OptionsError(
                    f"{precision!r} in {where} is about linears; valid ops: {', '.join(BELOW[precision])}."
                )
        if module is not None:
            try:
                re.compile(module)
            except re.error as error:
                raise OptionsError(f"'module' in {where} is not a regular expression: {error}.") from error
        if result is not None and one_of("result", RESULTS, result, where) and precision != "low":
            raise OptionsError(
                f"'result' in {where} is about products of low operands, not {precision}; say 'precision': 'low', or "
                "drop it."
            )
        of_attention = precision == "low" and op is not None and op.partition(".")[0] == _ATTENTION
        if way is not None and one_of("implementation", IMPLEMENTATIONS, way, where) and not of_attention:
            raise OptionsError(
                f"'implementation' in {where} is about attention in 16 bits; say 'op': {_ATTENTION!r} and "
                "'precision': 'low', or drop it."
            )
        return cls(precision, op, module, result, way)


@dataclass(frozen=True)
class Policy:
    """A base list and the user's rules, immutable and comparable.

    Attributes:
        base: a key of :data:`BASES`.
        rules: the last one that matches a node wins.
        dtype: the low dtype, "bfloat16" or "float16", or None where the options say it.
        name: what it was given as, if that is a name of another system.
        sensitivity: path of a sensitivity file, or None; rules hold beside it, the base list does not.
        budget: with sensitivity: the error that a graph may have, relative to torch.autocast's.
    """

    base: str = "autocast"
    rules: tuple[Rule, ...] = ()
    dtype: str | None = None
    name: str | None = field(default=None, compare=False)
    sensitivity: str | None = None
    budget: float = 1.0

    @property
    def users_rules(self) -> tuple[Rule, ...]:
        """The rules that the user wrote: none where the policy is a preset."""
        return self.rules if self.name is None else ()

    def matching(self, op_name: str, module_path: str) -> list[Rule]:
        """The rules about this node, in order."""
        return [rule for rule in self.rules if rule.matches(op_name, module_path)]

    def rule_for(self, op_name: str, module_path: str) -> Rule | None:
        """The rule that decides this node, or None where the base list does."""
        return next(reversed(self.matching(op_name, module_path)), None)

    def to_dict(self) -> dict[str, Any]:
        """The policy as JSON-like data, in the form :meth:`parse` reads."""
        data: dict[str, Any] = {"base": self.base, "rules": [rule.to_dict() for rule in self.rules]}
        if self.dtype is not None:
            data["dtype"] = self.dtype
        if self.sensitivity is not None:
            data.update(sensitivity=self.sensitivity, budget=self.budget)
        return data

    def __str__(self) -> str:
        if self.name is not None:
            return self.name
        return self.base if self == Policy(self.base) else json.dumps(self.to_dict())

    @classmethod
    def parse(cls, data: object) -> Policy:
        """Builds a policy from its name, its object form, or the object's JSON text.

        Raises:
            OptionsError: unknown base, name, dtype or key, or a bad rule.
        """
        if isinstance(data, Policy):
            return data
        if isinstance(data, str) and data.lstrip().startswith("{"):
            try:
                data = json.loads(data)
            except json.JSONDecodeError as error:
                raise OptionsError(f"policy {data!r} is not valid JSON: {error}.") from error
        if isinstance(data, Mapping):
            dtypes = dtypes_preset({key: value for key, value in data.items() if key != "rules"})
            if dtypes is not None:
                data = {"base": dtypes[0], "rules": data["rules"]} if "rules" in data else dtypes[0]
        if isinstance(data, str):
            return cls._named(data)
        if not isinstance(data, Mapping):
            raise OptionsError(
                f"policy must be one of {', '.join(map(repr, BASES))} or an object with keys "
                f"{', '.join(_POLICY_KEYS)}; got {data!r}."
            )
        where = f"policy {dict(data)!r}"
        _check_keys(data, _POLICY_KEYS, where)
        base = cls._named(data.get("base", "autocast"))
        rules = data.get("rules", ())
        if not isinstance(rules, (list, tuple)):
            raise OptionsError(f"'rules' of a policy must be a list of rules; got {rules!r}.")
        own = tuple(Rule.parse(rule) for rule in rules)
        for rule in own:
            if rule.precision in BELOW and rule.precision != base.base:
                raise OptionsError(
                    f"Policy rule {rule} is about policy {rule.precision!r}, the base is {base.base!r}; say "
                    f"'base': {rule.precision!r}, or 'precision': 'low'."
                )
        dtype = base.dtype
        if data.get("dtype") is not None:
            dtype = one_of("dtype", _POLICY_DTYPES, data["dtype"], where)
            if base.dtype not in (None, dtype):
                raise OptionsError(
                    f"dtype {dtype!r} contradicts base {str(base)!r}, which means {base.dtype}; drop one of the two."
                )
        sensitivity, budget = _parse_sensitivity(data)
        return cls(base.base, base.rules + own, dtype, sensitivity=sensitivity, budget=budget)

    @classmethod
    def _named(cls, name: object) -> Policy:
        """A key of :data:`BASES`, or a name of another system."""
        named = preset(name) if isinstance(name, str) else None
        if named is not None:
            return replace(cls.parse(named[1]), name=named[0])
        if isinstance(name, str) and name in BASES:
            return cls(name)
        raise OptionsError(
            f"Unknown policy {name!r}; valid: {', '.join(map(repr, BASES))}, or a name of another system: "
            f"{', '.join(PRESETS)}." + did_you_mean(str(name), [*BASES, *PRESETS])
        )


def _parse_sensitivity(data: Mapping[Any, Any]) -> tuple[str | None, float]:
    sensitivity, budget = data.get("sensitivity"), data.get("budget", 1.0)
    if sensitivity is None:
        if "budget" in data:
            raise OptionsError(
                f"'budget' of a policy needs 'sensitivity', a file of amp_fx.calibrate(...).save(...); got "
                f"{dict(data)!r}."
            )
        return None, 1.0
    if not isinstance(sensitivity, (str, os.PathLike)):
        raise OptionsError(
            f"'sensitivity' of a policy must be the path of a sensitivity file; got {sensitivity!r}."
        )
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 <= budget < math.inf:
        raise OptionsError(
            f"'budget' of a policy must be a number from 0 on, times torch.autocast's error; got {budget!r}."
        )
    return os.fspath(sensitivity), float(budget)


def _check_keys(data: Mapping[Any, Any], valid: tuple[str, ...], where: str) -> None:
    for key in data:
        one_of("key", valid, key, where)


# ---- names of other systems: where a whole model is low there, the base is ``fast``, with losses and sums in float32

_FLOAT32: dict[str, Any] = {"base": "autocast", "rules": [{"module": ".*", "precision": "fp32"}]}

#: name -> the policy in its object form
PRESETS: dict[str, dict[str, Any]] = {
    # https://keras.io/api/mixed_precision/policy: layers compute and return the low dtype, variables are float32
    "float32": _FLOAT32,
    "mixed_float16": {"base": "fast", "dtype": "float16"},
    "mixed_bfloat16": {"base": "fast", "dtype": "bfloat16"},
    # https://nvidia.github.io/apex/amp.html: O1 has op lists, O2 master weights, O3 is low but what may overflow
    "O0": _FLOAT32,
    "O1": {"base": "autocast", "dtype": "float16"},
    "O2": {"base": "fast", "dtype": "float16"},
    "O3": {"base": "fast", "dtype": "float16", "rules": [{"module": ".*", "precision": "low"}]},
}

#: what JMP (https://github.com/google-deepmind/jmp), FSDP and DeepSpeed call the dtypes -> why it can only be float32;
#: only that of the computation may be low
_COMPUTE = ""
_KEYS = {
    **dict.fromkeys(("params", "p"), "parameters stay as the model and the optimizer have them"),
    **dict.fromkeys(("compute", "c", "param_dtype"), _COMPUTE),
    **dict.fromkeys(
        ("output", "o", "output_dtype"), "a compiled model returns the dtypes that the eager one does"
    ),
    "reduce_dtype": "gradients leave in float32; FSDP's own reduce_dtype or a communication hook narrows what is sent",
    "buffer_dtype": "buffers stay as the model has them",
}

_DTYPES = {
    **dict.fromkeys(("float32", "f32", "full", "fp32"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "f16", "fp16", "half"), "float16"),
}


def preset(text: str) -> tuple[str, dict[str, Any]] | None:
    """A key of :data:`PRESETS`, or dtypes by name, as it is printed back, and its object form; None for another text.

    OptionsError for dtypes by name, ``"params=float32,compute=bfloat16"``, with an unknown name or one that cannot be.
    """
    if text in PRESETS:
        return text, PRESETS[text]
    if "=" not in text:
        return None
    parts = [part.partition("=") for part in text.split(",")]
    return dtypes_preset({key.strip(): value.strip() for key, _, value in parts})


def dtypes_preset(dtypes: Mapping[Any, Any]) -> tuple[str, dict[str, Any]] | None:
    """As :func:`preset`, of a mapping such as ``{"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}``.

    OptionsError for a key that cannot have its dtype.
    """
    if not _KEYS.keys() & dtypes.keys():
        return None
    compute, given, where = "float32", dict[str, str](), f"policy {dict(dtypes)!r}"
    for key, value in dtypes.items():
        one_of("key", _KEYS, key, where)
        if value is None:  # FSDP: left as it is
            continue
        dtype = _DTYPES[one_of("dtype", _DTYPES, str(value).removeprefix("torch."), f"{key!r} of {where}")]
        if _KEYS[key] is _COMPUTE:
            compute = dtype
        elif dtype != "float32":
            raise OptionsError(f"{key}={dtype} cannot be: {_KEYS[key]}. Give {key}=float32, or leave it out.")
        given[key] = dtype
    # nothing is lowered where FSDP is given no dtype
    text = ",".join(f"{key}={dtype}" for key, dtype in given.items()) or "float32"
    return text, _FLOAT32 if compute == "float32" else {"base": "fast", "dtype": compute}
