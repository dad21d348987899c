"""A run resumes where it is the same run, computes what is missing, and loses nothing."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from own_model import MODEL
from small_runs import assert_same_rows, config_for, interrupted, run_small
from sufficit import Classifier, Lax, UserError
from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.images import ImageSource, list_images
from sufficit.data.manifest import Manifest
from sufficit.runs.engine import run
from sufficit.runs.job import Job, make_job
from sufficit.runs.store import FORMAT, HELD, MAPS, UNIT, UNITS, Store
from sufficit.runs.unit_rows import SKIPPED, Rows
from sufficit.sources import Maps

METHODS = ("gradcam", "layercam", "random", "center")


def same_files(one: Path, other: Path) -> bool:
    names = ("summary.json", "pairs.csv", "RUN.toml", "shown.safetensors")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_a_run_whose_end_failed_only_merges(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out = config_for(photos), tmp_path / "out"
    with monkeypatch.context() as broken:
        broken.setattr("sufficit.runs.table.write_toml", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_small(config, out)
    with monkeypatch.context() as asked:
        asked.setattr("sufficit.runs.engine.score_unit", lambda *_: pytest.fail("computed again"))
        run_small(config, out)
    run_small(config, tmp_path / "whole")
    assert_same_rows(tmp_path / "whole", out, METHODS)
    assert same_files(tmp_path / "whole", out)


def refused(config: Any, out: Path, words: str, **more: Any) -> None:
    with pytest.raises(UserError, match=rf"^Cannot resume .*{words}"):
        run_small(config, out, **more)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"alpha_min": 0.4}, r"`alpha_min` was 0\.5, now 0\.4\. Use another --out for a new run"),
        ({"seed": 1}, "`seed` was 0, now 1"),
        ({"methods": ["gradcam"]}, "`methods` was"),
        ({"methods": ["layercam", "gradcam"]}, None),
        ({"checks": ["fill", "leak", "alpha-curve"]}, r"`checks` was \['default'\], now"),
        ({"fills": ["mean"]}, r"`fills` was \['black'\], now \['mean'\]"),
        ({"columns": ["msi"]}, r"`columns` was None, now \['msi'\]"),
        ({"layer": "0"}, "`layer` was '1', now '0'"),
        ({"size": "8x8"}, "`size` was None, now '8x8'"),
        ({"on_error": "stop"}, "`on_error` was 'skip', now 'stop'"),
        ({"save_heatmaps": True}, None),
    ],
)
def test_other_settings_are_another_run(
    photos: Path, tmp_path: Path, change: dict[str, Any], words: str | None
) -> None:
    interrupted(lambda: run_small(config_for(photos), tmp_path / "out"))
    if words is None:
        assert run_small(config_for(photos, **change), tmp_path / "out").names
    else:
        refused(config_for(photos, **change), tmp_path / "out", words)
        assert run_small(config_for(photos), tmp_path / "out").names


def test_a_run_that_stopped_at_an_error_may_go_on_and_skip(photos: Path, tmp_path: Path) -> None:
    stopping = config_for(photos, on_error="stop", checks=["controls"])
    (photos / "cat" / "08.png").write_bytes(b"")  # in the last unit
    with pytest.raises(UserError, match=r"Cannot read cat/08\.png"):
        run_small(stopping, tmp_path / "out")
    assert len(Store(tmp_path / "out").done()) == 2
    results = run_small(replace(stopping, on_error="skip"), tmp_path / "out")
    assert results.skipped == {"cat/08.png": "the file is empty"}


def test_another_unit_size_is_another_run(photos: Path, tmp_path: Path) -> None:
    interrupted(lambda: run_small(config_for(photos), tmp_path / "out"))
    refused(config_for(photos), tmp_path / "out", "`images per unit` was 4, now 5", unit=5)


def test_another_model_is_another_run(photos: Path, tmp_path: Path) -> None:
    config, out = config_for(photos), tmp_path / "out"
    interrupted(lambda: run_small(config, out))
    (tmp_path / "model.py").write_text(MODEL.replace("manual_seed(0)", "manual_seed(1)"))
    refused(config, out, "`model` was")
    (tmp_path / "other.py").write_text(MODEL)
    moved = replace(config, model=f"python:{tmp_path / 'other.py'}:make")
    assert run_small(moved, out).names, "the weights count, not where they are"


def test_other_weights_of_an_adapter_are_another_run(photos: Path, tmp_path: Path) -> None:
    for name, seed in (("lax", 0), ("other", 1)):
        torch.manual_seed(seed)
        adapter = Lax(6)
        adapter.belong_to(Classifier.load(config_for(photos).model), "1")
        adapter.save_pretrained(tmp_path / name)
    out = tmp_path / "out"
    config = config_for(photos, methods=[str(tmp_path / "lax")], checks=["controls"])
    interrupted(lambda: run_small(config, out))
    other = config_for(photos, methods=[f"lax={tmp_path / 'other'}"], checks=["controls"])
    refused(other, out, "`methods`")
    shutil.copytree(tmp_path / "lax", tmp_path / "moved" / "lax")
    config = config_for(photos, methods=[str(tmp_path / "moved" / "lax")], checks=["controls"])
    assert run_small(config, out).names


def test_another_source_of_a_function_is_another_run(photos: Path, tmp_path: Path) -> None:
    text = "def own(model, images, targets): return images.mean(1)\n"
    (tmp_path / "mine.py").write_text(text)
    config = config_for(photos, methods=[f"python:{tmp_path / 'mine.py'}:own"], checks=["controls"])
    interrupted(lambda: run_small(config, tmp_path / "out"))
    (tmp_path / "mine.py").write_text(text.replace("mean", "amax"))
    refused(config, tmp_path / "out", "`methods` was")
    (tmp_path / "mine.py").write_text(text)
    assert run_small(config, tmp_path / "out").names


def test_other_code_of_a_model_or_beside_it_is_another_run(photos: Path, tmp_path: Path) -> None:
    beside = "def scaled(images): return images * 1.0\n"
    text = MODEL + "\nfrom beside import scaled\n\nbuilt = make\n\ndef make(): return built()\n"
    (tmp_path / "beside.py").write_text(beside)
    (tmp_path / "model.py").write_text(text)
    config, out = config_for(photos, checks=["controls"]), tmp_path / "out"
    interrupted(lambda: run_small(config, out))
    (tmp_path / "beside.py").write_text(beside.replace("1.0", "2.0"))  # the weights are the same
    refused(config, out, "`code of the model` was")
    (tmp_path / "beside.py").write_text(beside)
    (tmp_path / "model.py").write_text(text + "# more\n")
    refused(config, out, "`code of the model` was")
    (tmp_path / "model.py").write_text(text)
    assert run_small(config, out).names


def test_weights_that_are_nearly_the_same_are_another_run(photos: Path, tmp_path: Path) -> None:
    classifier, out = Classifier.load(config_for(photos).model), tmp_path / "out"
    interrupted(lambda: run_small(config_for(photos), out, classifier=classifier))
    with torch.no_grad():
        next(classifier.model.parameters()).flatten()[0].mul_(1 + 1e-6)
    refused(config_for(photos), out, "`model` was", classifier=classifier)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_other_values_in_a_heatmap_file_are_another_run(
    photos: Path, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / f"maps.{kind}"

    def write(seed: int) -> None:
        names = [image.name for image in list_images(photos)]
        maps = torch.rand(len(names), 6, 5, generator=torch.Generator().manual_seed(seed))
        named = dict(zip(names, maps, strict=True))
        if kind == "npz":
            np.savez(path, **{name: one.numpy() for name, one in named.items()})
        else:
            save_file({name: one.clone() for name, one in named.items()}, path)

    write(0)
    size = path.stat().st_size
    config = config_for(photos, methods=[str(path)], checks=["controls"])
    interrupted(lambda: run_small(config, tmp_path / "out"))
    write(1)
    assert path.stat().st_size == size
    refused(config, tmp_path / "out", "`methods` was")
    refused(replace(config, normalize="minmax"), tmp_path / "out", "`normalize` was")
    write(0)
    assert len(run_small(config, tmp_path / "out").names) == 11


def added(photos: Path) -> None:
    shutil.copy(photos / "ant" / "00.png", photos / "ant" / "0.png")


def changed(photos: Path) -> None:
    with (photos / "cat" / "08.png").open("ab") as file:
        file.write(b" ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (added, r"`image 0` was 'ant/00\.png', now 'ant/0\.png'"),
        (lambda photos: shutil.copy(photos / "ant" / "00.png", photos / "cat" / "z.png"),
         r"`number of images` was 11, now 12"),
        (lambda photos: (photos / "bee" / "04.png").unlink(), r"`image 5` was 'bee/04\.png', now"),
        (lambda photos: (photos / "cat" / "08.png").unlink(), "`number of images` was 11, now 10"),
        (changed, r"`cat/08\.png` was '\d+ bytes', now '\d+ bytes'"),
    ],
    ids=["added first", "added last", "removed", "removed last", "another size"],
)  # fmt: skip
def test_other_images_are_another_run(
    photos: Path, tmp_path: Path, change: Callable[[Path], object], words: str
) -> None:
    interrupted(lambda: run_small(config_for(photos), tmp_path / "out"))
    change(photos)
    refused(config_for(photos), tmp_path / "out", words)


def same_size(path: Path, colour: str, time: int) -> None:
    """Write an image whose file has as many bytes in any colour."""
    Image.new("RGB", (10, 12), colour).save(path, compress_level=0)
    os.utime(path, ns=(time, time))


def test_an_image_of_the_same_size_that_was_written_again_is_refused(
    photos: Path, tmp_path: Path
) -> None:
    config, out = config_for(photos, checks=["controls"]), tmp_path / "out"
    for image in (photos / "ant" / "00.png", photos / "cat" / "08.png"):  # the second is not done
        shutil.rmtree(out, ignore_errors=True)
        same_size(image, "red", 1)
        interrupted(lambda: run_small(config, out))
        same_size(image, "blue", 2)
        refused(config, out, rf"`{image.parent.name}/{image.name}` was 'written at .*', now 'writ")
        same_size(image, "red", 1)  # as it was
        assert run_small(config, out).names


def test_equal_runs_have_equal_digests_but_for_the_times_of_their_files(
    photos: Path, tmp_path: Path
) -> None:
    found = []
    for number, time in enumerate((1, 1, 2)):
        for path in photos.rglob("*.png"):
            os.utime(path, ns=(time, time))
        found.append(run_small(config_for(photos), tmp_path / str(number)).record.run)
    assert found[0] == found[1] != found[2]


def test_images_that_were_moved_are_read_where_they_are_now(photos: Path, tmp_path: Path) -> None:
    config, out = config_for(photos), tmp_path / "out"
    interrupted(lambda: run_small(config, out))
    moved = tmp_path / "moved"
    photos.rename(moved)
    interrupted(lambda: run_small(replace(config, data=str(moved)), out), after=2)
    assert Manifest(Store(out).manifest)[0].image.file == str(moved / "ant" / "00.png")


def test_other_pixels_or_labels_in_memory_are_another_run(photos: Path, tmp_path: Path) -> None:
    classifier = Classifier.load(config_for(photos).model)
    images = torch.rand(6, 3, 12, 10, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])

    def go(images: torch.Tensor, labels: torch.Tensor) -> Any:
        source = ImageSource.from_tensors(images, None, labels)
        job = make_job(config_for(photos), classifier=classifier, images=source, unit=4)
        return run(job, tmp_path / "out", progress=False)

    interrupted(lambda: go(images, labels))
    with pytest.raises(UserError, match=r"^Cannot resume .*`images in memory` was"):
        go(images.flip(0), labels)
    with pytest.raises(UserError, match=r"^Cannot resume .*`label of .*` was '0', now '1'"):
        go(images, labels.flip(0) * 0 + 1)
    assert len(go(images, labels).names) == 6


def test_a_run_of_an_older_format_is_refused(photos: Path, tmp_path: Path) -> None:
    config, out = config_for(photos), tmp_path / "out"
    interrupted(lambda: run_small(config, out))
    note = out / "units" / "key.json"
    key = json.loads(note.read_text())
    for older in ({"format": FORMAT - 1}, {"format": None}):
        note.write_text(json.dumps(key | older))
        refused(config, out, "another version of Sufficit started it.*--overwrite")


def test_a_machine_may_merge_what_another_has_computed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, out, half = config_for(photos), tmp_path / "out", tmp_path / "half"
    run_small(config, tmp_path / "whole")
    other = {"device": "cuda:0", "torch": "2.11.0", "compiled": True, "versions": {}}
    usual = Job.key
    with monkeypatch.context() as broken:
        broken.setattr(Job, "key", lambda job: usual(job) | other)
        interrupted(lambda: run_small(config, half))
        broken.setattr("sufficit.runs.table.write_toml", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_small(config, out)
    refused(config, half, "`device` was 'cuda:0', now 'cpu'")
    moved = tmp_path / "moved" / "photos"
    shutil.copytree(photos, moved)
    run_small(replace(config, data=str(moved)), out)
    assert_same_rows(tmp_path / "whole", out, METHODS)


def test_a_unit_of_another_run_is_never_read(photos: Path, tmp_path: Path) -> None:
    config, out, other = config_for(photos), tmp_path / "out", tmp_path / "other"
    interrupted(lambda: run_small(config, out), after=2)
    interrupted(lambda: run_small(replace(config, fills=("mean",)), other), after=2)
    shutil.copy(Store(other).path(1), Store(out).path(1))
    words = "a run with other settings or images wrote it.*: delete it"
    with pytest.raises(UserError, match=words):
        run_small(config, out)
    Store(out).path(1).unlink()
    results = run_small(config, out)
    run_small(replace(config, fills=("mean",)), other)
    shutil.copytree(other / MAPS, out / MAPS, dirs_exist_ok=True)
    with pytest.raises(UserError, match=words):
        replace(results, shown=None).heatmaps([0], ["gradcam"])


def test_a_folder_belongs_to_one_run_at_a_time(photos: Path, tmp_path: Path) -> None:
    out, found = tmp_path / "out", list[str]()

    def second() -> None:
        for overwrite in (False, True):
            job = make_job(config_for(photos, fills=["mean"]), unit=4)
            with pytest.raises(UserError) as error:
                run(job, out, overwrite=overwrite, progress=False)
            found.append(str(error.value))

    def tick(done: float, total: float, note: str = "") -> None:
        if not found:
            thread = Thread(target=second)
            thread.start()
            thread.join()

    run(make_job(config_for(photos), unit=4), out, progress=tick)
    assert len(found) == 2
    assert all("another run is writing to" in words for words in found)
    run_small(config_for(photos), tmp_path / "alone")
    assert_same_rows(tmp_path / "alone", out, METHODS)


# Files


@pytest.mark.parametrize("content", [b"", b"no tensors", None], ids=["empty", "other", "cut"])
def test_a_corrupt_unit_is_named_and_can_be_deleted(
    photos: Path, tmp_path: Path, content: bytes | None
) -> None:
    config, out = config_for(photos), tmp_path / "out"
    run_small(config, tmp_path / "whole")
    interrupted(lambda: run_small(config, out), after=2)
    unit = Store(out).path(0)
    unit.write_bytes(unit.read_bytes()[:100] if content is None else content)
    with pytest.raises(UserError, match=r"cannot read .*unit-000000\.safetensors .*: delete it"):
        run_small(config, out)
    unit.unlink()
    run_small(config, out)
    assert_same_rows(tmp_path / "whole", out, METHODS)


def test_a_unit_file_returns_what_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "run", run="of this run")
    whole = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    maps = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0))
    rows = Rows(
        7,
        names=("名\udcff", "b/c.png"),
        numbers=(14, 15),
        targets=torch.tensor([2, 0]),
        shape=(3, 12, 10),
        notes={SKIPPED: {"d.png": "the file is empty"}},
        remark="its rows sum to 1",
        values={"a/b": {"msi": whole[:, 0], "srg@1": whole[:, 1]}},  # shared memory
        curves={"a/b": {"insertion": whole}},
        answers={"a/b": {"named": whole > 2}},
        maps={
            "a/b": Maps(maps, final=False, columns={"passes": whole[:, 2]}),
            "random": Maps(maps, final=True),
        },
    )
    store.write(rows)
    assert store.done() == {7}
    assert store.done(HELD) == set()
    found = store.read(7, answers=True)
    for name in ("unit", "names", "numbers", "shape", "notes", "remark"):
        assert getattr(found, name) == getattr(rows, name), name
    assert torch.equal(found.targets, rows.targets)
    for part in ("values", "curves", "answers"):
        written, read = getattr(rows, part)["a/b"], getattr(found, part)["a/b"]
        assert list(written) == list(read)
        assert all(torch.equal(written[name], read[name]) for name in written), part
    assert store.read(7).answers == {}
    kept = store.read_maps(7)
    assert (kept.names, kept.numbers, tuple(kept.shape)) == (rows.names, rows.numbers, rows.shape)
    assert list(kept.maps) == ["a/b"], "controls are drawn again"
    assert torch.equal(kept.maps["a/b"].maps, maps)
    assert not kept.maps["a/b"].final
    assert torch.equal(kept.maps["a/b"].columns["passes"], whole[:, 2])
    with pytest.raises(UserError, match="a run with other settings or images wrote it"):
        replace(store, run="of another").read(7)


def test_a_unit_whose_maps_cannot_be_written_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "run")
    monkeypatch.setattr(Store, "write_maps", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.write(Rows(7))
    assert store.done() == set()


def test_the_state_of_a_run_says_how_far_it_is(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError, match="holds no run: give the --out of one"):
        Store(out).state()
    interrupted(lambda: run_small(config_for(photos), out), after=2)
    state = Store(out).state()
    assert (state.done, state.units, state.failed) == (2, 3, [])
    assert (state.done_images, state.images) == (8, 11)


def test_an_error_before_the_first_unit_leaves_no_folder(photos: Path, tmp_path: Path) -> None:
    (photos / "ant" / "00.png").write_bytes(b"")
    for out in (tmp_path / "new", tmp_path / "mine"):
        if out.name == "mine":
            out.mkdir()
            (out / "notes.txt").write_text("mine")
        with pytest.raises(UserError, match="Cannot read"):
            run_small(config_for(photos, on_error="stop"), out)
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(("images", "unit"), [(1, 1), (8, 1), (11, 2), (255, 32), (300, 32)])
def test_short_runs_have_units_too(
    photos: Path, images: int, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = torch.zeros(images, 3, 4, 4)
    source = ImageSource.from_tensors(pixels)
    assert make_job(config_for(photos), images=source).entries.unit == 32  # a run of seconds
    monkeypatch.setattr("sufficit.runs.job.LONG", 1)
    job = make_job(config_for(photos), images=source)
    assert (job.entries.unit, len(job.entries)) == (unit, images)
    assert job.entries[images - 1].number == images - 1


def test_overwriting_removes_the_earlier_run_and_nothing_else(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_small(config_for(photos, save_heatmaps=True), out)
    mine = [out / "notes.txt", out / "gradcam" / "notes.txt", out / "mine" / "heatmaps.npz"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    job = make_job(config_for(photos, methods=["kpca-cam"], checks=["none"]), unit=4)
    interrupted(lambda: run(job, out, overwrite=True, progress=False))
    assert [path.read_text() for path in mine] == ["mine"] * 3
    left = {path.name for path in out.iterdir()}
    assert left == {"notes.txt", "gradcam", "mine", UNITS, MAPS}
    assert [path.name for path in (out / "gradcam").iterdir()] == ["notes.txt"]
    assert run(job, out, progress=False).methods == ("kpca-cam",)


# Data that vanishes


@pytest.mark.parametrize(("units", "empty"), [(1, False), (1, True), (2, False)])
def test_a_run_whose_images_vanish_stops_and_resumes(
    photos: Path, tmp_path: Path, units: int, empty: bool
) -> None:
    config, out, away = config_for(photos, checks=["controls"]), tmp_path / "out", tmp_path / "away"
    run_small(config, tmp_path / "whole", unit=2)
    whole = Store.write

    def write(self: Store, rows: Rows, kind: str = UNIT) -> None:
        whole(self, rows, kind)
        if len(self.done()) == units:
            photos.rename(away)
            if empty:
                photos.mkdir()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Store, "write", write)
        with pytest.raises(UserError, match=r"photos can't be read any more \(.*same command"):
            run_small(config, out, unit=2)
    if empty:
        photos.rmdir()
    away.rename(photos)
    results = run_small(config, out, unit=2)
    assert not results.skipped
    assert_same_rows(tmp_path / "whole", out, METHODS)


def test_images_per_unit_come_from_the_config_or_the_caller(photos: Path) -> None:
    config, images = config_for(photos, unit_size=4), len(list_images(photos))
    job = make_job(config)
    assert [len(unit) for unit in [*job.units][:-1]] == [4] * ((images - 1) // 4)
    assert sum(len(unit) for unit in job.units) == images
    assert job.key()["images per unit"] == 4
    assert make_job(config, unit=3).config.unit_size == 3  # what RUN.toml will say


def test_a_run_of_half_a_minute_has_eight_units_and_a_shorter_one_is_one(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, images = config_for(photos), len(list_images(photos))
    job = make_job(config)
    assert [len(unit) for unit in job.units] == [images]
    weights = sum(one.numel() for one in job.classifier.bare.parameters())
    work = job.calls * weights
    monkeypatch.setattr("sufficit.runs.job.LONG", work + 1)
    assert len(make_job(config).units) == 1
    monkeypatch.setattr("sufficit.runs.job.LONG", work)
    assert {len(unit) for unit in [*make_job(config).units][:-1]} == {-(-images // 8)}
    assert len(make_job(config, unit=32).units) == 1, "as it was asked for"


def test_a_run_deletes_neither_the_heatmaps_it_scores_nor_a_run_inside_its_folder(
    photos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    maps = {image.name: torch.rand(12, 10) for image in list_images(photos)}
    out.mkdir()
    write_heatmaps(out / "heatmaps.npz", maps)
    mine = (out / "heatmaps.npz").read_bytes()
    config = config_for(photos, methods=[str(out / "heatmaps.npz")], checks=["none"])
    for overwrite in (False, True):
        run(make_job(config, unit=4), out, overwrite=overwrite, progress=False)
        assert (out / "heatmaps.npz").read_bytes() == mine
    run_small(config, out / "inner")
    inner = {path: path.read_bytes() for path in (out / "inner").rglob("*.*") if path.is_file()}
    assert "scores.parquet" in {path.name for path in inner}
    around = make_job(config_for(photos, methods=["gradcam"], checks=["none"]), unit=4)
    run(around, out, overwrite=True, progress=False)
    assert {path: path.read_bytes() for path in inner} == inner
