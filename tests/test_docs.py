"""What the README and the docs say, runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "docs/heatmaps-from-elsewhere.md",
    "docs/lax.md",
    "docs/metrics.md",
    "docs/report.md",
    "docs/sanity.md",
    "docs/trust.md",
]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize(
    ("page", "number"), [(page, i) for page in PAGES for i in range(len(blocks(page, "python")))]
)
# captum, and ttach inside grad-cam, are imported here and not ours to mend.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_python_in_the_docs_runs(
    page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks(page, "python")[number], f"{page} block {number}", "exec"), {})


def test_ci_runs_the_command_of_the_readme() -> None:
    commands = [line for block in blocks("README.md", "bash") for line in block.splitlines()]
    tests = next(line for line in commands if "pytest" in line)
    assert tests in (ROOT / ".ci" / "run").read_text().splitlines()


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), (page, target)


def test_the_file_tree_names_every_module() -> None:
    tree = next(block for block in blocks("README.md", "text") if "src/sufficit" in block)
    for module in (ROOT / "src" / "sufficit").iterdir():
        hidden = module.name in {"__init__.py", "__pycache__", "py.typed", "assets"}
        assert hidden or module.name in tree, module.name
