"""What is released: versions agree, extras exist, a wheel holds the package and no tests."""

import re
import tomllib
from pathlib import Path

import bare
import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PARTS = ("src", "docs", "paper", "research", "tools", "benchmarks")
TEXTS = [
    *(path for part in PARTS for path in (ROOT / part).rglob("*")),
    *ROOT.glob("*.md"),
]


def test_extras_that_are_named_exist_and_install_from_a_clone() -> None:
    """Until there is a release, `pip install sufficit` would fail, so that nothing names it."""
    named: set[str] = set()
    for path in TEXTS:
        if path.suffix not in {".py", ".md", ".ipynb", ".js", ".html", ".yaml", ".toml"}:
            continue
        text = path.read_text(encoding="utf-8")
        for word in re.findall(r"pip install (?:-\w+ )*'?\.\[([\w,{}]+)\]", text):
            named |= {one for one in word.split(",") if "{" not in one}
        if path.name != "bare.py":
            assert not re.search(r"pip install (?:-\w+ )*'?sufficit", text), path
    assert {"timm", "ray", "web", "tensorboard"} <= named
    assert named <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("package", ["timm", "transformers"])
def test_extras_that_a_message_makes_up_exist(package: str) -> None:
    assert package in PROJECT["optional-dependencies"]


def test_the_citation_is_of_this_version_and_the_paper() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == PROJECT["version"]
    assert cited["license"] == PROJECT["license"].partition(" AND ")[0], "the code's"
    paper = cited["preferred-citation"]
    assert paper["identifiers"][0]["value"] == "arXiv:2605.18681"
    readme = (ROOT / "README.md").read_text()
    assert paper["url"] in readme
    assert " ".join(paper["title"].split()) in " ".join(readme.split())


def test_bare_allows_what_is_required_and_nothing_else() -> None:
    allowed = bare.required("sufficit")
    assert {"torch", "torchvision", "typer", "sympy"} <= allowed  # sympy is torch's
    assert not {"timm", "ray", "pytest", "captum", "quantus"} & allowed
    blocker = bare.Blocker(allowed)
    assert blocker.find_spec("torch") is not None
    assert blocker.find_spec("json") is not None
    assert blocker.find_spec("captum") is None
