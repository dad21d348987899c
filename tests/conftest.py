"""How the tests are spread over processes; what they share is in shared_fixtures.py."""

from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One process more than CPUs: tests that wait for servers and for workers leave theirs idle."""
    return (yield) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Load what tests share, but not where no test runs: it takes seconds to import."""
    runs_tests = hasattr(config, "workerinput") or config.getoption("dist", "no") == "no"
    if runs_tests:
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that no process is left with one at the end."""
    marks = ("slow", "browser")
    slow = {item.path for item in items if any(map(item.get_closest_marker, marks))}
    items.sort(key=lambda item: item.path not in slow)
