"""What the steps of a scaler found: for the loop, for its user's questions, and for no checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from amp_fx.scaling.findings import Finding

__all__ = ["History", "any_of", "names_of"]

_Optimizer = weakref.ref[torch.optim.Optimizer]


class History:
    """Of one scaler, in one process.

    Attributes:
        findings: of the step in progress, each with its optimizer.
        last_findings: of the step before.
        found: what the last step of each optimizer found: fp32, 0-d, on the device.
        last_found: what the last step found in all: fp32, 0-d.
        skipped: number of steps that were skipped: fp32, 0-d.
    """

    def __init__(self) -> None:
        self.findings: list[tuple[_Optimizer, Finding]] = []
        self.last_findings: list[tuple[_Optimizer, Finding]] = []
        self.found: weakref.WeakKeyDictionary[torch.optim.Optimizer, Tensor] = weakref.WeakKeyDictionary()
        self.last_found: Tensor | None = None
        self.skipped: Tensor | None = None

    def add_finding(self, optimizer: torch.optim.Optimizer, finding: Finding) -> None:
        """The gradients of an optimizer's parameters were looked at."""
        self.findings.append((weakref.ref(optimizer), finding))

    def add_step(self, optimizer: torch.optim.Optimizer, found: Tensor) -> None:
        """An optimizer's step is over, and ``found`` says whether it was skipped."""
        self.found[optimizer] = found
        if self.skipped is None:
            self.skipped = torch.zeros_like(found)
        self.skipped += found

    def end_step(self) -> None:
        """The scale was updated: what is found from now on belongs to another step."""
        self.last_findings, self.findings = self.findings, []

    def bad(self) -> set[int]:
        """Ids of the parameters with bad gradients, in the step in progress or else in the last; waits for the device.

        Of optimizers that are alive, and so are their parameters: the ids are theirs.
        """
        found = self.findings or self.last_findings
        living = [(optimizer, finding) for ref, finding in found if (optimizer := ref()) is not None]
        return {
            key for optimizer, finding in living for key in finding.nonfinite() & names_of(optimizer).keys()
        }

    def names(self, bad: Collection[int], in_graphs: dict[int, str]) -> list[str]:
        """Names of parameters, nearest to the loss first.

        Args:
            bad: their ids.
            in_graphs: names of parameters by id, in the order of the forward; others are named by their optimizers.
        """
        names = dict(in_graphs)
        for optimizer in self.found:
            for key, name in names_of(optimizer).items():
                names.setdefault(key, name)
        return list(dict.fromkeys(name for key, name in reversed(names.items()) if key in bad))


def any_of(found: Sequence[Tensor], device: torch.device) -> Tensor:
    """1.0 if one of the values is, else 0.0; may be one of them."""
    if len(found) == 1:
        return found[0].to(device, non_blocking=True)
    return torch.stack([value.to(device, non_blocking=True) for value in found]).amax()


def names_of(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """What an optimizer calls its parameters: their names, where it was given names, else their places."""
    return {
        id(p): group["param_names"][i] if "param_names" in group else f"parameter {i} of group {g}"
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    }
