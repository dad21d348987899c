"""`sufficit compare` prints the table, writes the folder, and refuses what would do harm."""

import json
import os
from pathlib import Path

import pandas
import pytest
import torch

from small_runs import (
    CLASSES,
    FLAGS,
    STEPS,
    config_for,
    interrupted,
    rows,
    run_small,
    write_photos,
)
from sufficit import Classifier, Lax, evaluate, explain, leak, plots
from sufficit.cli.compare import write_pictures
from sufficit.data.images import read_image
from sufficit.runs.config import read_toml
from sufficit.runs.results import RunResults
from sufficit.runs.store import MAPS, UNIT, Store
from sufficit.runs.unit_rows import Rows

NO_LEAK = ("--checks", "controls,fill,alpha-curve")


def words(photos: Path, *more: object) -> list[object]:
    model = f"python:{photos.parent / 'model.py'}:make"
    return [
        "compare", "--model", model, "--data", photos, "--methods", "gradcam, layercam", *FLAGS,
        "--out", photos.parent / "out", *more,
    ]  # fmt: skip


def test_it_prints_the_table_and_where_to_look(sufficit, photos: Path) -> None:
    run = sufficit(*words(photos), "-v")
    assert run.code == 0, run.err
    out = photos.parent / "out"
    summary = json.loads((out / "summary.json").read_text())
    for method in ("gradcam", "layercam", "everything", "random", "center"):
        assert f"{summary[method]['msi']['mean']:.3f}" in run.words
    assert "11 images, alpha_min 0.5" in run.words
    assert "* highest MSI; " in run.words
    for name in ("report.html", "sheet.png", "curves.png", "pairs.csv"):
        assert name in run.words
        assert (out / name).stat().st_size > 0
    page = (out / "report.html").read_text()
    assert "<b>MSI over alpha_min</b>" in page
    known = RunResults.read(out)
    assert known.standing is not None
    pairs = [(m, c) for m in ("gradcam", "layercam") for c in ("everything", "random", "center")]
    beaten = all(known.standing.beats(*pair) for pair in pairs)
    assert ("significantly better than the controls" in run.words) == beaten
    assert "random (c)" in run.words
    assert known.content().class_agnostic == ["everything", "random", "center"]
    agnostic = sufficit(*words(photos, "--methods", "old=kpca-cam,gradcam", "--overwrite"))
    assert "old (a)" in agnostic.words
    assert "(a) class-agnostic: the same map for every class" in agnostic.words


