"""Images are scored as they are found, and a run that is gone on with must meet the same ones."""

import io
import math
import os
import sys
import tarfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from sufficit.compare import compare_folder
from sufficit.comparing import groups as comparing_groups
from sufficit.comparing.finished import read_finished
from sufficit.comparing.settings import Settings, settings_from
from sufficit.keeping import Parts
from sufficit.pairing import Pairs
from sufficit.scored import Options
from sufficit.sharing import Passage, dealt
from torch import nn

from own_model import MODEL
from sufficit import Classifier, UserError, evaluate, scoring
from sufficit.crews import Crew
from sufficit.data import images as sources
from sufficit.data.heatmap_files import HeatmapFile
from sufficit.data.images import (
    BadImageError,
    ImageFile,
    ImageSource,
    classes_of,
    list_images,
    open_images,
)
from sufficit.data.loader import (
    PREDICTIONS,
    Entry,
    ImageLoader,
    Item,
    Unit,
    count_soon,
    labels_for,
    named,
    units_of,
)
from sufficit.metrics.scores import read
from sufficit.perturbation.types import NO_CLASS
from sufficit.progress import bar
from sufficit.report import MethodScores
from sufficit.report.interpretation import reading
from sufficit.results import save_scores

NAMES = ["ant", "bee", "cat"]
FAST = {"value_step": 0.25, "percent_step": 0.25, "donors": 3, "device": "cpu"}


class StoppedError(Exception):
    """The run was stopped from outside."""


def png(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "png")
    return written.getvalue()


def write_shard(path: Path, labels: Sequence[str | None]) -> Path:
    """A sample for each label, those with None without."""
    with tarfile.open(path, "w") as shard:
        for number, label in enumerate(labels):
            files = {"png": png(number)} | ({} if label is None else {"cls": label.encode()})
            for kind, content in files.items():
                facts = tarfile.TarInfo(f"{number:03d}.{kind}")
                facts.size = len(content)
                shard.addfile(facts, io.BytesIO(content))
    return path


def classifier(classes: list[str] | None = None, count: int = 3) -> Classifier:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, count, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Classifier(model, classes=classes)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six small pictures in class folders, named 10, 11, ..., and a model."""
    (tmp_path / "model.py").write_text(MODEL)
    for i in range(6):
        path = tmp_path / "photos" / ("ant", "bee")[i // 3] / f"{10 + i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(i))
    return tmp_path / "photos"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long is left out."""
    for slow in ("_save_sheet", "write_report", "figures.save"):
        monkeypatch.setattr(f"sufficit.comparing.saving.{slow}", lambda *_: None)


def wanted(photos: Path, **more: Any) -> Settings:
    usual = {"model": f"python:{photos.parent / 'model.py'}:make", "data": str(photos)}
    return settings_from({**usual, **FAST, "methods": ["gradcam"], "controls": False, **more})


@contextmanager
def stopping(monkeypatch: pytest.MonkeyPatch, stage: str, number: int) -> Iterator[None]:
    """The run inside stops before it has written this part."""
    whole = Parts.write

    def write(self: Parts, what: str, group: int, *rest: Any) -> None:
        if (what, group) == (stage, number):
            raise StoppedError
        whole(self, what, group, *rest)

    with monkeypatch.context() as stopped:
        stopped.setattr(Parts, "write", write)
        with pytest.raises(StoppedError):
            yield


def rows(out: Path) -> pandas.DataFrame:
    return pandas.read_parquet(out / "gradcam" / "scores.parquet")


