"""A table of the paper from data to report, in a very small size."""

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sufficit.reproduce.chain import reproduce
from sufficit.reproduce.clock import Clock
from sufficit.reproduce.learning import lax_recipe
from sufficit.reproduce.outcome import Outcome, paper_rows, read_outcome, summary_of
from sufficit.reproduce.plans import begin, make_plan, read_plan
from sufficit.reproduce.scoring import overlap, pointing
from sufficit.reproduce.tables import TABLES
from sufficit.reproduce.writing import alpha_curves, table_lines, write_results
from test_datasets import write_mnist

from sufficit import Classifier, Lax
from sufficit.classifier.architectures import MODELS
from sufficit.classifier.digit_net import SmallNet
from sufficit.crews import Crew
from sufficit.data.digits import synthetic_digits
from sufficit.errors import UserError
from sufficit.provenance import plain
from sufficit.training import RECIPES

SMALL = {
    "images": 4,
    "search_images": 3,
    "train_images": 40,
    "test_images": 20,
    "epochs": 2,
    "lax_epochs": 2,
    "step": 0.25,
    "group": 2,
    "weights": "none",
}
TOLD = ("numbers/scores", "numbers/search", "numbers/places", "numbers/shown", "numbers/answers")


@contextmanager
def narrow_nets() -> Iterator[None]:
    """The quick size's net with a sixth of its width."""
    usual = MODELS["small-net"]
    MODELS["small-net"] = replace(usual, build=lambda classes, _: SmallNet(classes, width=4))
    try:
        yield
    finally:
        MODELS["small-net"] = usual


def small(out: Path, **more: object) -> Outcome:
    """A run of seconds: few pictures, coarse curves, a small net."""
    given = {"quick": True, "progress": False, "say": lambda line: None, **SMALL, **more}
    with narrow_nets():
        return reproduce("synthetic-mnist", out, **given)


