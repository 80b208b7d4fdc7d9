"""What is built is what installs: sdist and wheel, checked, installed into an environment of their own, imported.

A checkout imports as well, whether it is installed or not.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("amp_fx", "passes", "viz")

#: that pyproject.toml allows
MINORS = range(10, 15)

pytestmark = pytest.mark.xdist_group("packaging")


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel, made from the sdist, and the sdist."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (*SOURCES, "README.md", "LICENSE", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", cwd=tree)
    (wheel,), (sdist,) = (tree / "dist").glob("*.whl"), (tree / "dist").glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def test_wheel_and_sdist_have_every_file_of_the_package(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as archive:
        wheel = set(archive.namelist())
    with tarfile.open(built["sdist"]) as archive:
        sdist = {name.partition("/")[2] for name in archive.getnames()}
    for path in (path for folder in SOURCES for path in (ROOT / folder).rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            place = path.relative_to(ROOT)
            inside = str(place if place.parts[0] == "amp_fx" else Path("amp_fx", place))
            assert inside in sdist
            assert inside in wheel
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


# make dist does it, too
@pytest.mark.slow
def test_metadata_pass_the_index_and_the_wheel_installs_and_imports(built: Any, tmp_path: Path) -> None:
    said = run(sys.executable, "-m", "twine", "check", "--strict", *built.values(), cwd=built["wheel"].parent)
    assert said.count("PASSED") == 2
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "-q", "--no-deps", "--no-index", built["wheel"], cwd=tmp_path)
    program = (
        "import amp_fx, amp_fx.passes, amp_fx.viz, amp_fx.cli, torch\n"
        "assert 'amp_fx' in torch._dynamo.list_backends()\n"
        "print(amp_fx.__file__, amp_fx.passes.__file__, amp_fx.viz.__file__, amp_fx.__version__)"
    )
    # torch and the like come from this environment; what is installed in it as editable does not
    said = run(python, "-c", program, cwd=tmp_path, PYTHONPATH=sysconfig.get_path("purelib")).split()
    assert all(name.startswith(str(tmp_path)) for name in said[:3])
    assert said[3] != "0"


@pytest.mark.parametrize("installed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_checkout_imports_from_its_root_and_installed_anywhere(installed: bool, tmp_path: Path) -> None:
    # TORCH_LOGS walks the package before anything else runs
    program = (
        "import torch, logging, amp_fx, amp_fx.passes, amp_fx.viz\n"
        "print(amp_fx.__file__, amp_fx.passes.__file__, amp_fx.viz.__file__)\n"
        "print(logging.getLogger('amp_fx').level)"
    )
    # -S leaves the .pth files of site-packages out, which is how editable installs are found
    isolated = [] if installed else ["-S"]
    path = os.pathsep.join(name for name in sys.path if name.endswith("site-packages"))
    cwd = tmp_path if installed else ROOT
    said = run(sys.executable, *isolated, "-c", program, cwd=cwd, PYTHONPATH=path, TORCH_LOGS="+amp_fx")
    folders = ("amp_fx", "amp_fx/passes", "amp_fx/viz")
    assert said.split() == [*(str(ROOT / folder / "__init__.py") for folder in folders), "10"]


@pytest.mark.parametrize("minor", MINORS, ids=lambda minor: f"3.{minor}")
def test_sources_are_python_of_every_version(minor: int) -> None:
    """By the interpreter, where it is installed; else by what this one knows of the version."""
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    for path in files:
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, minor))
    interpreter = shutil.which(f"python3.{minor}")
    if interpreter and not subprocess.run([interpreter, "-c", ""], stderr=subprocess.DEVNULL).returncode:
        compiles = "compile(open(name, encoding='utf-8').read(), name, 'exec')"
        program = f"import sys\nfor name in sys.argv[1:]: {compiles}"
        run(interpreter, "-W", "error", "-c", program, *files, cwd=ROOT)
