"""Numbers that pages print were measured: each comes from a row of benchmarks/results."""

from __future__ import annotations

import re

import pytest

from benchmarks.quotes import quotes
from support.document_blocks import FENCE, ROOT

QUOTES = quotes()

#: what benchmarks.page writes (its own test compares it), code, addresses, pictures, comments
_NOT_TEXT = re.compile(
    r"<!-- (\w+):begin -->.*?<!-- \1:end -->|(?:\A|\n\n)(?:    .*\n)+|`[^`\n]*`|\]\([^)]*\)|<!--.*?-->",
    re.DOTALL,
)
#: releases of software, which are no measurements
_RELEASE = re.compile(
    r"(?i)\b(?:torch|python|onnxruntime|openvino|opset)\W+\d+(?:\.\d+)*(?: to \d+(?:\.\d+)*)?"
)
_UNIT = "ms|us|microseconds?|seconds?|minutes?|s|[kKMGT]i?B|%|x|times"
_NUMBER = re.compile(
    rf"\b\d[\d,]*(?:\.\d+)?(?:e-?\d+)? ?(?:{_UNIT})(?![\w-])|\b\d+(?:\.\d+|e-\d+|\.\d+e-?\d+)\b"
)


def untraced(text: str, phrases: list[str]) -> list[str]:
    """Numbers with a unit, and fractions, outside of phrases."""
    left = _NOT_TEXT.sub("\n\n", FENCE.sub("", text))
    left = " ".join(left.split())
    for phrase in phrases:
        left = left.replace(" ".join(_NOT_TEXT.sub("\n\n", phrase).split()), "")
    return _NUMBER.findall(_RELEASE.sub("", left))


@pytest.mark.parametrize("page", QUOTES)
def test_each_number_in_the_text_of_a_page_is_made_from_stored_rows(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    flowing = " ".join(text.split())
    assert [phrase for phrase in QUOTES[page] if phrase not in flowing] == []
    assert untraced(text, QUOTES[page]) == []


def test_a_number_that_nothing_measured_is_found() -> None:
    text = "With torch 2.11 to 2.15, two threads: it is 1.3 times as fast, takes 12 ms and 5 %, errs by 2e-3, `0.5`.\n"
    assert untraced(text, []) == ["1.3 times", "12 ms", "5 %", "2e-3"]
    assert untraced(text, ["1.3 times as fast, takes 12 ms"]) == ["5 %", "2e-3"]
    # a digit that differs leaves its phrase
    assert untraced(text, ["1.4 times as fast"])[0] == "1.3 times"


def test_a_results_file_says_where_it_comes_from() -> None:
    from benchmarks.results import read

    for path in sorted((ROOT / "benchmarks" / "results").iterdir()):
        assert {"processor", "torch", "commit", "date"} <= read(path)[0].keys(), path.name