def files(out: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {name: load_file(out / f"{name}.safetensors") for name in TOLD}


def assert_same(one: Path, other: Path) -> None:
    """The same table, to the bit."""
    first, second = files(one), files(other)
    for name in TOLD:
        assert first[name].keys() == second[name].keys()
        for key, values in first[name].items():
            assert torch.equal(values.nan_to_num(7), second[name][key].nan_to_num(7)), (name, key)
    tables = [(out / "results" / "table.md").read_text() for out in (one, other)]
    assert tables[0] == tables[1]


@pytest.fixture(scope="module")
def ticks() -> list[float]:
    return []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, ticks: list[float]) -> Path:
    """A run that nothing stopped; `ticks` are its steps."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole") / "run"
    small(out, progress=lambda done, total: ticks.append(done))
    return out


def test_a_run_leaves_results_and_a_report(whole: Path) -> None:
    results = whole / "results"
    rows = pandas.read_parquet(results / "rows.parquet")
    methods = ["gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam"]
    methods += ["lax-paper-0", "lax-robust-0", "random", "center"]
    assert list(rows.method.unique()) == methods
    assert (rows.groupby("method").size() == 4).all()
    np.testing.assert_allclose(rows.base_score - rows.mask_penalty, rows.msi, atol=1e-12)
    assert rows[["iou", "pointing", "leak"]].notna().to_numpy().all()
    summary = json.loads((results / "summary.json").read_text())
    mine = rows[rows.method == "layercam"].insertion_percent.mean()
    assert summary["methods"]["layercam"]["insertion_percent"]["mean"] == pytest.approx(mine)
    run = json.loads((results / "run.json").read_text())
    assert (run["n"], run["alpha_min"], run["seed"], run["table"]) == (4, 0.5, 0, "synthetic-mnist")
    assert run["config"]["model"] == "small-net"
    assert {"data", "classifier", "scoring", "adapter lax-paper-0"} <= set(run["seconds"])
    assert (
        run["versions"]["torch"] == torch.__version__.partition("+")[0] or run["versions"]["torch"]
    )
    page = (results / "report.html").read_text()
    assert "Synthetic MNIST, CNN: small-net" in page
    assert "lax-robust-0" in page
    for picture in ("sheet.png", "alpha.png"):
        assert (results / picture).stat().st_size > 1000


def loaded(out: Path) -> Classifier:
    with narrow_nets():
        return Classifier.load(out / "classifier")


def test_what_is_scored_can_be_scored_again_by_hand(whole: Path) -> None:
    """The classifier and adapters lie as any user's do, and give the rows' numbers."""
    from sufficit import evaluate, explain
    from sufficit.data.images import list_images, read_image

    classifier = loaded(whole)
    pictures = list_images(whole / "test")
    images = torch.stack([read_image(p.path, classifier.view) for p in pictures])
    labels = torch.tensor([int(str(p.folder)) for p in pictures])
    lax = Lax.from_pretrained(whole / "adapters" / "lax-robust-0")
    maps = explain(classifier, images, labels, lax)
    scores = evaluate(classifier, images, maps, labels, value_step=0.25, percent_step=0.5)
    kept = files(whole)["numbers/scores"]
    torch.testing.assert_close(scores.msi, kept["lax-robust-0/msi"])
    torch.testing.assert_close(scores.fid_plus_pixel, kept["lax-robust-0/fid_plus_pixel"])


def test_the_digits_mask_is_what_maps_are_held_against(whole: Path) -> None:
    from sufficit import explain
    from sufficit.data.images import list_images, read_image

    classifier = loaded(whole)
    pictures = list_images(whole / "test")
    images = torch.stack([read_image(p.path, classifier.view) for p in pictures])
    masks = load_file(whole / "masks.safetensors")["masks"].bool()
    names = json.loads((whole / "test.json").read_text())["names"]
    order = [names.index(p.name) for p in pictures]
    center = explain(classifier, images, torch.zeros(4, dtype=torch.long), "center")
    found = files(whole)["numbers/places"]["center/iou"]
    torch.testing.assert_close(found, overlap(center, masks[order], 0.5))


def test_overlap_and_pointing_by_hand() -> None:
    maps = torch.tensor([[[0.9, 0.6], [0.2, 0.1]], [[0.0, 0.0], [0.0, 0.0]]])
    truth = torch.tensor([[[True, False], [True, False]], [[True, False], [False, False]]])
    assert overlap(maps, truth, 0.5).tolist() == pytest.approx([1 / 3, 0])
    assert pointing(maps, truth).tolist() == [1, 0.25], "a flat map points anywhere"


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("share", [0.02, 0.3, 0.65, 0.95])
def test_a_run_stopped_anywhere_ends_with_the_same_table(
    share: float, tmp_path: Path, whole: Path, ticks: list[float]
) -> None:
    left = int(share * len(ticks))

    def tell(done: float, total: float) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise StoppedError

    with pytest.raises(StoppedError):
        small(tmp_path / "run", progress=tell)
    small(tmp_path / "run")
    assert_same(whole, tmp_path / "run")


def test_a_run_stopped_between_all_stages_ends_with_the_same_table(
    tmp_path: Path, whole: Path
) -> None:
    stops = 0

    def say(line: str) -> None:
        if not line.startswith(("data", " ")):
            raise StoppedError

    for _ in range(20):
        try:
            small(tmp_path / "run", say=say)
            break
        except StoppedError:
            stops += 1
    assert stops >= 8
    assert_same(whole, tmp_path / "run")


def test_a_killed_run_ends_with_the_same_table(
    tmp_path: Path, whole: Path, ticks: list[float]
) -> None:
    script = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        import torch
        torch.set_num_threads(1)
        from pathlib import Path
        from test_reproduce import small
        left = {len(ticks) * 3 // 5}
        def tell(done, total):
            global left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        small(Path({str(tmp_path / "run")!r}), progress=tell)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, check=False
    )
    assert done.returncode == -9, done.stderr.decode()[-500:]
    small(tmp_path / "run")
    assert_same(whole, tmp_path / "run")


def test_tables_and_report_are_made_later_and_elsewhere(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    bare = tmp_path / "gpu"
    with monkeypatch.context() as without:
        for package in ("pyarrow", "jinja2", "markupsafe"):
            without.setitem(sys.modules, package, None)
        small(bare, say=lines.append)
    assert "no report: pyarrow and jinja2 not installed here" in " ".join(lines)
    assert (bare / "results" / "table.md").exists()
    assert not (bare / "results" / "rows.parquet").exists()
    assert not (bare / "results" / "report.html").exists()

    home = tmp_path / "home"
    shutil.copytree(bare / "numbers", home / "numbers")
    shutil.rmtree(bare)
    elsewhere = tmp_path / "no data here"
    reproduce("synthetic-mnist", home, data=elsewhere, quick=True, say=lines.append)
    assert_same(whole, home)
    assert len(pandas.read_parquet(home / "results" / "rows.parquet")) == 36
    assert (home / "results" / "report.html").exists()


def test_training_and_scoring_import_nothing_that_a_gpu_machine_lacks() -> None:
    script = """
        import sys
        for name in ("pyarrow", "jinja2", "markupsafe", "mlxtend"):
            sys.modules[name] = None
        import sufficit.reproduce.chain, sufficit.compare, sufficit.training
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


