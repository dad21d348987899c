"""Run a sufficit command as after `pip install sufficit` alone.

python tools/bare.py demo --images 2

Packages that are installed here and that sufficit does not require cannot be imported, so that a
missing requirement fails as it would in an environment of its own.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

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
    """Finds no module of a package that is installed but not required."""

    def __init__(self, allowed: set[str]) -> None:
        self.blocked = {
            module
            for module, homes in packages_distributions().items()
            if not allowed & {canonicalize_name(home) for home in homes}
        }

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        """Raise for a blocked module, and leave all others to Python."""
        if name.partition(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"{name} is no requirement of sufficit", name=name)
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocker(required("sufficit")))  # type: ignore[arg-type]  # a finder
    from sufficit.cli import main

    sys.argv[0] = "sufficit"
    main()
