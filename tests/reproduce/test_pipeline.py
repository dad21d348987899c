"""A table from data to report in a very small size: its files, and how it resumes."""

import json
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

from small_table import StoppedError, assert_same_table, narrow_nets, small_table
from sufficit import Classifier, Lax, evaluate, explain
from sufficit.data.digits import synthetic_digits
from sufficit.data.images import list_images, read_image
from sufficit.data.splits import Sets, Split
from sufficit.errors import UserError
from sufficit.reproduce.pipeline import TablePipeline
from sufficit.reproduce.table_plan import PLAN, make_plan, read_plan
from sufficit.similarity import region_overlap
from sufficit.training import RECIPES


def test_a_run_writes_results_and_a_report(table: Path) -> None:
    results = table / "results"
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
    assert run["versions"]["torch"]
    page = (results / "report.html").read_text()
    assert "Synthetic MNIST, CNN: small-net" in page
    assert "lax-robust-0" in page
    for figure in ("sheet.png", "alpha.png"):
        assert (results / figure).stat().st_size > 1000


def scored_images(out: Path) -> tuple[Classifier, torch.Tensor, torch.Tensor]:
    """The classifier of a run, its test images and their labels."""
    with narrow_nets():
        classifier = Classifier.load(out / "classifier")
    files = list_images(out / "test")
    images = torch.stack([read_image(file.path, classifier.view) for file in files])
    return classifier, images, torch.tensor([int(str(file.folder)) for file in files])


def rows_of(out: Path, method: str) -> pandas.DataFrame:
    rows = pandas.read_parquet(out / "results" / "rows.parquet")
    return rows[rows.method == method]


def test_classifier_and_adapter_give_the_numbers_of_the_rows_again(table: Path) -> None:
    classifier, images, labels = scored_images(table)
    lax = Lax.from_pretrained(table / "adapters" / "lax-robust-0")
    maps = explain(classifier, images, labels, lax)
    scores = evaluate(classifier, images, maps, labels, value_step=0.25, percent_step=0.5)
    rows = rows_of(table, "lax-robust-0")
    np.testing.assert_allclose(scores.msi.numpy(), rows.msi, atol=1e-6)
    np.testing.assert_allclose(scores.fid_plus_pixel.numpy(), rows.fid_plus_pixel, atol=1e-6)