def test_a_folder_goes_on_only_with_what_it_was_begun_with(tmp_path: Path) -> None:
    begin(tmp_path, "cifar10", {"images": 9}, quick=False, cuda=False)
    plan = begin(tmp_path, "cifar10", {"images": 10}, quick=True, cuda=False)
    assert plan.images == 10, "nothing was done by the first plan"
    (tmp_path / "test.json").touch()
    assert begin(tmp_path, "cifar10", {}, quick=True, cuda=True) == plan, "the device may differ"
    with pytest.raises(UserError, match="was begun with quick True, and is asked now for False"):
        begin(tmp_path, "cifar10", {}, quick=False, cuda=False)
    note = tmp_path / "numbers" / "plan.json"
    older = {k: v for k, v in json.loads(note.read_text()).items() if k != "train_batch"}
    note.write_text(json.dumps(older))
    assert begin(tmp_path, "cifar10", {}, quick=True, cuda=False).train_batch == 512, "the table's"
    with pytest.raises(UserError, match="was begun with images 10, and is asked now for 11"):
        begin(tmp_path, "cifar10", {"images": 11}, quick=True, cuda=False)
    with pytest.raises(UserError, match="was begun with table 'cifar10'"):
        begin(tmp_path, "cub200", {}, quick=True, cuda=False)


def test_a_folder_of_ones_own_gives_a_table_without_the_papers_rows(tmp_path: Path) -> None:
    for i, digit in enumerate((synthetic_digits(40, seed=4).images * 255).byte()):
        place = tmp_path / "photos" / ("odd" if i % 2 else "even") / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digit.permute(1, 2, 0).numpy()).save(place)
    out = tmp_path / "run"
    given = {"quick": True, "progress": False, "say": lambda line: None} | SMALL
    with narrow_nets():
        found = reproduce("folder", out, data=tmp_path / "photos", **given)
    assert found is not None
    assert found.facts["source"] == "photos, 2 classes"
    table = (out / "results" / "table.md").read_text()
    assert "LAX, robust recipe" in table
    assert "*paper*" not in table
    assert {name.split("/")[0] for name in found.names} == {"even", "odd"}


def test_a_run_that_was_moved_while_it_scored_goes_on(tmp_path: Path, whole: Path) -> None:
    before, after = tmp_path / "begun", tmp_path / "moved"

    def stop(done: float, total: float) -> None:
        if list((before / "compare").rglob("scores-*")):
            raise StoppedError

    with pytest.raises(StoppedError):
        small(before, progress=stop)
    shutil.move(before, after)
    small(after)
    assert_same(whole, after)


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "run"  # stopped when the classifier was trained
    shutil.copytree(whole / "classifier", out / "classifier")
    (out / "numbers").mkdir()
    for name in ("plan.json", "data.json"):
        shutil.copy(whole / "numbers" / name, out / "numbers" / name)
    write_mnist(tmp_path / "data")
    with pytest.raises(UserError, match=r"run was begun with the 5,000 .* is given MNIST now"):
        small(out, data=tmp_path / "data")
    note = json.loads((out / "numbers" / "data.json").read_text())
    (out / "numbers" / "data.json").write_text(json.dumps(note | {"digest": "another"}))
    with pytest.raises(UserError, match=r"is given other images of the 5,000 digits .* now"):
        small(out)


