"""The documentation stays short: a fact stands once, where a reader needs it, and elsewhere there is a link."""

from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
WORDS = 43_700
"""All pages but the reference, which docstrings are. Raised by no more than a new page is worth."""


def test_the_documentation_does_not_grow_unnoticed() -> None:
    pages = sorted(set(DOCS.rglob("*.md")) - {DOCS / "api.md"})
    words = {str(page.relative_to(DOCS)): len(page.read_text(encoding="utf-8").split()) for page in pages}
    assert {"README.md", "optim.md", "results/winner.md"} <= set(words)
    longest = sorted(words, key=lambda page: -words[page])[:5]
    assert sum(words.values()) <= WORDS, f"{sum(words.values())} words; the longest pages: {longest}"
