"""The names by which a rule may call an op."""

from __future__ import annotations

from amp_fx._torch import registered_ops
from amp_fx.errors import OptionsError, did_you_mean
from amp_fx.policy.table import all_names, supported_devices
from amp_fx.state import cache_results

__all__ = ["check_op"]


def check_op(op: str, rule: object) -> None:
    """Refuses a name that no op has.

    Args:
        op: as the op lists write it, ``"softmax"``, ``"softmax.int"`` or ``"mylib::op"``.
        rule: it is in, for the message.

    Raises:
        OptionsError: no op of torch, or of a namespace that is registered, has the name.
    """
    if op in _listed():
        return
    names = {name.removeprefix("aten::") for name in registered_ops()}
    namespace, separator, _ = op.rpartition("::")
    if op in names or (separator and not any(name.startswith(f"{namespace}::") for name in names)):
        # nobody knows yet what a library that is imported later will register
        return
    by_op: dict[str, list[str]] = {}
    for name in names:
        by_op.setdefault(name.partition(".")[0], []).append(name)
    if op in by_op:
        return
    whole = op.partition(".")[0]
    if whole in by_op:
        overloads = sorted(name for name in by_op[whole] if not name.endswith("out"))
        raise OptionsError(
            f"Unknown overload {op!r} in policy rule {rule!r}; valid: {', '.join(map(repr, overloads))}, or {whole!r} "
            "for every overload."
        )
    raise OptionsError(
        f"Unknown op {op!r} in policy rule {rule!r}; valid: names of ATen ops, as amp_fx.explain(model, "
        "*args).table() has them, such as 'linear', and of registered ops of other libraries, such as 'mylib::op'."
        # what a rule is likelier to be about comes first
        + (did_you_mean(op, sorted(_listed())) or did_you_mean(op, sorted(by_op)))
    )


@cache_results()
def _listed() -> frozenset[str]:
    """What is on some list, with overloads and without."""
    names = {name for device in supported_devices() for name in all_names(device)}
    return frozenset({*names, *(name.partition(".")[0] for name in names)})
