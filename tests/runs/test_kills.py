"""Runs that are killed at any moment go on and end with the same rows."""

import random

import pytest
from kill import COMMANDS, Bench, Moment, draw, make_bench

FIRST = (Moment(write=1), Moment(write=1, named=True))  # half written, and just named


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Data, and a run of each command that nothing disturbed."""
    return make_bench(tmp_path_factory.mktemp("killed"), drawn=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_killed_again_and_again_ends_with_the_same_rows(bench: Bench, name: str) -> None:
    by_chance = draw(random.Random(f"{name} 1"), bench.seconds[name] / 2, 2)
    assert len(bench.survive(name, [*FIRST, *by_chance])) >= 2