def test_adapters_of_an_earlier_recipe_are_not_mixed_with_those_of_today(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"  # stopped when the adapters were trained
    for name in ("classifier", "adapters", "numbers"):
        shutil.copytree(whole / name, out / name)
    for path in (out / "numbers").iterdir():
        if path.name != "plan.json":
            path.unlink()
    monkeypatch.setitem(RECIPES, "robust", replace(RECIPES["robust"], donors=0.6))
    with pytest.raises(UserError, match=r"earlier recipe 'robust' \(donors 1\.0, now 0\.6\)"):
        small(out)


def test_a_start_that_failed_leaves_no_folder_and_the_next_one_works(tmp_path: Path) -> None:
    out = tmp_path / "new" / "run"

    def stop(done: float, total: float) -> None:
        if list(out.rglob("checkpoint.pt")):
            raise StoppedError

    with pytest.raises(UserError, match="no folder of data at"):
        small(out, data=tmp_path / "nowhere", images=3)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoppedError):  # with the corrected words it gets to work
        small(out, progress=stop)
    assert read_plan(out).images == 4


def test_a_start_that_failed_leaves_alone_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "run" / "mine").mkdir(parents=True)
    with pytest.raises(UserError, match="no folder of data at"):
        small(tmp_path / "run", data=tmp_path / "nowhere")
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "mine"]


def test_a_run_that_has_begun_keeps_its_plan_when_it_fails(tmp_path: Path) -> None:
    def stop(done: float, total: float) -> None:
        if list(tmp_path.rglob("checkpoint.pt")):
            raise StoppedError

    with pytest.raises(StoppedError):
        small(tmp_path / "run", progress=stop)
    with pytest.raises(UserError, match="was begun with images 4, and is asked now for 3"):
        small(tmp_path / "run", images=3)
    assert (tmp_path / "run" / "numbers" / "plan.json").exists()


def test_a_failed_process_of_several_leaves_the_plan_of_the_first(tmp_path: Path) -> None:
    plan = begin(tmp_path, "synthetic-mnist", SMALL, quick=True, cuda=False)
    second = Crew(1, 2, "run")
    second.meet = lambda folder: nullcontext()  # type: ignore[method-assign]
    second.check_alike = Mock(side_effect=UserError("another model"))  # type: ignore[method-assign]
    with pytest.raises(UserError, match="another model"):
        small(tmp_path, crew=second)
    assert read_plan(tmp_path) == plan


