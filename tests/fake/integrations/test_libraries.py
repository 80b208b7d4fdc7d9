"""No library is imported before its integration is, and a missing one says how to install it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import amp_fx

ROOT = Path(__file__).parents[3]
LIBRARIES = ("accelerate", "transformers", "lightning")


def test_importing_amp_fx_imports_no_library() -> None:
    look = f"import sys, amp_fx, amp_fx.integrations; print([x for x in {LIBRARIES} if x in sys.modules])"
    run = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_library_is_named_with_the_way_to_install_it(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    name = f"amp_fx.integrations.{library}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(amp_fx.MissingLibraryError, match=rf'pip install "amp_fx\[{library}\]"'):
        importlib.import_module(name)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_has_an_extra(library: str) -> None:
    extras = dict(re.findall(r"^(\w+) = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S))
    wanted = re.findall(r'"([^"]+)"', extras[library])
    assert any(line.startswith(library) for line in wanted)
    assert set(wanted) <= set(re.findall(r'"([^"]+)"', extras["test"]))
