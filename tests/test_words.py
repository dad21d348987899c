"""The documentation uses the field's words, not the private ones that it used before."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = {  # what we avoid: what we write instead
    "is told": "name the actor: the command says, the report names",
    "are told": "name the actor: the command says, the report names",
    "begun": "started",
    "anew": "again, from the beginning",
    "goes on": "resumes, continues",
    "strangers": "untrusted files",
    "a row a": "one row per",
    "a row an": "one row per",
    "a column a": "one column per",
    "a line a": "one line per",
    "one value an": "one value per",
    "told apart": "differ significantly",
}
# Folders and files to check: not the laboratory, whose log keeps its old entries, and of the
# changelog not the old releases.
# Add "src" when the messages of the package are rewritten.
ROOTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "paper"]
SUFFIXES = {".md", ".py", ".html", ".js"}


def texts(root: str) -> dict[str, str]:
    """The texts of a file, or of all files below a folder, by their path."""
    place = ROOT / root
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    names = {str(file.relative_to(ROOT)): file for file in files if file.suffix in SUFFIXES}
    found = {name: file.read_text() for name, file in names.items()}
    if "CHANGELOG.md" in found:
        found["CHANGELOG.md"] = found["CHANGELOG.md"].split("\n## [0.1.0]")[0]
    return found


def private_words(text: str) -> list[str]:
    """The words of a text that we avoid, also where a line break splits them."""
    plain = " ".join(text.lower().split())
    return [word for word in WORDS if re.search(rf"\b{word}\b", plain)]


@pytest.mark.parametrize("root", ROOTS)
def test_no_private_words_are_used(root: str) -> None:
    found = {name: words for name, text in texts(root).items() if (words := private_words(text))}
    assert texts(root)
    assert not found


def test_private_words_are_found_across_lines_and_only_whole() -> None:
    assert private_words("A run that goes\n  on, with a row an image") == ["goes on", "a row an"]
    assert private_words("The canewood is a row apart; it forgoes only one.") == []
