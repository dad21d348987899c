"""Threads that share a GPU: one at a time works, and gives its turn away where it waits."""

import time
from contextvars import ContextVar

import pytest
import torch

from small_streams import without_gpu
from sufficit.turns import can_take_turns, in_turns, others_turn, wait_for_results

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)


def test_results_come_in_order_and_two_are_in_work() -> None:
    log: list[str] = []

    def compute(number: int) -> int:
        log.append(f"{number} begins")
        wait_for_results()
        log.append(f"{number} goes on")
        return number * number

    assert list(in_turns(compute, range(6), CPU)) == [0, 1, 4, 9, 16, 25]
    assert log[:2] == ["0 begins", "0 goes on"]  # the first one alone
    begun = [int(line.split()[0]) for line in log if "begins" in line]
    assert begun == sorted(begun)
    assert log.index("2 begins") < log.index("1 goes on")


def test_one_thread_at_a_time_works() -> None:
    inside = 0
    most = 0

    def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.005)
        inside -= 1

    def compute(number: int) -> int:
        for _ in range(3):
            work()
            wait_for_results()
        return number

    assert list(in_turns(compute, range(5), CPU)) == [*range(5)]
    assert most == 1


def test_an_error_ends_the_work() -> None:
    done: list[int] = []

    def compute(number: int) -> int:
        if number == 3:
            raise ValueError("broken")
        done.append(number)
        wait_for_results()
        return number

    found: list[int] = []
    with pytest.raises(ValueError, match="broken"):
        found.extend(in_turns(compute, range(100), CPU))
    assert max(done) <= 4


def test_a_consumer_that_stops_ends_the_work() -> None:
    done: list[int] = []

    def compute(number: int) -> int:
        done.append(number)
        wait_for_results()
        return number

    results = in_turns(compute, range(100), CPU)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]  # it is a generator
    assert len(done) <= 3


def test_threads_have_the_callers_context() -> None:
    word: ContextVar[str] = ContextVar("word")
    word.set("here")
    assert list(in_turns(lambda _: word.get(), range(3), CPU)) == ["here"] * 3


def test_without_others_nothing_is_waited_for() -> None:
    wait_for_results()  # there is no stream here: it would raise
    with others_turn():
        pass


def test_a_cpu_takes_no_turns() -> None:
    assert not can_take_turns(CPU)
    assert can_take_turns(torch.device("cuda"))
    with torch.inference_mode():
        assert not can_take_turns(torch.device("cuda"))
