"""How the tests are spread over processes; what they share is in shared_fixtures.py."""

import os

import pytest

# Processes that tests start, as kernels of notebooks, would have a thread for each CPU, which spin
# and wait for those of the other tests: one such notebook took 132 s instead of 11.
os.environ.setdefault("OMP_NUM_THREADS", "1")


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
