"""A missing library says how to install it; docs/integrations.md has every claim, and what it names are tests."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

import amp_fx
import integrations

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


CLAIMS = [
    (library, what, test) for library, claims in integrations.CLAIMS.items() for what, test in claims.items()
]


@pytest.mark.parametrize("test", sorted({test for _, _, test in CLAIMS}))
def test_what_a_claim_names_is_a_test(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((integrations.FOLDER / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_document_has_every_claim() -> None:
    rows = [line.split(" | ") for line in integrations.DOCUMENT.read_text(encoding="utf-8").splitlines()]
    written = {row[0].removeprefix("| "): row[2].split("; ") for row in rows if len(row) == 4}
    missing = [
        what
        for library, what, _ in CLAIMS
        if not any(cell.removesuffix(" (not tested here)") == what for cell in written[library])
    ]
    assert missing == []
