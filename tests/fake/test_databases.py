"""A part of torch's databases of ops and modules; ``python tests/databases.py`` asks all of them."""

from __future__ import annotations

import pytest

#: found by asking all: no tensor goes in, or autocast rounds some shapes only
NAMED = ("arange", "full", "signal.windows.hann", "inner", "tensordot", "addcdiv", "einsum")


# every how many-th op and module
@pytest.mark.parametrize("step", [40, pytest.param(4, marks=pytest.mark.slow)])
def test_calls_of_torchs_databases_agree_with_autocast(step: int) -> None:
    # the databases take seconds to import
    from databases import EXPLAINED, modules, ops, outcome

    samples = [*ops(step), *modules(step)]
    samples += [sample for sample in ops() if sample.name.rpartition(" ")[0] in NAMED]
    found = {sample.name: outcome(sample) for sample in samples}
    agreeing = [name for name, said in found.items() if said == "agrees"]
    others = {
        name: said
        for name, said in found.items()
        if said != "agrees" and not said.startswith("not asked") and name.rpartition(" ")[0] not in EXPLAINED
    }
    assert others == {}
    assert len(agreeing) > 30
