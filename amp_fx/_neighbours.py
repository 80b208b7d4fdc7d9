"""In a source tree ``passes/`` and ``viz/`` lie beside the package's folder; here ``import amp_fx`` finds them.

An installed package has them inside. An editable install of another checkout knows that one's: this is asked first.
It is not done by ``amp_fx.__path__``: whoever walks the package, as ``TORCH_LOGS`` does, would walk everything that
lies beside it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__all__ = ["find_neighbours"]

_ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = {"amp_fx.passes": _ROOT / "passes", "amp_fx.viz": _ROOT / "viz"}


class _Neighbours(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = _FOLDERS.get(fullname)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def find_neighbours() -> None:
    """From now on ``amp_fx.passes`` and ``amp_fx.viz`` are found beside the package, where it has none inside."""
    inside = Path(__file__).with_name("passes")
    if not inside.exists() and all((folder / "__init__.py").is_file() for folder in _FOLDERS.values()):
        sys.meta_path.insert(0, _Neighbours())