def test_a_small_size_is_small_and_a_whole_one_the_papers() -> None:
    quick = make_plan("synthetic-mnist", {}, quick=True, cuda=False)
    assert (quick.model, quick.weights, quick.side) == ("small-net", "default", 64)
    assert make_plan("cifar10", {}, quick=True, cuda=False).weights == "none"
    whole = make_plan("cifar10-vit", {}, quick=False, cuda=True)
    assert (whole.model, whole.weights, whole.side) == ("vit-b-16", "default", 224)
    assert (whole.precision, whole.batch_size, whole.seeds, whole.images) == ("bf16", 512, 3, 2000)
    assert make_plan("cifar10", {}, quick=False, cuda=True).batch_size == 2048
    assert make_plan("cifar10", {"model": "deit-tiny"}, quick=True, cuda=False).side == 224


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"recipes": ("papre",)}, "Unknown recipe 'papre'. Did you mean 'paper'"),
        ({"precision": "fp64"}, "Unknown precision 'fp64'"),
        ({"classes": ("crow",)}, "--classes is for cub200"),
        ({"images": 1}, "images must be 2 or more, got 1"),
        ({"step": 0.0}, "a step must lie in 0..1"),
        ({"step": 0.6}, "a step must lie in 0..1, at least 0.0001, got 1.2"),
    ],
)
def test_plans_that_can_not_be_are_refused(asked: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_plan("cifar10", asked, quick=False, cuda=False)


def test_one_class_alone_is_refused_before_anything_is_trained() -> None:
    with pytest.raises(UserError, match="--classes needs two classes or more, got 'crow' alone"):
        make_plan("cub200", {"classes": ("crow",)}, quick=True, cuda=False)


def test_the_papers_recipe_is_the_tables_own() -> None:
    known = {name: table for name, table in TABLES.items() if name != "folder"}
    found = {name: lax_recipe(table, "paper", 6) for name, table in known.items()}
    assert [r.entropy for r in found.values()] == [5, 5, 2, 2]
    assert [r.upsample for r in found.values()] == [1, 1, 2, 1]
    assert [r.lr for r in found.values()] == [1e-3, 1e-4, 1e-3, 1e-3]
    assert [t.alpha_min for t in known.values()] == [0.5, 0.5, 0.4, 0.5]
    assert lax_recipe(TABLES["cub200"], "robust", 6).lr == 1e-3


def test_the_papers_numbers_add_up() -> None:
    counts = {name: len(paper_rows(name)) for name in TABLES}
    assert counts == {
        "synthetic-mnist": 6, "cub200": 6, "cifar10": 6, "cifar10-vit": 3, "folder": 0,
    }  # fmt: skip
    for name in TABLES:
        for method, row in paper_rows(name).items():
            misprint = (name, method) == ("synthetic-mnist", "finer-cam")  # 0.301 - 0.318 = -0.027?
            room = 0.0101 if misprint else 0.0021
            assert row["base_score"] - row["mask_penalty"] == pytest.approx(row["msi"], abs=room)
            assert len(row) == 11, method
    assert paper_rows("cifar10-vit")["rollout"]["msi"] == -0.5225
    assert paper_rows("synthetic-mnist")["lax"]["insertion_pixel"] == 0.917


def made_up() -> Outcome:
    columns = [*paper_rows("cifar10")["lax"], "leak", "leak_chance"]
    plan = make_plan("cifar10", {"seeds": 2, "recipes": ("paper",)}, quick=False, cuda=False)

    def method(shift: float) -> dict[str, np.ndarray]:
        return {name: np.array([0.2, 0.4]) + shift for name in columns}

    return Outcome(
        plan=plan,
        names=("a/0.png", "b/1.png"),
        targets=(0, 1),
        clean=np.array([1.0, 0.0]),
        columns={"gradcam": method(0), "lax-paper-0": method(0.1), "lax-paper-1": method(0.3)},
        facts={},
        trained={},
        seconds={},
    )


def test_seeds_of_a_recipe_are_one_row() -> None:
    pooled = made_up().pooled()
    assert list(pooled) == ["gradcam", "lax-paper"]
    np.testing.assert_allclose(pooled["lax-paper"]["msi"], [0.4, 0.6])
    assert made_up().seed_means("paper", "msi") == pytest.approx([0.4, 0.6])
    search = {"gradcam": [[0, 1]], "lax-paper-0": [[0.2, 0.4]], "lax-paper-1": [[0.4, 0.2]]}
    known = {method: np.array(values, np.float64) for method, values in search.items()}
    curves = alpha_curves(replace(made_up(), alphas=(0.4, 0.5), search=known))
    assert curves["mean_msi"] == {"gradcam": [0, 1], "lax-paper": pytest.approx([0.3, 0.3])}
    assert curves["best"]["gradcam"] == 0.5


def test_the_table_has_the_papers_row_under_ours() -> None:

    pooled = {m: plain(summary_of(c, 0)) for m, c in made_up().pooled().items()}
    lines = table_lines("cifar10", pooled)
    assert lines[0].startswith("| method | ins. px ↑ | del. px ↓ | ins. % ↑")
    assert lines[2].startswith("| Grad-CAM | 0.300 | 0.300 | 0.300 |")
    assert lines[3].startswith("| *paper* | *0.637* | *0.384* | *0.668* | *0.339* | *0.301* |")
    assert lines[4].startswith("| LAX, paper's recipe | 0.500 |")
    assert "*0.007*" in lines[5]
    assert len({line.count("|") for line in lines}) == 1


def test_the_clock_keeps_inner_stages_apart_and_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    told: list[str] = []
    clock = Clock(tmp_path / "t.json", told.append)
    for _ in range(2):
        with clock("outer"):
            now += 1
            with clock("inner"):
                now += 5
            now += 2
    assert clock.seconds() == {"inner": 10, "outer": 6}
    assert told == ["inner: 5.0 s", "outer: 3.0 s"] * 2

    def lose() -> None:
        nonlocal now
        with clock("outer"):
            now += 4
            raise StoppedError

    with pytest.raises(StoppedError):
        lose()
    assert clock.seconds()["outer"] == 10, "time that was lost is time as well"


def test_results_are_made_anew_from_numbers_alone(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "numbers", tmp_path / "numbers")
    outcome = read_outcome(tmp_path)
    changed = replace(outcome, columns={m: dict(c) for m, c in outcome.columns.items()})
    changed.columns["gradcam"]["msi"] = np.full(4, 0.123)
    write_results(tmp_path, changed)
    line = next(
        line for line in (tmp_path / "results" / "table.md").read_text().splitlines()
        if line.startswith("| Grad-CAM |")
    )  # fmt: skip
    assert "| 0.123 | 0.12 .. 0.12 |" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cifar11",), "Unknown table 'cifar11'. Did you mean 'cifar10'?"),
        (("cifar10", "--data", "nowhere"), "no folder of data at nowhere"),
        (("cifar10",), "CIFAR-10 is read from a folder: give --data ROOT"),
        (("cub200", "--data", "."), "no CUB-200-2011 in .: looked for CUB_200_2011/images.txt"),
        (("cifar10", "--download"), "--download needs a folder"),
        (("cifar10", "--recipes", "best"), "Unknown recipe 'best'"),
        (("cifar10", "--model", "resnet19"), "Unknown model 'resnet19'. Did you mean 'resnet18'"),
        (("cifar10", "--weights", "w.pt"), "no weights file at w.pt"),
    ],
)
def test_bad_words_are_one_line(
    words: tuple[str, ...], said: str, sufficit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = sufficit("reproduce", *words, "--out", tmp_path / "out")
    assert run.code == 2
    assert said in run.err
    assert "Traceback" not in run.err
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_the_table(sufficit, tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole / "numbers", tmp_path / "run" / "numbers")
    run = sufficit("reproduce", "synthetic-mnist", "--quick", "--out", tmp_path / "run")
    assert run.code == 0, run.err
    assert "Means over 4 test images, alpha_min 0.5" in run.words
    assert "LAX, paper's recipe" in run.words
    assert "0.582" in run.words, "the paper's"


def test_the_page_of_results_is_made_from_files(whole: Path, tmp_path: Path) -> None:
    import results_tables

    shutil.copytree(whole / "results", tmp_path / "synthetic-mnist")
    page = results_tables.page(tmp_path, results_tables.TEMPLATE.read_text())
    assert "{{" not in page
    assert page.count(results_tables.NOT_YET) == 3, "the three other tables"
    for line in (whole / "results" / "table.md").read_text().splitlines():
        assert line in page
    assert "small-net at 64 px from random weights, trained for 2 epochs on 38 images" in page
    assert "![MSI over alpha_min](../results/synthetic-mnist/alpha.png)" in page
    summary = json.loads((whole / "results" / "summary.json").read_text())
    gap = summary["methods"]["kpca-cam"]["msi"]["mean"] - 0.128
    assert f"KPCA-CAM {gap:+.3f}" in page
    with pytest.raises(SystemExit, match="the template asks for 'tabel'"):
        results_tables.page(tmp_path, "{{synthetic-mnist tabel}}")
