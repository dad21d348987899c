"""What the README and the docs say, runs."""

import importlib
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sufficit.runs.config import config_from

ROOT = Path(__file__).parents[2]
TUTORIAL, MODEL = "docs/tutorial.md", "docs/your-model.md"  # run from top to bottom, below
PAGES = ["README.md", *(f"docs/{one.name}" for one in sorted((ROOT / "docs").glob("*.md")))]
CLUSTER = "docs/scale.md"  # its Python needs published weights, photographs and several GPUs
PAGES = [page for page in PAGES if page not in (TUTORIAL, MODEL, CLUSTER)]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "number"), [(page, i) for page in PAGES for i in range(len(blocks(page, "python")))]
)
@pytest.mark.filterwarnings("ignore:heatmaps")  # of random networks, which find nothing
# captum, and ttach inside grad-cam, are imported here and not ours to mend.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_python_in_the_docs_runs(
    page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    coarse = {"value_step": 0.1, "percent_step": 0.1, "donors": 2}  # unless the page says otherwise
    monkeypatch.setattr("sufficit.comparison.config_from", lambda own: config_from(coarse | own))
    exec(compile(blocks(page, "python")[number], f"{page} block {number}", "exec"), {})


FOLDERS = ("docs", "paper", "research", "benchmarks")
PROSE = [
    *ROOT.glob("*.md"),
    # The template's links are those of docs/results.md, which is made of it.
    *(p for one in FOLDERS for p in (ROOT / one).glob("*.md") if "template" not in p.name),
]
TINY = "test_resnet"  # timm's own, for tests
STEPS = ["--value-step", "0.25", "--percent-step", "0.25"]
SMALL = {  # what makes a command of a page quick
    "explain": [],
    "compare": ["--checks", "controls,fill", "--images", "3", *STEPS],
    "train-lax": ["--epochs", "1", "--batch-size", "4"],
    "sanity": ["--images", "2", "--steps", "1"],
    "figure": [],
}


def run_page(page: str, sufficit: Any, further: Sequence[str] = (), **replaced: str) -> set[str]:
    """Run the commands and the Python of a page from top to bottom; return the commands."""
    text = (ROOT / page).read_text()
    for old, new in replaced.items():
        text = text.replace(old.replace("__", ":"), new)
    done = set()
    for language, block in re.findall(r"```(bash|python)\n(.*?)```", text, flags=re.DOTALL):
        if language == "python":
            exec(compile(block, f"{page} block", "exec"), {})
            continue
        for words in map(shlex.split, block.splitlines()):
            if words[0] == "sufficit":
                own = further if words[1] != "figure" else ()
                run = sufficit(*words[1:], *SMALL[words[1]], *own)
                assert run.code == 0, (words, run.err)
                done.add(words[1])
    return done


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # so few pictures tell nothing, and it says so
def test_the_tutorial_runs_from_top_to_bottom(
    sufficit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "cp -r src/sufficit/assets/pets/photos photos" in (ROOT / TUTORIAL).read_text()
    shutil.copytree(ROOT / "src/sufficit/assets/pets/photos", tmp_path / "photos")
    assert run_page(TUTORIAL, sufficit) == {"explain", "compare", "sanity", "figure"}
    for name in ("regions/sheet.png", "first/report.html", "sane/report.html", "sheet.pdf"):
        assert (tmp_path / name).stat().st_size > 5000


def test_every_step_of_the_tutorial_shows_its_output() -> None:
    text = (ROOT / TUTORIAL).read_text()
    steps = re.split(r"^## \d\. ", text, flags=re.MULTILINE)[1:]
    assert len(steps) >= 5
    assert [step.splitlines()[0] for step in steps if "```text" not in step] == []


@pytest.fixture
def birds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A timm network's weights, drawn by chance, and class folders of pictures."""
    import timm

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = timm.create_model(TINY, pretrained=False, num_classes=3)
    torch.save(model.state_dict(), tmp_path / "birds.pt")
    pixels = np.random.default_rng(0).integers(0, 256, (15, 72, 64, 3), dtype=np.uint8)
    for i, picture in enumerate(pixels):
        kind, part = ("crow", "finch", "wren")[i % 3], "train" if i < 12 else "test"
        path = tmp_path / "birds" / part / kind / f"{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # so few pictures tell nothing, and it says so
def test_a_model_of_your_own_is_saved_explained_trained_for_and_compared(
    sufficit: Any, birds: Path
) -> None:
    done = run_page(MODEL, sufficit, ["--size", "64"], timm__resnet18=f"timm:{TINY}")
    assert done == {"explain", "train-lax", "compare", "figure"}
    for name in ("drawn/sheet.png", "birds-lax/training.png", "second/report.html", "sheet.pdf"):
        assert (birds / name).stat().st_size > 5000
    assert "birds-lax" in (birds / "second" / "report.html").read_text()


def test_every_equation_leads_to_a_function_and_a_test_that_exist() -> None:
    text = (ROOT / "paper" / "equations.md").read_text()
    functions = set(re.findall(r"`(sufficit\.[\w.]+)`", text))
    checks = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text))
    assert len(functions) > 20
    assert len(checks) > 20
    for name in functions:
        home, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(home), last), name
    for file, test in checks:
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), flags=re.MULTILINE), test
    for number in range(1, 10):
        assert f"| ({number}) |" in text


def test_commands_in_the_docs_are_commands_with_options_they_have(sufficit) -> None:
    helps: dict[str, str] = {}
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for block in blocks(str(page.relative_to(ROOT)), "bash"):
            for words in map(shlex.split, block.replace("\\\n", " ").splitlines()):
                if not words or words[0] != "sufficit":
                    continue
                command = words[1]
                helps.setdefault(command, sufficit(command, "--help-all").out)
                for word in words[2:]:
                    if word.startswith("--"):
                        assert word in helps[command], (page.name, command, word)
    assert len(helps) > 5


def test_ci_runs_the_command_of_the_readme() -> None:
    commands = [line for block in blocks("README.md", "bash") for line in block.splitlines()]
    tests = next(line for line in commands if "pytest" in line)
    assert tests in (ROOT / ".ci" / "run").read_text().splitlines()


def test_links_lead_somewhere() -> None:
    for page in PROSE:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if target.startswith("https://"):
                continue
            file = page.parent / target if target else page
            assert file.exists(), (page.name, target)
            assert not anchor or anchor in anchors(file), (page.name, target, anchor)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_file_tree_names_every_module() -> None:
    tree = next(block for block in blocks("CONTRIBUTING.md", "text") if "src/sufficit" in block)
    for module in (ROOT / "src" / "sufficit").iterdir():
        hidden = module.name in {"__init__.py", "__pycache__", "py.typed", "assets"}
        assert hidden or module.name in tree, module.name
