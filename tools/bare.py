"""Run a sufficit command as after `pip install sufficit` alone.

python tools/bare.py demo --images 2

Packages that are installed here and that sufficit does not require cannot be imported, so that a
missing requirement fails as it would in an environment of its own.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import (
    Distribution,
    DistributionFinder,
    PackageNotFoundError,
    packages_distributions,
    requires,
)
from types import ModuleType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(name: str, known: set[str] | None = None) -> set[str]:
    """The distributions that one needs, and what these need, without extras."""
    known = set() if known is None else known
    if (own := canonicalize_name(name)) in known:
        return known
    known.add(own)
    try:
        wanted = [Requirement(one) for one in requires(name) or ()]
    except PackageNotFoundError:
        return known  # for another system
    for one in wanted:
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            required(one.name, known)
    return known


class Blocker:
    """Python's finder of modules, without packages that are installed but not required."""

    def __init__(self, allowed: set[str]) -> None:
        self.allowed = allowed
        self.blocked = {
            module
            for module, homes in packages_distributions().items()
            if not allowed & {canonicalize_name(home) for home in homes}
        }

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module is; None, as for one that is not installed, if it is not required."""
        if name.partition(".")[0] in self.blocked:
            return None
        return PathFinder.find_spec(name, path, target)

    def find_distributions(self, *context: DistributionFinder.Context) -> Iterator[Distribution]:
        """The distributions that are required, for libraries that look before they import."""
        for one in PathFinder.find_distributions(*context):
            if canonicalize_name(one.metadata["Name"] or "") in self.allowed:
                yield one


if __name__ == "__main__":
    sys.meta_path[sys.meta_path.index(PathFinder)] = Blocker(required("sufficit"))
    from sufficit.cli import main

    sys.argv[0] = "sufficit"
    main()
