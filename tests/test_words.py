"""The documentation is as easy to read as the peers', by numbers, and uses the field's words.

Measured in the same way, without code and tables:

|                                   | words per sentence | over 30 words | numbers per 100 words |
|-----------------------------------|-------------------:|--------------:|----------------------:|
| torch-cam, httpx, ruff (12 pages) |            7 to 18 |      0 to 12% |            0.3 to 2.8 |
| here, pages for users             |            6 to 15 |       0 to 5% |              0 to 4.0 |

`python tests/test_words.py [PAGE ...]` prints the numbers of the pages, and their long sentences.
"""

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from sufficit import Classifier, compare, compare_scores, evaluate, explain, leak, train_twin
from sufficit.cli import app
from sufficit.sanity import sanity_check

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
USERS = {  # also avoided in pages for users, which describe the present
    "earlier adapter": "leave it out: the past is in git and the log",
    "since then": "leave it out: the past is in git and the log",
    "of today": "leave it out: the page is of today",
    "the day before": "leave it out: the past is in git and the log",
    "not measured": "name it below Limits, or leave it out",
    "h200": "a number belongs to its rows, with the device: results/, benchmarks/",
    r"20\d\d-\d\d-\d\d": "a date belongs to the log",
    r"(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7,40}": "a commit belongs to the rows",
    "asks? the model": "run the model, evaluate",
    "asked the model": "run the model, evaluate",
}
ROOTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs", "paper", "src"]
SUFFIXES = {".md", ".py", ".html", ".js"}

# What a page may have: words per sentence, share of sentences over 30 words, numbers per 100 words
# of prose, lines.
LONG = 30
MOST = (16.0, 0.05, 2.5, 250)
RULES_OF_THUMB = (16.0, 0.05, 4.5, 250)
MEASURED = (22.0, 0.25, 15.0, 330)  # a page that holds rows of measurements: it may only shrink
PAGES = {
    "README.md": (16.0, 0.05, 2.5, 120),
    "CONTRIBUTING.md": (16.0, 0.05, 2.5, 120),
    "CHANGELOG.md": (16.0, 0.05, 2.5, 60),
    "SECURITY.md": (16.0, 0.05, 2.5, 60),
    **{f"docs/{path.name}": MOST for path in (ROOT / "docs").glob("*.md")},
    "docs/statistics.md": RULES_OF_THUMB,
    "docs/results.md": MEASURED,
}
# Lines of docs/*.md, without the page of results and the generated API. It is what the pages have
# now, rounded up to 50; docs/lax.md and docs/scale.md count since they hold no measurements.
ALL_PAGES = 2350


@dataclass(frozen=True)
class Reading:
    """How long the sentences of a text are, and how many numbers they hold."""

    sentences: list[str]

    @property
    def lengths(self) -> list[int]:
        return [len(sentence.split()) for sentence in self.sentences]

    @property
    def mean(self) -> float:
        return sum(self.lengths) / max(1, len(self.lengths))

    @property
    def long(self) -> float:
        return sum(length > LONG for length in self.lengths) / max(1, len(self.lengths))

    @property
    def numbers(self) -> float:
        found = sum(len(re.findall(r"(?<![\w.])\d[\d,.]*", one)) for one in self.sentences)
        return 100 * found / max(1, sum(self.lengths))


