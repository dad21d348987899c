"""The digest of a user's code changes with it, and with the code beside it that it imports."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision import models

from sufficit.classifier.source_code import (
    code_digest,
    code_of,
    is_installed,
    python_function,
    versions_of,
)

MAIN = """
from parts import half
import package.deep

def make(images):
    import late  # inside of a function
    return half(images)

class Own:
    def __call__(self, images):
        return images
"""
FILES = {
    "main.py": MAIN,
    "parts.py": "import constants\ndef half(images): return images / 2\n",
    "constants.py": "HALF = 0.5\n",
    "late.py": "x = 1\n",
    "package/__init__.py": "",
    "package/deep.py": "from . import near\n",
    "package/near.py": "y = 1\n",
    "unrelated.py": "z = 1\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    for name, text in FILES.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    yield tmp_path / "project"
    for name in ("main", "parts", "constants", "late", "package", "package.deep", "package.near"):
        sys.modules.pop(name, None)


def digest(project: Path, kind: Callable[[Any], Any] = lambda found: found) -> str:
    return code_digest(kind(python_function(f"{project / 'main.py'}:make")))


@pytest.mark.parametrize("name", [name for name in FILES if name != "unrelated.py"])
def test_every_file_that_is_imported_counts(project: Path, name: str) -> None:
    before = digest(project)
    with (project / name).open("a") as file:
        file.write("# another comment\n")
    assert digest(project) != before
    (project / name).write_text(FILES[name])
    assert digest(project) == before


def test_other_files_and_places_do_not_count(project: Path) -> None:
    before = digest(project)
    (project / "unrelated.py").write_text("z = 2\n")
    assert digest(project) == before
    moved = project.with_name("moved")
    project.rename(moved)
    (moved / "main.py").rename(moved / "renamed.py")
    assert code_digest(python_function(f"{moved / 'renamed.py'}:make")) == before


def test_objects_and_partial_functions_have_code_too(project: Path) -> None:
    plain = digest(project)
    assert digest(project, lambda found: partial(found, 1)) == plain
    own = python_function(f"{project / 'main.py'}:Own")
    assert code_digest(own()) == plain  # of its class, in the same file


def test_installed_packages_count_by_version() -> None:
    model = models.resnet18()
    assert code_of(model) == ""
    assert versions_of(model).keys() == {"torch", "torchvision"}
    assert is_installed(Path(torch.__file__))
    assert not is_installed(Path(__file__))


def test_code_with_errors_or_without_a_file_has_a_digest(project: Path) -> None:
    before = digest(project)
    (project / "late.py").write_text("x = = 1\n")
    assert digest(project) != before
    names: dict[str, Any] = {}
    exec("def typed(images): return images", names)
    assert code_digest(names["typed"])
    assert code_digest(torch.relu) != code_digest(torch.tanh)