@pytest.mark.usefixtures("undrawn")
def test_maps_that_mark_nothing_at_alpha_min_are_a_warning(
    sufficit, photos: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def dim(model, images, targets): return images[:, 0] * 0.4")
    mine = f"python:{tmp_path / 'mine.py'}:dim"
    run = sufficit(*words(photos, "--methods", mine, "--checks", "none"))
    said = "dim marks nothing at alpha_min 0.5 in 11 of 11 images."
    assert said in " ".join(run.err.split())


@pytest.mark.usefixtures("undrawn")
def test_a_finished_run_is_not_overwritten_unless_it_is_asked_for(
    sufficit, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sufficit(*words(photos, *NO_LEAK)).code == 0
    out = photos.parent / "out"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (out / "notes.txt").write_text("mine")
    with monkeypatch.context() as patched:
        patched.setattr("sufficit.runs.engine.score_unit", None)  # nothing is computed
        for more in (("--seed", "1"), ("--checks", "default"), ("--fills", "blur")):
            other = sufficit(*words(photos, *NO_LEAK, *more))
            assert other.code == 2
            assert "holds a finished run of other settings or images: choose another" in other.err
            assert "--overwrite" in other.err
    for wrong in (("--methods", "gradkam"), ("--fills", "nothing.png")):
        assert sufficit(*words(photos, *wrong, "--overwrite")).code == 2
    assert before == {path: path.read_bytes() for path in before}, "a typing error costs no run"
    run = sufficit(*words(photos, "--checks", "none", "--overwrite"))
    assert run.code == 0, run.err
    folders = {path.name for path in out.iterdir() if path.is_dir()}
    assert folders == {"gradcam", "layercam", MAPS}
    assert (out / "notes.txt").read_text() == "mine"


def test_the_same_command_after_the_end_prints_the_results(
    sufficit, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sufficit(*words(photos))
    assert first.code == 0, first.err
    out = photos.parent / "out"
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    monkeypatch.setattr("sufficit.runs.engine.score_unit", None)  # nothing is computed again
    again = sufficit(*words(photos))
    assert (again.code, again.out) == (0, first.out), again.err
    assert "This takes about" not in again.err
    found = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert found == before, "nothing is written again"
    printed = json.loads(sufficit(*words(photos, "--json")).out)
    summary = json.loads((out / "summary.json").read_text())
    assert printed["columns"]["gradcam"]["msi"] == summary["gradcam"]["msi"]


@pytest.mark.slow
@pytest.mark.parametrize("last", ["curves.png", "report.html"])
def test_a_run_killed_before_its_report_gets_it_from_the_same_command(
    sufficit, photos: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    out, record = photos.parent / "out", photos.parent / "out" / "run.json"
    with monkeypatch.context() as patched:
        if last == "report.html":
            patched.setattr("sufficit.runs.results.RunResults.report", killed)
        else:
            patched.setattr("sufficit.cli.compare.write_pictures", killed)
        assert sufficit(*words(photos, *NO_LEAK)).code == 130
    before = record.read_text()
    other = sufficit(*words(photos, *NO_LEAK, "--seed", "1"))
    assert (other.code, record.read_text()) == (2, before)
    assert "holds a finished run of other settings or images: choose another --out" in other.err
    with monkeypatch.context() as patched:
        patched.setattr("sufficit.runs.engine.score_unit", None)  # nothing is computed again
        again = sufficit(*words(photos, *NO_LEAK))
    assert (again.code, record.read_text()) == (0, before), again.err
    assert "This takes about" not in again.err
    for name in ("report.html", "sheet.png", "curves.png"):
        assert (out / name).stat().st_size > 0


@pytest.mark.usefixtures("undrawn")
def test_results_of_which_a_file_is_lost_are_computed_again(sufficit, photos: Path) -> None:
    assert sufficit(*words(photos, *NO_LEAK)).code == 0
    summary = photos.parent / "out" / "summary.json"
    before = summary.read_text()
    summary.unlink()
    assert sufficit(*words(photos, *NO_LEAK, "--seed", "1")).code == 2
    assert not summary.exists()
    assert sufficit(*words(photos, *NO_LEAK)).code == 0
    assert summary.read_text() == before


@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_run_is_resumed_by_the_same_command(sufficit, photos: Path) -> None:
    out = photos.parent / "out"
    config = config_for(photos, donors=None)
    interrupted(lambda: run_small(config, out, unit=32), after=0)
    other = sufficit(*words(photos, "--seed", 1))
    assert other.code == 2
    assert "Cannot resume" in other.err
    assert "`seed` was 0, now 1. Use another --out for a new run, --overwrite" in other.err
    again = sufficit(*words(photos))
    assert again.code == 0, again.err


@pytest.mark.parametrize("command", ["compare", "evaluate", "explain", "sanity", "demo"])
def test_results_that_can_go_nowhere_are_refused_before_any_work(
    sufficit, photos: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    model = ["--model", f"python:{tmp_path / 'model.py'}:make"]
    given = {
        "compare": ["compare", *model, "--data", photos],
        "evaluate": ["evaluate", *model, "--data", photos, "--heatmaps", "absent.npz"],
        "explain": ["explain", photos, *model],
        "sanity": ["sanity", *model, "--data", photos],
        "demo": ["demo"],
    }[command]
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        run = sufficit(*given, "--out", place)
        assert run.code == 2, place
        assert "can't be a folder of results" in run.err
        assert "Choose another --out" in run.err
    if command != "demo":
        run = sufficit(*given, "--out", photos / "inside")
        assert run.code == 2
        assert "so results would be read as images: choose another --out" in run.err
    usual = os.access
    monkeypatch.setattr(  # root may write everywhere
        "os.access", lambda path, mode, **more: mode != os.W_OK and usual(path, mode, **more)
    )
    run = sufficit(*given, "--out", tmp_path / "closed")
    assert run.code == 2
    assert "no right to write there" in run.err
    assert (tmp_path / "file").read_text() == "x"
    assert not (photos / "inside").exists()
    assert not (tmp_path / "closed").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_run_of_another_command_is_not_overwritten(sufficit, photos: Path) -> None:
    assert sufficit(*words(photos, *NO_LEAK)).code == 0
    out = photos.parent / "out"
    model = ("--model", f"python:{photos.parent / 'model.py'}:make", "--out", out, "--overwrite")
    for given in (["sanity", "--data", photos], ["explain", photos]):
        run = sufficit(*given, *model)
        assert run.code == 2
        assert "holds a run of sufficit compare: choose another --out" in run.err


@pytest.mark.usefixtures("undrawn")
def test_a_run_is_repeated_from_its_file_and_flags_override_it(sufficit, photos: Path) -> None:
    first = sufficit(*words(photos, "--checks", "none", "--seed", 3))
    assert first.code == 0, first.err
    folder = photos.parent
    repeat = ["compare", "--config", folder / "out" / "RUN.toml"]
    run = sufficit(*repeat, "--out", folder / "again", "--json")
    assert run.code == 0, run.err
    printed = json.loads(run.out)
    frames = [rows(folder / name, "layercam") for name in ("out", "again")]
    pandas.testing.assert_frame_equal(*frames, check_exact=True)
    assert (folder / "again" / "RUN.toml").read_text() == (folder / "out" / "RUN.toml").read_text()
    assert printed["columns"]["layercam"]["msi"]["mean"] == frames[0]["msi"].mean()
    assert printed["standing"]["chance"]["seed"] == 3
    other = sufficit(*repeat, "--methods", "kpca-cam", "--seed", 1, "--out", folder / "other")
    assert other.code == 0, other.err
    stored = read_toml(folder / "other" / "RUN.toml")
    assert (stored["methods"], stored["seed"], stored["checks"]) == (("kpca-cam",), 1, ("none",))


@pytest.mark.usefixtures("undrawn")
def test_adapters_are_named_after_their_folder_and_need_names_of_their_own(
    sufficit, photos: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    adapter = Lax(6)
    from sufficit import Classifier

    adapter.belong_to(Classifier.load(f"python:{tmp_path / 'model.py'}:make"), "1")
    for name in ("my-lax", "sub/my-lax", "gradcam"):
        adapter.save_pretrained(tmp_path / name)
    two = f"{tmp_path / 'my-lax'},{tmp_path / 'sub' / 'my-lax'}"
    run = sufficit(*words(photos, "--methods", two))
    assert run.code == 2
    assert "two methods are called my-lax" in run.err
    run = sufficit(*words(photos, "--methods", tmp_path / "gradcam"))
    assert "'gradcam' is the name of another method: write NAME=" in run.err
    assert not (tmp_path / "out").exists()
    renamed = f"gradcam,{tmp_path / 'my-lax'},b={tmp_path / 'sub' / 'my-lax'}"
    assert sufficit(*words(photos, "--methods", renamed, *NO_LEAK)).code == 0
    pandas.testing.assert_frame_equal(rows(tmp_path / "out", "my-lax"), rows(tmp_path / "out", "b"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--alpha-min", "half"], "alpha_min must be a number or search, got 'half'"),
        (["--methods", "gradcam,layrcam"], "Did you mean 'layercam'?"),
        (["--methods", "lax"], "give the folder of its adapter"),
        (["--methods", ","], "no method given: name one or more of gradcam"),
        (["--methods", "run.json=gradcam"], "'run.json' is a file of every run"),
        (["--methods", "units=gradcam"], "'units' is a file of every run"),
        (["--methods", "python:absent.py:f"], "absent.py"),
        (["--images", "0"], "Invalid value for '--images'"),
        (["--targets", "labels"], "Invalid value for '--targets'"),
        (["--fills", "drop"], 'fill="drop" leaves out tokens of a ViT'),
        (["--fills", "black,drop"], "got Sequential: use another fill, such as black"),
        (["--fills", ","], "fills must name at least one fill"),
        (["--fills", "black,black"], "black"),
        (["--checks", "leek"], "Unknown check 'leek'. Did you mean 'leak'?"),
        (["--config", "absent.toml"], "cannot read absent.toml"),
        (["--images", "--quick"], "--images needs a value, got --quick: write --images VALUE"),
        (["--frobnicate"], "No such option: --frobnicate"),
        (["--fill", "blur"], "there is no option --fill: use --fills, as in --fills blur"),
        (["--no-leak"], "there is no option --no-leak: use --checks controls,fill,alpha-curve"),
        (["--held-out-fill=blur"], "no option --held-out-fill: use --checks fill"),
        (["--ceiling"], "there is no option --ceiling: use --checks default,ceiling"),
        (["--donors", "3"], "write `donors = VALUE` into a file RUN.toml, and pass --config"),
        (["--no-save-heatmaps"], "write `save_heatmaps = VALUE` into a file RUN.toml"),
    ],
)
def test_wrong_arguments_are_one_error_and_leave_no_folder(
    sufficit, photos: Path, given: list[str], message: str
) -> None:
    run = sufficit(*words(photos, *given))
    assert run.code == 2
    assert message in run.err
    assert "Traceback" not in run.err
    assert not (photos.parent / "out").exists()


TOKENS = """
import torch
from timm.models.vision_transformer import VisionTransformer
from sufficit import Classifier, View

def make():
    torch.manual_seed(0)
    sizes = dict(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=3)
    model = VisionTransformer(**sizes, reg_tokens=2).eval()
    for weights in model.parameters():
        weights.data += 0.2 * torch.randn(weights.shape)
    return Classifier(model, classes=["ant", "bee", "cat"], view=View((16, 16)))
"""


def test_a_vit_is_scored_without_its_hidden_tokens(sufficit, photos: Path) -> None:
    (photos.parent / "model.py").write_text(TOKENS)
    file = photos.parent / "own.toml"
    file.write_text('donors = 3\ncompile = "on"\nfills = ["drop"]\n')
    run = sufficit(*words(photos, "--config", file, "--score", "confidence"))
    assert run.code == 0, run.err
    out = photos.parent / "out"
    classifier = Classifier.load(f"python:{photos.parent / 'model.py'}:make")
    files = [photos / name for name in rows(out, "gradcam")["image"]]
    images = torch.stack([read_image(file, classifier.view) for file in files])
    labels = torch.tensor([CLASSES.index(file.parent.name) for file in files])
    for method in ("gradcam", "center"):
        found = rows(out, method)
        maps = explain(classifier, images, labels, method=method)
        options = {"score": "confidence", "fill": "drop", "held_out_fill": "blur", **STEPS}
        expected = evaluate(classifier, images, maps, labels, **options)
        leaked = leak(classifier, images, maps, labels, donors=3, fill="drop")
        for name, values in {**expected.columns, **leaked.columns}.items():
            assert found[name].to_numpy() == pytest.approx(values.numpy(), abs=1e-5), name
    black = evaluate(classifier, images, maps, labels, score="confidence", **STEPS)
    assert (black.msi - expected.msi).abs().max() > 1e-3
    assert "drop" in (out / "report.html").read_text()


def test_what_is_missing_is_asked_for(sufficit, photos: Path, tmp_path: Path) -> None:
    run = sufficit("compare", "--data", photos, "--out", tmp_path / "out")
    assert run.code == 2
    assert "no model given: pass --model or set it in --config RUN.toml" in run.err
    (tmp_path / "empty").mkdir()
    run = sufficit(*words(photos, "--data", tmp_path / "empty"))
    assert "no images in" in run.err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["--layer", "4"],
            "a feature layer must give a grid, [N,K,h,w] or tokens [N,T,K], layer '4' gives"
            " [11, 3]: name an earlier layer, leave the layer out to have one found, or",
        ),
        (["--fills", "nothere.jpg"], "Unknown fill 'nothere.jpg'"),
        (["--twin", "PHOTOS"], "is none: give the folder that sufficit train-twin wrote"),
        (["--model", "PHOTOS"], "a saved classifier must have classifier.json, PHOTOS has none:"),
        (
            ["--config", "NUMBER.toml"],
            "the option num_classes (--num-classes) goes to MODEL.py:make, which takes ():"
            " leave it out, or give the function this argument",
        ),
    ],
)
def test_what_was_wanted_what_came_and_what_to_do_is_said(
    sufficit, photos: Path, more: list[str], said: str
) -> None:
    named = {"PHOTOS": str(photos), "MODEL.py": str(photos.parent / "model.py")}
    named["NUMBER.toml"] = str(photos.parent / "number.toml")
    Path(named["NUMBER.toml"]).write_text("num_classes = 3\n")
    for word, path in named.items():
        more, said = [one.replace(word, path) for one in more], said.replace(word, path)
    run = sufficit(*words(photos, *more))
    assert run.code == 2
    assert said in " ".join(run.err.split())
    assert "Traceback" not in run.err


@pytest.mark.slow
@pytest.mark.parametrize("n", [6, 30])
def test_a_sheet_says_why_an_image_was_chosen_if_not_all_are_shown(
    n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_small(
        config_for(write_photos(tmp_path, n), checks=["controls"]), tmp_path / "out"
    )
    drawn: list[list[str]] = []
    real = plots.sheet_figure

    def seen(images, maps, titles, *more, **named):
        drawn.append(list(titles))
        return real(images, maps, titles, *more, **named)

    monkeypatch.setattr(plots, "sheet_figure", seen)
    write_pictures(results, tmp_path)
    names, reasons = results.shown.names, results.shown.reasons
    assert "best" in reasons
    said = [f"\n{reason}" if n == 30 else "" for reason in reasons]
    pairs = zip(names, said, strict=True)
    assert drawn == [[f"{name}\n{name.partition('/')[0]}{why}" for name, why in pairs]]
    assert len(names) == min(n, 24)


@pytest.mark.usefixtures("undrawn")
def test_skipped_images_are_named_at_most_ten_times(sufficit, photos: Path) -> None:
    for k in range(12):
        (photos / "ant" / f"broken-{k:02d}.png").write_bytes(b"")
    run = sufficit(*words(photos, *NO_LEAK))
    assert run.code == 0, run.err
    assert run.err.count("the file is empty") == 10
    assert "12 images skipped; run.json names all of them." in run.err


def test_a_comparison_without_msi_prints_means_and_has_no_report(sufficit, photos: Path) -> None:
    run = sufficit(*words(photos, *NO_LEAK, "--columns", "insertion_pixel", "--json"))
    assert run.code == 0, run.err
    assert json.loads(run.out)["standing"] is None
    run = sufficit(*words(photos, *NO_LEAK, "--columns", "insertion_pixel", "--overwrite"))
    assert run.code == 0, run.err
    assert "No report, which shows MSI" in run.words
    means = rows(photos.parent / "out", "gradcam")["insertion_pixel"]
    assert f"{means.mean():.3f}".rstrip("0") in run.words


def test_a_comparison_by_msi_alone_is_reported(sufficit, photos: Path) -> None:
    run = sufficit(*words(photos, *NO_LEAK, "--columns", "msi"))
    assert run.code == 0, run.err
    assert run.words.startswith("These scores mean nothing yet: the model is right on only 27%")
    assert (photos.parent / "out" / "report.html").exists()


@pytest.mark.parametrize(
    ("asked", "inside", "said"),
    [
        ("demo", "cli.demo.run_photos", "the demo keeps nothing. Run it again."),
        ("sanity --model sufficit:digits --data .", "sanity.check_folder", "a check keeps nothing"),
        (
            "train-lax --model sufficit:digits --data . --device cpu",
            "training.processes.fabric_for",
            "no epoch is finished yet. Run the same command again to start.",
        ),
        (
            "compare --model sufficit:digits --data .",
            "cli.compare.write_pictures",
            "the figures are not. Run the same command again, or only `sufficit report",
        ),
        (
            "explain . --model sufficit:digits",
            "runs.overlays.explain_unit",
            "0 of 6 images are done",
        ),
    ],
)
def test_every_long_command_says_after_ctrl_c_what_is_kept(
    sufficit, digits: Path, monkeypatch: pytest.MonkeyPatch, asked: str, inside: str, said: str
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    words = asked.replace(" . ", f" {digits} ").removesuffix(".")
    words = f"{words}{digits}" if asked.endswith(".") else words
    more = FLAGS if "compare" in asked else ()
    with monkeypatch.context() as patched:
        patched.setattr(f"sufficit.{inside}", stop)
        run = sufficit(*words.split(), "--out", digits.parent / "out", *more)
    assert run.code == 130, run.err
    assert f"Interrupted: {said}" in run.err or said in run.err
    assert "Traceback" not in run.err
    assert not (digits.parent / "out" / ".lock").exists()


@pytest.mark.usefixtures("undrawn")
def test_after_ctrl_c_the_command_says_what_is_kept(
    photos: Path, sufficit, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, done = Store.write, []

    def write(self: Store, rows: Rows, kind: str = UNIT) -> None:
        if kind == UNIT and done:
            raise KeyboardInterrupt
        done.extend([kind] * (kind == UNIT))
        whole(self, rows, kind)

    asked = words(photos, "--unit-size", "4")
    with monkeypatch.context() as patched:
        patched.setattr(Store, "write", write)
        ran = sufficit(*asked)
    assert ran.code == 130
    assert "Interrupted: 4 of 11 images are done and kept. Run the same command again" in ran.err
    again = sufficit(*asked)
    assert again.code == 0, again.err


@pytest.mark.usefixtures("undrawn")
def test_a_first_look_that_asks_all_masks_after_all_keeps_every_curve(
    sufficit, photos: Path
) -> None:
    run = sufficit(*words(photos, "--quick"))  # its 26 masks are more than there are
    assert run.code == 0, run.err
    out = photos.parent / "out"
    curves = pandas.read_parquet(out / "gradcam" / "curves.parquet")
    assert len(curves) == 11
    whole = sufficit(*words(photos, "--checks", "none", "--out", photos.parent / "whole"))
    assert whole.code == 0, whole.err
    other = pandas.read_parquet(photos.parent / "whole" / "gradcam" / "curves.parquet")
    pandas.testing.assert_frame_equal(curves, other)


@pytest.mark.usefixtures("undrawn")
def test_an_adapter_is_drawn_for_a_random_output_layer_too(sufficit, digits: Path) -> None:
    out = digits.parent / "out"
    model = ("--model", "sufficit:digits", "--data", digits, "--out", out)
    methods = ("--methods", "sufficit:digits,gradcam", "--checks", "head")
    run = sufficit("compare", *model, *methods, *FLAGS)
    assert run.code == 0, run.err
    found = rows(out, "lax")["random_head"]
    assert found.tolist() == pytest.approx([1.0] * 6), "it reads features, not the output"
    assert (rows(out, "gradcam")["random_head"] < 0.99).any()
    assert "With a random" in run.words
