"""A missing library says how to install it; that none is imported before its integration is test_guest.py's."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

import amp_fx

ROOT = Path(__file__).parents[3]
LIBRARIES = ("accelerate", "transformers", "lightning")


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
