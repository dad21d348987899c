"""Every error message, in one file: tests/messages.txt. Write it by `python tools/messages.py`."""

import re

import messages
import pytest

FOUND = [line.strip() for line in messages.page().splitlines() if line.startswith("  ")]
# A remedy holds a value or a command to paste, or is left out: these only repeat what was wrong.
REPEATS = re.compile(
    r"(change|raise|lower|correct|sort|fix|check) (it|them|this|the path|the name|your input)\.?$"
)


def test_the_messages_are_those_of_the_file() -> None:
    assert messages.PAGE.read_text() == messages.page(), "run python tools/messages.py"


def test_no_remedy_only_repeats_what_was_wrong() -> None:
    assert len(FOUND) > 400
    assert [one for one in FOUND if REPEATS.search(one.lower())] == []


def test_a_message_is_one_sentence_of_readable_length() -> None:
    # A longer one has a remedy that lists choices; with what is filled in it may be a line more.
    assert [one for one in FOUND if len(one.split()) > 55] == []
    assert [one for one in FOUND if one.endswith((" ", ":", ","))] == []


def test_a_remedy_that_only_repeats_is_noticed() -> None:
    assert REPEATS.search("seed must be 0 or more, got -1: raise it")
    assert not REPEATS.search("heatmaps must be floats in 0..1: call .float()")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('raise UserError("a: b")', ["a: b"]),
        ('raise UserError(f"n must be {x}, got {y!r}")', ["n must be {}, got {}"]),
        ('raise UserError("a" if x else "b")', ["a", "b"]),
        ('raise UserError(f"{a}: {b}")', []),
        (
            'def f():\n    word = "one"\n    word = "two"\n    raise UserError(word + " ends")',
            ["one ends", "two ends"],
        ),
    ],
)
def test_messages_are_found_in_source(source: str, found: list[str], tmp_path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    assert messages.messages(path) == found
