"""Pages for users are short and in the field's words, and no sentence begins with a pronoun or a relative clause.

Pages are the README and ``docs/*.md``; those for contributors are not looked at.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.document_blocks import FENCE, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

#: words of all pages together, tables and code included
MOST_WORDS = 16_500

#: a word of the house, as a regular expression -> the field's word
HOUSE = {
    r"measured scales?": "static quantization",
    r"products?": "matmul, GEMM",
    r"(?:goes?|sends?|runs?|reads?|stores?|stored|written|kept|taken|placed|wanted|every op) low": "in 16 bits",
    r"low (?:cop(?:y|ies)|weights?|ops?|values?|calls?|operands?|neighbou?rs|dtypes?|matmuls?)": "16-bit",
    r"beside": "compared with, next to",
    r"arms?": "configuration",
    r"levels?": "precision",
    r"remed(?:y|ies)": "fix",
    r"spoil(?:s|t|ed)?": "degrade",
    r"mend(?:s|ed)?": "fix",
    r"contracted": "K",
    r"in times of": "relative to",
    r"lower(?:s|ed)": "run in 16 bits",
    r"but for": "except",
    r"at hand": "available",
    r"window of (?:one|1)": "1x1 convolution",
    r"0\.\d+ of (?:autocast|OpenVINO|amp_fx|bf16|fp32|the|its)(?:'s)? time": "1.2 times as fast",
    r"look(?:s|ed)? at the weights": "compare a sample",
}

_HOUSE = [(re.compile(rf"(?i)\b(?:{word})\b"), instead) for word, instead in HOUSE.items()]

#: what a sentence may not begin with. "What runs in int8?" is a question, "This cast is free" has its noun
_CLAUSE = re.compile(r"(?:What|Which|Whoever|Whatever|Whichever|Those (?:that|which|of|who|in)|That which)\b")
_VERBS = (
    "is|are|was|were|has|have|does|do|did|can|may|will|must|means?|needs?|takes?|gives?|holds?|keeps?|makes?"
)
_PRONOUN = re.compile(rf"(?:That|This|These|Those) (?:(?:also|only|then) )?(?:{_VERBS})\b")

_GENERATED = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)
_INDENTED = re.compile(r"(?:\A|\n\n)(?: {4}.*\n)+")
_CODE, _TARGET = re.compile(r"`[^`]*`"), re.compile(r"\]\([^)]*\)")


def text(page: str) -> str:
    """A page without code, generated tables and addresses."""
    for pattern in (FENCE, _GENERATED, _INDENTED):
        page = pattern.sub("\n\n", page)
    return _TARGET.sub("]", _CODE.sub("CODE", page))


def house_words(page: str) -> list[str]:
    flowing = " ".join(text(page).split())
    return [f"{hit[0]}: {instead}" for word, instead in _HOUSE for hit in word.finditer(flowing)]


def sentences(page: str) -> list[str]:
    """Of paragraphs and items of lists: neither headings nor tables."""
    lines = []
    for line in text(page).splitlines():
        if line.lstrip().startswith(("#", "|", "![")):
            line = ""
        lines.append(re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n", line))
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    return [each for one in paragraphs for each in re.split(r"(?<=[.!?]) +", " ".join(one.split())) if each]


def unclear(page: str) -> list[str]:
    """Sentences that begin with a relative clause, or with a pronoun that has no noun."""
    found = [each.lstrip('*_["') for each in sentences(page)]
    return [
        each for each in found if not each.endswith("?") and (_CLAUSE.match(each) or _PRONOUN.match(each))
    ]


def test_pages_for_users_are_short() -> None:
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert sum(words.values()) <= MOST_WORDS, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_words_of_the_field_and_sentences_that_begin_with_a_noun(page: Path) -> None:
    written = page.read_text(encoding="utf-8")
    assert house_words(written) == []
    assert unclear(written) == []


def test_a_house_word_is_found_outside_of_code_alone() -> None:
    page = "Measured\nscales make products fast, 0.83 of its time.\n\n    arms in code\n\n`low ops`\n"
    assert [hit.split(":")[0] for hit in house_words(page)] == [
        "Measured scales",
        "products",
        "0.83 of its time",
    ]
    assert house_words("In production, at a lower latency, beside `arms`, and on lower floors.") == [
        "beside: compared with, next to"
    ]


def test_a_sentence_that_begins_with_a_clause_or_a_bare_pronoun_is_found() -> None:
    bad = ["What differs is small.", "Those of modules are most.", "That is\nfast."]
    page = (
        "# What runs\n\n"
        + "\n".join(f"- {each}" for each in bad)
        + "\n\n| What a table has | That is exempt |\n"
    )
    assert unclear(page) == ["What differs is small.", "Those of modules are most.", "That is fast."]
    assert (
        unclear("What is it? That cast is free. These casts are fused, which is good. So that is it.") == []
    )
