"""The script that --print-completion prints completes commands, options, their choices and files."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from amp_fx.cli import main

#: what bash does where a user types a word, and presses the tabulator key
_TRY = """
source completion.bash
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
function=$(complete -p amp-fx)
function=${{function##*-F }}
${{function%% *}}
echo "${{COMPREPLY[*]}}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as end:
        main(["--print-completion", "bash"])
    assert end.value.code == 0
    (folder / "completion.bash").write_text(printed.getvalue())
    (folder / "before.json").touch()
    return folder


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("amp-fx ex", "explain export"),
        ("amp-fx draw --ag", "--against"),
        ("amp-fx export --engine open", "openvino"),
        ("amp-fx draw --against bef", "before.json"),
        ("amp-fx explain bef", "before.json"),
        ("amp-fx bench --seconds bef", ""),
    ],
)
def test_bash_completes_a_word(folder: Path, words: str, completed: str) -> None:
    run = ["bash", "--norc", "-c", _TRY.format(words=words)]
    assert (
        subprocess.run(run, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
        == completed
    )


def test_completion_without_its_library_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "zsh"]) == 1
    assert "pip install '.[completion]'" in capsys.readouterr().err