# Found as they are asked for


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pictures that have been found so far, in every way through the stream."""
    found: list[str] = []

    def walk(stream: ImageSource) -> Iterator[ImageFile]:
        for picture in stream.walk():
            found.append(picture.name)
            yield picture

    monkeypatch.setattr(ImageSource, "__iter__", walk)
    return found


@pytest.mark.parametrize("shards", [False, True], ids=["folder", "shards"])
def test_the_first_images_are_scored_before_the_others_are_found(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: bool
) -> None:
    data = write_shard(tmp_path / "a.tar", ["ant"] * 9 + ["bee"] * 9) if shards else photos
    settings = wanted(photos, data=str(data), leak=False)
    found, before, whole = watched(monkeypatch), [], comparing_groups._score_group

    def score(*given: Any) -> None:
        before.append(len(found))
        whole(*given)

    monkeypatch.setattr(comparing_groups, "_score_group", score)
    monkeypatch.setattr(comparing_groups, "count_soon", lambda _: math.inf)
    compare_folder(settings, tmp_path / "out", group=1)
    # One for the run's identity, one for the first label; then the first group and that read ahead.
    first = 3 + shards
    assert before[:-1] == [*range(first, first + len(before) - 1)]


@pytest.mark.parametrize("shards", [False, True], ids=["folder", "shards"])
def test_evaluate_scores_the_first_images_before_the_others_are_found(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: bool
) -> None:
    data = write_shard(tmp_path / "a.tar", ["0"] * 9) if shards else photos
    names = [picture.name for picture in list_images(data)]
    np.savez(tmp_path / "maps.npz", **dict.fromkeys(names, np.eye(12, 10)))
    found, before, whole = watched(monkeypatch), [], scoring.ask

    def ask(*given: Any, **more: Any) -> Any:
        before.append(len(found))
        return whole(*given, **more)

    monkeypatch.setattr(scoring, "ask", ask)
    monkeypatch.setattr(scoring, "count_soon", lambda _: math.inf)
    monkeypatch.setattr(scoring, "UNIT", 1)
    options = Options(value_step=0.5, percent_step=0.5, targets="label", progress=False)
    got = scoring.score_folder(
        classifier(["ant", "bee", "cat"]), data, tmp_path / "maps.npz", options
    )
    assert before[:2] == [4 + shards, 5 + shards]  # one more to see that there are heatmaps
    assert got is not None
    assert got.names == tuple(names)


def test_pictures_of_a_group_are_read_at_once_and_stay_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sufficit.data.loader.THREADS", 2)
    later = Event()

    def read(entry: Entry) -> Item:
        if entry.number == 0:
            assert later.wait(60)  # the next one is read meanwhile
        later.set()
        if entry.number in (1, 3):
            raise BadImageError("it is bad")
        return Item(entry, torch.zeros(1, 2, 2))

    reader = ImageLoader(read)
    entries = [
        Entry(number, ImageFile(f"{number}.png", f"{number}.png", None)) for number in range(5)
    ]
    assert [item.entry.number for item in reader.items(entries)] == [0, 2, 4]
    assert [one.name for one in reader.skipped] == ["1.png", "3.png"]


@pytest.mark.parametrize(("ready", "wanted"), [(True, [8, 1, 1, 1, 1]), (False, [8, 1, 2, 4, 8])])
def test_reading_ahead_takes_more_threads_only_where_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, ready: bool, wanted: list[int]
) -> None:
    found = list[int]()

    class Pool:
        """Reads at once, and says whether it was done when it was asked."""

        def __init__(self, threads: int) -> None:
            assert threads == 1  # it reads in the background; `items` has threads of its own

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None: ...

        def submit(self, read: Any, entries: Any, threads: int) -> Any:
            found.append(threads)
            return SimpleNamespace(done=lambda: ready, result=lambda: entries)

    monkeypatch.setattr("sufficit.data.loader.THREADS", 8)
    monkeypatch.setattr("sufficit.data.loader.ThreadPoolExecutor", Pool)
    groups = [Unit(number, ()) for number in range(5)]
    read = [group.number for group, _ in ImageLoader(lambda _: None).ahead(groups)]
    assert read == [0, 1, 2, 3, 4]
    assert found == wanted


def test_classes_are_known_without_listing_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["b/1.png", "b/2.png", "a/deep/3.png", "c!/4.jpg", "empty/notes.txt", "5.txt"]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"x")
    (tmp_path / "in" / "a" / "round").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "again").symlink_to(tmp_path / "in" / "b")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "6.png").write_bytes(b"x")
    for name in ("linked", "linked twice"):
        (tmp_path / "in" / name).symlink_to(tmp_path / "elsewhere")
    stream = open_images(tmp_path / "in")
    assert stream.classes is not None
    assert stream.classes() == classes_of(list(stream))
    assert stream.classes().folders == ("a", "b", "c!", "linked")
    for name in ("z.png", "loose.png"):
        (tmp_path / "in" / name).write_bytes(b"x")
    loose = stream.classes()
    assert loose == classes_of(list(stream))
    assert (loose.loose, loose.first_loose) == (2, "loose.png")
    listed: list[str] = []
    whole = sources._Search._listed
    monkeypatch.setattr(
        sources._Search, "_listed", lambda self, f: listed.append(f) or whole(self, f)
    )
    stream.classes()
    assert listed == [str(tmp_path / "in")]


def test_a_folder_that_can_not_be_opened_is_told_once_however_often_it_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/1.png", "shut/2.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"x")
    whole = os.scandir

    def scandir(folder: str) -> Any:
        if str(folder).endswith("shut"):
            raise PermissionError(13, "Permission denied")
        return whole(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        stream = open_images(tmp_path)
        assert [[p.name for p in stream] for _ in range(2)] == [["a/1.png"]] * 2
    assert len(said) == 1
    assert "shut can't be opened" in str(said[0].message)


def test_pictures_are_found_by_name_and_counted_for_a_while() -> None:
    pictures = [ImageFile(f"/x/{n}.png", f"{n}.png", None) for n in range(5)]
    walked = []

    def walk() -> Iterator[ImageFile]:
        for picture in pictures:
            walked.append(picture.name)
            yield picture

    found = named(ImageSource(walk), ["2.png", "1.png"])
    assert {name: entry.number for name, entry in found.items()} == {"1.png": 1, "2.png": 2}
    assert walked == ["0.png", "1.png", "2.png"]
    assert named(ImageSource(walk), ["9.png"]) == {}
    assert count_soon(ImageSource.of(pictures)) == 5
    walked.clear()
    assert count_soon(ImageSource(walk), patience=-1) == math.inf
    assert walked == ["0.png"]


def test_a_bar_without_a_total_counts(capfd: pytest.CaptureFixture[str]) -> None:
    with bar("images", wanted=True) as tick:
        assert tick is not None
        tick(7, math.inf)
    assert "7/?" in capfd.readouterr().err


# Labels that only each picture tells


@pytest.mark.parametrize(
    ("words", "classes", "numbers"),
    [
        (["cat", "ant", "cat"], NAMES, [2, 0, 2]),
        (["2", "0"], NAMES, [2, 0]),
        (["2", "0"], None, [2, 0]),
        (["c", "a", "b"], None, [2, 0, 1]),  # in order, as there are as many as classes
    ],
)
def test_labels_of_shards_are_numbered_as_they_come(
    tmp_path: Path, words: list[str], classes: list[str] | None, numbers: list[int]
) -> None:
    stream = open_images(write_shard(tmp_path / "a.tar", words))
    labels = labels_for(classifier(classes), stream, "auto")
    assert labels.kind == "label"
    assert [labels.number(picture) for picture in stream] == numbers


@pytest.mark.parametrize(
    ("words", "classes", "error"),
    [
        (["ant", None], NAMES, r"001\.png has no label, and images before it have"),
        ([None, "ant"], NAMES, r"001\.png has a label \('ant'\), and images before"),
        (["ant", "dog"], NAMES, r"first 'dog'\) do not fit the model's 3 classes"),
        (["0", "7"], None, r"first '0'\) do not fit the model's 3 classes"),
        (["1", "0"], ["ant", "1", "2"], None),
        (["2", "0"], ["ant", "2", "1"], r"the label '0', and images before it have '2'"),
    ],
)
def test_a_label_that_does_not_fit_those_before_is_refused(
    tmp_path: Path, words: list[str | None], classes: list[str] | None, error: str | None
) -> None:
    stream = open_images(write_shard(tmp_path / "a.tar", words))
    labels = labels_for(classifier(classes), stream, "auto")
    if error is None:
        assert [labels.number(picture) for picture in stream] == [1, 0]
        return
    labels.number(next(iter(stream)))
    with pytest.raises(UserError, match=error):
        list(units_of(stream, labels, 2))


def test_predictions_ask_for_no_label_and_labels_for_one(tmp_path: Path) -> None:
    stream = open_images(write_shard(tmp_path / "a.tar", [None, "ant"]))
    assert labels_for(classifier(), stream, "prediction") is PREDICTIONS
    (group,) = units_of(stream, PREDICTIONS, 2)
    assert [entry.label for entry in group.entries] == [None, None]
    with pytest.raises(UserError, match="--targets label needs class folders"):
        labels_for(classifier(), stream, "label")


# Gone on with


def test_images_that_come_behind_what_is_done_are_scored_too(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stopping(monkeypatch, "scores", 2):
        compare_folder(wanted(photos), tmp_path / "out", group=2)
    (photos / "bee" / "19.png").write_bytes(png(9))
    for out in ("out", "whole"):
        compare_folder(wanted(photos), tmp_path / out, group=2)
    pandas.testing.assert_frame_equal(rows(tmp_path / "out"), rows(tmp_path / "whole"))
    assert rows(tmp_path / "out")["image"].tolist()[-1] == "bee/19.png"


@pytest.mark.parametrize(
    ("come", "gone", "error"),
    [
        ("ant/105.png", "none", r"images up to ant/11\.png are no longer the same"),
        (None, "ant/11.png", r"images up to bee/13\.png are no longer the same"),
        (None, "bee/*", "there were more images than the 3 now"),
    ],
)
def test_a_run_does_not_go_on_where_images_that_were_scored_have_moved(
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    come: str | None,
    gone: str,
    error: str,
) -> None:
    with stopping(monkeypatch, "leak", 0):
        compare_folder(wanted(photos), tmp_path / "out", group=3)
    if come:
        (photos / come).write_bytes(png(9))
    for path in photos.glob(gone):
        path.unlink()
    with pytest.raises(UserError, match=rf"out holds part of another run: .*{error}.*--overwrite"):
        compare_folder(wanted(photos), tmp_path / "out", group=3)


def test_the_leak_goes_on_with_the_images_it_was_begun_with_alone(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stopping(monkeypatch, "leak", 1):
        compare_folder(wanted(photos), tmp_path / "out", group=2)
    (photos / "bee" / "19.png").write_bytes(png(9))
    with pytest.raises(UserError, match="images have come or gone since the leak was first"):
        compare_folder(wanted(photos), tmp_path / "out", group=2)


def test_what_is_all_scored_takes_no_more_images(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(ImportError):
            compare_folder(wanted(photos), tmp_path / "out", group=2)
    (photos / "bee" / "19.png").write_bytes(png(9))
    with pytest.raises(UserError, match=r"bee/19\.png was not there when it was scored"):
        compare_folder(wanted(photos), tmp_path / "out", group=2)


# Several processes


def test_groups_are_dealt_out_in_turn_but_for_those_that_are_done() -> None:
    pictures = [ImageFile(f"/x/{n}.png", f"{n}.png", None) for n in range(15)]
    groups = list(units_of(ImageSource.of(pictures), PREDICTIONS, 2))
    assert [len(group) for group in groups] == [2] * 7 + [1]
    shares = [[g.number for g in dealt(groups, {1}, Crew(rank, 2))] for rank in range(2)]
    assert shares == [[0, 3, 5, 7], [2, 4, 6]]


def test_a_key_that_fits_two_images_is_refused_by_processes_that_read_neither(
    tmp_path: Path,
) -> None:
    pictures = [ImageFile(f"/x/{name}", name, None) for name in ("a/1.png", "b/1.png")]
    np.savez(tmp_path / "maps.npz", **{"1.png": np.ones((2, 2))})
    with HeatmapFile(tmp_path / "maps.npz") as maps:
        pairs = Pairs(None, maps, normalize=False)
        job = scoring._Job(classifier(), ImageSource.of(pictures), PREDICTIONS, pairs, Options())
        with pytest.raises(UserError, match=r"'1\.png' .* fits 2 images"):
            list(dealt(job.groups(), (), Crew(5, 9)))


def test_processes_that_find_other_images_are_refused_at_the_end(tmp_path: Path) -> None:
    ended: dict[int, str] = {}

    def work(crew: Crew) -> None:
        names = ["a", "b", "c" if crew.first else "d"]
        stream = ImageSource.of([ImageFile(f"/x/{name}", name, None) for name in names])
        passage = Passage(Parts(tmp_path), ())
        try:
            with crew.meet(tmp_path), crew.stage("scores", None, 0, 0):
                shares = dealt(passage.watch(units_of(stream, PREDICTIONS, 1)), (), crew)
                ended[crew.rank] = str([group.number for group in shares])
                passage.check(crew)
        except UserError as error:
            ended[crew.rank] += str(error)

    threads = [Thread(target=work, args=(Crew(rank, 2, "now"),)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert "all processes must see the same, but names of images is" in ended[1]
    assert ended[0].startswith("[0, 2]process 1 has stopped: all processes must see the same")


# Results of more images than memory would hold


def in_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("sufficit.perturbation.types.PIECE", size)


def test_what_is_made_of_answers_in_pieces_is_what_is_made_of_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    images, heatmaps = (torch.rand(7, *s, 12, 10, generator=generator) for s in ((3,), ()))
    options = {"alpha_min": "search", "value_step": 0.25, "percent_step": 0.25}
    whole = evaluate(classifier(), images, heatmaps, held_out_fill="mean", **options)
    named = whole.answers.named.clone()
    named[4, 3] = NO_CLASS
    answers = replace(whole.answers, named=named)
    once = read(answers, whole.plan, whole.held_out)
    means = {name: curve.accuracy.nanmean(0) for name, curve in once.curves().items()}
    words = reading("m", MethodScores.of(once))
    for place, size in (("once", 99), ("pieces", 3)):
        in_pieces(monkeypatch, size)
        (tmp_path / place).mkdir()
        save_scores(tmp_path / place, once, [f"{k}.png" for k in range(7)])
    assert [len(some.targets) for some in answers.pieces()] == [3, 3, 1]
    again = read(answers, whole.plan, whole.held_out)
    assert again.alpha_min == once.alpha_min
    assert again.search is not None
    assert once.search is not None
    torch.testing.assert_close(again.search.msi, once.search.msi, rtol=0, atol=0, equal_nan=True)
    for name, values in once.columns.items():
        torch.testing.assert_close(again[name], values, rtol=0, atol=0, equal_nan=True)
    found = again.mean_curves()
    assert found.keys() == means.keys()
    for name, values in means.items():
        torch.testing.assert_close(found[name].values, values, rtol=0, atol=1e-12)
    assert asdict(reading("m", MethodScores.of(again)).losses) == pytest.approx(
        asdict(words.losses)
    )
    first, second = (
        pandas.read_parquet(tmp_path / p / "curves.parquet") for p in ("once", "pieces")
    )
    assert first["image"].tolist() == second["image"].tolist() == [f"{k}.png" for k in range(7)]
    for column in first.columns[1:]:
        np.testing.assert_array_equal(np.stack(first[column]), np.stack(second[column]))
    file = parquet.ParquetFile(tmp_path / "pieces" / "curves.parquet")
    assert file.num_row_groups == 3
    assert b"grids" in file.schema_arrow.metadata


def test_a_comparison_in_pieces_ends_with_the_same_files(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = wanted(photos, held_out_fill="blur", alpha_min="search")
    once = compare_folder(settings, tmp_path / "once", group=2)
    in_pieces(monkeypatch, 4)
    pieces = compare_folder(settings, tmp_path / "pieces", group=2)
    pandas.testing.assert_frame_equal(rows(tmp_path / "once"), rows(tmp_path / "pieces"))
    for name in ("summary.json", "pairs.csv"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "pieces" / name).read_bytes()
    answers = [found.scores["gradcam"].answers for found in (once, pieces) if found]
    assert answers[0].confidences.equal(answers[1].confidences)
    assert answers[0].confidences.shape == (6, len(answers[0].bands))
    monkeypatch.setattr("sufficit.comparing.finished.PIECE", 4)
    curves = [read_finished(tmp_path / out).curves("gradcam") for out in ("once", "pieces")]
    assert curves[0].keys() == curves[1].keys()
    for name, (grid, values) in curves[0].items():
        assert curves[1][name][0] == grid
        assert curves[1][name][1] == pytest.approx(values)


def test_answers_that_were_gathered_are_not_held_in_memory(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Parts, "remove", lambda _: None)
    found = compare_folder(wanted(photos, leak=False), tmp_path / "out", group=2)
    assert found is not None
    mapped = Path("/proc/self/maps").read_text()
    for name, kind in (("named", np.int32), ("confidences", np.float32)):
        file = tmp_path / "out" / "parts" / f"joined-0-{name}.bin"
        held = getattr(found.scores["gradcam"].answers, name)
        assert torch.from_numpy(np.fromfile(file, kind)).equal(held.flatten())
        assert str(file) in mapped