def test_iou_compares_heatmaps_with_the_digits_pixels(table: Path) -> None:
    classifier, images, labels = scored_images(table)
    files = [file.name for file in list_images(table / "test")]
    masks = torch.stack(
        [torch.from_numpy(np.array(Image.open(table / "truth" / name))) // 255 for name in files]
    )
    assert masks.unique().tolist() == [0, 1]
    center = explain(classifier, images, labels, "center")
    wanted = region_overlap(center, masks.float(), 0.5)
    np.testing.assert_allclose(rows_of(table, "center").iou, wanted.numpy(), atol=1e-12)
    inside = (center * masks).sum((1, 2)) / center.sum((1, 2))
    np.testing.assert_allclose(rows_of(table, "center").mass_accuracy, inside.numpy(), atol=1e-6)


def test_alpha_min_is_searched_on_some_images(table: Path) -> None:
    curves = json.loads((table / "results" / "alpha.json").read_text())
    assert curves["n"] == 3
    assert {*curves["best"]} >= {"gradcam", "lax-paper", "lax-robust", "random"}
    for method, means in curves["mean_msi"].items():
        assert len(means) == len(curves["alphas"])
        assert max(means) == means[curves["alphas"].index(curves["best"][method])]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("share", [0.02, 0.3, 0.65, 0.95])
def test_a_run_stopped_anywhere_resumes_to_the_same_table(
    share: float, tmp_path: Path, table: Path, ticks: list[float]
) -> None:
    left = int(share * len(ticks))

    def stop(done: float, total: float) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise StoppedError

    with pytest.raises(StoppedError):
        small_table(tmp_path / "run", progress=stop)
    small_table(tmp_path / "run")
    assert_same_table(table, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_run_stopped_after_each_stage_resumes_to_the_same_table(
    tmp_path: Path, table: Path
) -> None:
    stops = 0

    def stop(line: str) -> None:
        if not line.startswith(("data", " ")):
            raise StoppedError

    for _ in range(20):
        try:
            small_table(tmp_path / "run", say=stop)
            break
        except StoppedError:
            stops += 1
    assert stops == 6, "classifier, two adapters, test folder, scoring, search"
    assert_same_table(table, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_killed_run_resumes_to_the_same_table(
    tmp_path: Path, table: Path, ticks: list[float]
) -> None:
    script = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        import torch
        torch.set_num_threads(1)
        from pathlib import Path
        from small_table import small_table
        left = {len(ticks) * 3 // 5}
        def kill(done, total):
            global left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        small_table(Path({str(tmp_path / "run")!r}), progress=kill)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == -9, done.stderr.decode()[-500:]
    small_table(tmp_path / "run")
    assert_same_table(table, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_run_that_moved_while_it_scored_resumes(tmp_path: Path, table: Path) -> None:
    before, after = tmp_path / "started", tmp_path / "moved"

    def stop(done: float, total: float) -> None:
        if list((before / "compare").rglob("scores-*")):
            raise StoppedError

    with pytest.raises(StoppedError):
        small_table(before, progress=stop)
    shutil.move(before, after)
    small_table(after)
    assert_same_table(table, after)


def test_results_are_made_again_without_data_weights_or_adapters(
    tmp_path: Path, table: Path
) -> None:
    out = tmp_path / "elsewhere"
    shutil.copytree(table, out, ignore=shutil.ignore_patterns("results", "*adapters", "classifier"))
    (out / "classifier").mkdir()
    shutil.copy(table / "classifier" / "trained.json", out / "classifier")
    small_table(out, data=tmp_path / "no data here")
    assert_same_table(table, out)
    assert (out / "results" / "report.html").exists()


def test_the_status_of_a_table_names_its_stages(sufficit, table: Path) -> None:
    found = json.loads(sufficit("status", table, "--json").out)
    done = {"classifier", "compare", "search", *read_plan(table).adapters}
    assert {*found["stages_done"]} == done
    assert (found["is_finished"], found["trainings"]) == (True, {})


def copy_trained(table: Path, out: Path) -> Path:
    """A run that was stopped when the classifier and the adapters were trained."""
    for name in ("classifier", "adapters"):
        shutil.copytree(table / name, out / name)
    shutil.copy(table / PLAN, out / PLAN)
    return out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source": "MNIST"}, "`source of the data` was 'MNIST', now 'the 5,000 digits"),
        ({"digest": "another"}, "`digest of the data` was 'another', now"),
    ],
)
def test_a_run_refuses_to_resume_with_other_data(
    tmp_path: Path, table: Path, change: dict[str, str], words: str
) -> None:
    out = copy_trained(table, tmp_path / "run")
    stored = json.loads((out / PLAN).read_text())
    (out / PLAN).write_text(json.dumps(stored | {"data": stored["data"] | change}))
    with pytest.raises(UserError, match=f"Cannot resume .*{words}"):
        small_table(out)


def test_adapters_of_an_earlier_recipe_are_not_mixed_with_new_ones(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copy_trained(table, tmp_path / "run")
    monkeypatch.setitem(RECIPES, "robust", replace(RECIPES["robust"], donors=0.6))
    with pytest.raises(UserError, match=r"`robust.donors of the recipes` was 2\.0, now 0\.6"):
        small_table(out)


def test_a_start_that_fails_leaves_no_folder_and_the_next_one_works(
    sufficit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "run"

    def stop(done: float, total: float) -> None:
        if list(out.rglob("checkpoint.pt")):
            raise StoppedError

    with pytest.raises(UserError, match="no folder of data at"):
        small_table(out, data=tmp_path / "nowhere", images=3)
    assert list(tmp_path.iterdir()) == []
    line = ["/bin/sufficit", "reproduce", "a table", "--overwrite", "--out", str(out)]
    monkeypatch.setattr("sys.argv", line)
    with pytest.raises(StoppedError):  # with correct options it trains
        small_table(out, progress=stop)
    assert read_plan(out).images == 4
    told = "Stages done: none classifier-training: 1 of 2 epochs done Run the same command again to"
    status = sufficit("status", out).words
    assert status == f"{told} resume: cd {Path.cwd()} && sufficit reproduce 'a table' --out {out}"
    with pytest.raises(UserError, match=r"Cannot resume .*`images` was 4, now 3"):
        small_table(out, images=3)
    with pytest.raises(StoppedError):
        small_table(out, images=3, overwrite=True, progress=stop)
    assert read_plan(out).images == 3


def test_a_start_that_fails_leaves_the_users_files(tmp_path: Path) -> None:
    (tmp_path / "run" / "mine").mkdir(parents=True)
    with pytest.raises(UserError, match="no folder of data at"):
        small_table(tmp_path / "run", data=tmp_path / "nowhere")
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "mine"]


def test_a_class_name_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    split = Split(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]), 8)
    plan = make_plan("folder", {"images": 4}, quick=True, cuda=False)
    pipeline = TablePipeline(plan, tmp_path / "out", None, torch.device("cpu"))
    pipeline.__dict__["sets"] = Sets(split, split, ("a", "../../../escaped"), "made up")
    with pytest.raises(UserError, match=r"'../../../escaped' can't be the name"):
        pipeline.write_test_images()
    assert not list(tmp_path.rglob("*escaped*"))


@pytest.mark.slow
def test_an_image_folder_gives_a_table_without_the_papers_rows(tmp_path: Path) -> None:
    for i, digit in enumerate((synthetic_digits(40, seed=4).images * 255).byte()):
        place = tmp_path / "photos" / ("odd" if i % 2 else "even") / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digit.permute(1, 2, 0).numpy()).save(place)
    out = tmp_path / "run"
    found = small_table(out, "folder", data=tmp_path / "photos")
    assert found.trained["data"] == "photos, 2 classes"
    table = (out / "results" / "table.md").read_text()
    assert "LAX, robust recipe" in table
    assert "*paper*" not in table
    assert "IoU" not in table
    assert {name.split("/")[0] for name in found.compared.names} == {"even", "odd"}


def test_importing_the_pipeline_needs_no_package_of_reports_or_digits() -> None:
    script = """
        import sys
        for name in ("pyarrow", "jinja2", "markupsafe", "mlxtend"):
            sys.modules[name] = None
        import sufficit.reproduce.pipeline
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cifar11",), "Unknown table 'cifar11'. Did you mean 'cifar10'?"),
        (("cifar10", "--data", "nowhere"), "no folder of data at nowhere"),
        (("cifar10",), "CIFAR-10 is read from a folder: give --data ROOT"),
        (("cub200", "--data", "."), "no CUB-200-2011 in .: expected CUB_200_2011/images.txt"),
        (("cifar10", "--download"), "--download needs a folder"),
        (("cifar10", "--recipes", "best"), "Unknown recipe 'best'"),
        (("cifar10", "--model", "resnet19"), "Unknown model 'resnet19'. Did you mean 'resnet18'"),
        (("cifar10", "--weights", "w.pt"), "no weights file at w.pt"),
    ],
)
def test_wrong_options_are_one_line_and_leave_nothing(
    words: tuple[str, ...], said: str, sufficit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = sufficit("reproduce", *words, "--out", tmp_path / "out")
    assert run.code == 2
    assert said in run.err
    assert "Traceback" not in run.err
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_the_table(sufficit, tmp_path: Path, table: Path) -> None:
    shutil.copytree(table, tmp_path / "run")
    run = sufficit("reproduce", "synthetic-mnist", "--quick", "--out", tmp_path / "run")
    assert run.code == 0, run.err
    assert "Means over 4 test images, alpha_min 0.5" in run.words
    assert "LAX, paper's recipe" in run.words
    assert "0.582" in run.words, "the paper's"
