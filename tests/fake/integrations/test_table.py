"""The table of docs/integrations.md names tests that exist, and has every claim."""

from __future__ import annotations

import ast

import pytest

import integrations

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