def reading(text: str) -> Reading:
    """Read the prose of a page: no code, tables, headings, quotes and generated parts."""
    text = re.sub(r"<!-- demo -->.*?<!-- end of demo -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "\n\n", text, flags=re.DOTALL)
    skipped = ("|", "#", "!", "    ", ":::", "<", ">")
    lines = ["" if line.startswith(skipped) else line for line in text.splitlines()]
    text = re.sub(r"^\s*(- |\d+\. )", "\n\n", "\n".join(lines), flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "Code", text).replace("*", "")
    sentences = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        sentences += [one for one in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(\d])", words) if " " in one]
    return Reading(sentences)


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_page_is_easy_to_read(page: str) -> None:
    mean, long, numbers, lines = PAGES[page]
    text = (ROOT / page).read_text()
    found = reading(text)
    assert found.mean <= mean
    assert found.long <= long, [one for one in found.sentences if len(one.split()) > LONG]
    assert found.numbers <= numbers
    assert len(text.splitlines()) <= lines


def test_the_pages_together_are_short() -> None:
    pages = [page for page in PAGES if page.startswith("docs/")]
    assert len(pages) <= 20
    written = [page for page in pages if PAGES[page] != MEASURED and page != "docs/api.md"]
    assert sum(len((ROOT / page).read_text().splitlines()) for page in written) <= ALL_PAGES


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"([\w-]+(?:/[\w-]+)?\.md)$", text, re.MULTILINE))
    made = {f"notebooks/{one.stem}.md" for one in (ROOT / "docs" / "notebooks").glob("*.ipynb")}
    assert {one.name for one in (ROOT / "docs").glob("*.md")} | made == listed - {"cli.md"}


def test_sentences_are_counted_as_a_reader_does() -> None:
    found = reading(
        "# A heading of 9 words\n\nOne two `three` four. Five six: seven\neight 9, 10.\n\n"
        "| a | table |\n\n- A bullet of four.\n- Another one\n\n```\ncode 1 2 3. Yes.\n```\n"
    )
    assert found.lengths == [4, 6, 4, 2]
    assert found.numbers == pytest.approx(100 * 2 / 16)
    assert reading("word " * 31 + ".").long == 1


def test_help_texts_are_short() -> None:
    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    options = {getattr(one, "help", None) or "" for command in commands for one in command.params}
    found = reading("\n\n".join(sorted(options)))
    assert len(options) > 90
    assert found.mean <= 12
    assert max(found.lengths) <= LONG


PUBLIC = (Classifier, compare, compare_scores, evaluate, explain, leak, sanity_check, train_twin)


@pytest.mark.parametrize("function", PUBLIC, ids=lambda one: one.__name__)
def test_a_public_function_documents_every_parameter_on_a_line(
    function: Callable[..., Any],
) -> None:
    lines = [line for line in (inspect.getdoc(function) or "").splitlines() if line[:3] == "- `"]
    known = {word for line in lines for word in re.findall(r"`(\w+)`", line)}
    assert set(inspect.signature(function).parameters) <= known


def texts(root: str) -> dict[str, str]:
    """The texts of a file, or of all files below a folder, by their path."""
    place = ROOT / root
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    names = {str(file.relative_to(ROOT)): file for file in files if file.suffix in SUFFIXES}
    return {name: file.read_text() for name, file in names.items()}


def private_words(text: str, avoided: dict[str, str] = WORDS) -> list[str]:
    """The words of a text that we avoid, also where a line break splits them."""
    plain = " ".join(text.lower().split())
    return [word for word in avoided if re.search(rf"\b{word}\b", plain)]


@pytest.mark.parametrize("root", ROOTS)
def test_no_private_words_are_used(root: str) -> None:
    found = {name: words for name, text in texts(root).items() if (words := private_words(text))}
    assert texts(root)
    assert not found


@pytest.mark.parametrize("page", sorted(page for page in PAGES if PAGES[page] != MEASURED))
def test_pages_for_users_describe_the_present(page: str) -> None:
    assert private_words((ROOT / page).read_text(), USERS) == []


def test_private_words_are_found_across_lines_and_only_whole() -> None:
    assert private_words("A run that goes\n  on, with a row an image") == ["goes on", "a row an"]
    assert private_words("The canewood is a row apart; it forgoes only one.") == []
    assert len(private_words("on 2026-11-19, at 44fb57b", USERS)) == 2
    assert private_words("accede to 1234567 decades", USERS) == []


if __name__ == "__main__":
    for page in sys.argv[1:] or sorted(PAGES):
        text = (ROOT / page).read_text()
        read = reading(text)
        shown = f"{read.mean:5.1f} words {read.long:6.1%} long {read.numbers:5.1f} numbers"
        print(f"{page:24} {len(text.splitlines()):4} lines {shown}")
        for sentence in read.sentences:
            if len(sentence.split()) > LONG:
                print("    ", sentence)
