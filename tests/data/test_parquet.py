"""Images in parquet files."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from object_server import ObjectServer, denied
from shard_files import png
from small_runs import config_for
from sufficit import Classifier, UserError
from sufficit.data import parquet
from sufficit.data.images import KINDS, BadImageError, list_images, open_images, read_image
from sufficit.data.loader import Entry, ImageLoader, decode_entry, labels_for
from sufficit.data.parquet import ParquetImage
from sufficit.data.splits import read_folder
from sufficit.errors import GoneError
from sufficit.runs.config import RunConfig
from sufficit.runs.engine import run
from sufficit.runs.job import make_job
from sufficit.sanity import checks

CLASSES = ["cat", "ant", "bee"]  # not in the order of the alphabet


def features(**more: Any) -> dict[bytes, bytes]:
    """The metadata that Hugging Face writes."""
    return {b"huggingface": json.dumps({"info": {"features": more}}).encode()}


NAMED = features(
    image={"_type": "Image"},
    thumb={"_type": "Value"},
    label={"_type": "ClassLabel", "names": CLASSES},
)


def write(
    path: Path,
    images: Sequence[bytes | None],
    labels: Sequence[Any] | None = None,
    paths: Sequence[str | None] | None = None,
    metadata: dict[bytes, bytes] | None = None,
    rows: int = 4,
    **more: Sequence[Any],
) -> Path:
    """A parquet file with images as Hugging Face has them, four to a row group."""
    where = [None] * len(images) if paths is None else paths
    pairs = [{"bytes": b, "path": p} for b, p in zip(images, where, strict=True)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns: dict[str, Any] = {"image": pa.array(pairs, kind)} | more
    columns |= {} if labels is None else {"label": labels}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path, row_group_size=rows)
    return path


def test_rows_are_images_with_names_labels_and_bytes(tmp_path: Path) -> None:
    contents = [png(k) for k in range(10)]
    labels = [0, 1, 2, 0, 1, 2, 0, None, -1, 1]
    names = [f"x/{k}.png" for k in range(10)]
    path = write(tmp_path / "a.parquet", contents, labels, names, NAMED)
    found = list_images(path)
    assert [image.name for image in found] == names
    words = [None if k in (None, -1) else CLASSES[k] for k in labels]
    assert [image.folder for image in found] == words
    assert [image.start for image in found] == list(range(10))
    assert [image.content() for image in found] == contents
    (tmp_path / "same.png").write_bytes(contents[9])
    assert found[9].read(None).equal(read_image(tmp_path / "same.png", None))
    groups = [pq.read_metadata(path).row_group(k) for k in range(3)]
    sizes = [group.column(0).total_compressed_size // group.num_rows for group in groups]
    assert [image.size for image in found] == [sizes[k // 4] for k in range(10)]
    one = found[3]
    fields = {name: getattr(one, name) for name in ParquetImage.__match_args__}
    assert KINDS[type(one).__name__](**fields) == one
    assert {type(value) for value in fields.values()} == {str, int}


@pytest.mark.parametrize(
    "paths",
    [
        [None] * 3,
        ["a.png", "a.png", "b.png"],
        ["a.png", None, "b.png"],
        ["a.png", "../b.png", "c.png"],
        ["a.png", "/etc/b.png", "c.png"],
        ["a.png", "C:\\b.png", "c.png"],
        ["a.png", "", "c.png"],
    ],
)
def test_names_are_file_and_row_where_paths_are_no_names(
    tmp_path: Path, paths: list[str | None]
) -> None:
    write(tmp_path / "d" / "one.parquet", [png(0)] * 3, paths=paths)
    write(tmp_path / "d" / "deep" / "one.parquet", [png(1)], paths=["z.png"])
    names = [image.name for image in list_images(tmp_path / "d")]
    assert names == ["deep/one/0", "one/0", "one/1", "one/2"]


def test_paths_that_two_files_share_are_no_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.parquet", [png(0)], paths=["x.png"])
    assert [image.name for image in list_images(tmp_path)] == ["a/0", "b/0"]
    assert [image.name for image in list_images(tmp_path / "b.parquet")] == ["x.png"]


def test_files_are_named_by_a_pattern_or_a_folder(tmp_path: Path) -> None:
    for number in range(8, 12):
        write(tmp_path / f"part-{number:02d}.parquet", [png(number)])
    write(tmp_path / "_hidden.parquet", [png(0)])
    every = [f"part-{number:02d}/0" for number in range(8, 12)]
    assert [image.name for image in list_images(tmp_path)] == every
    assert [i.name for i in list_images(tmp_path / "part-{09..10}.parquet")] == every[1:3]
    assert [i.name for i in list_images(tmp_path / "part-1*.parquet")] == every[2:]
    with pytest.raises(UserError, match=r"no file matches .*x-\*\.parquet: check"):
        list_images(tmp_path / "x-*.parquet")
    with pytest.raises(UserError, match=r"no file at .*part-12\.parquet: check"):
        list_images(tmp_path / "part-{11..12}.parquet")


def test_several_splits_are_an_error_that_lists_them(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write(tmp_path / "data" / f"{name}.parquet", [png(0)])
    with pytest.raises(
        UserError,
        match=r"several splits \(data/test-00000-of-00001\.parquet, data/train-\*\.parquet\): "
        r"give one of them, as in --data '.*/data/test-00000-of-00001\.parquet'",
    ):
        list_images(tmp_path)
    assert len(list_images(tmp_path / "data" / "train-*.parquet")) == 2


def model(classes: list[str] | None, count: int = 3) -> Classifier:
    made = nn.Sequential(nn.Conv2d(3, count, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Classifier(made, classes=classes)


@pytest.mark.parametrize(
    ("labels", "metadata", "classes", "wanted"),
    [
        ([0, 1, 2], NAMED, ["ant", "bee", "cat"], [2, 0, 1]),  # by name
        ([0, 1, 2], NAMED, None, [0, 1, 2]),  # by the file's numbers, not by the alphabet
        ([0, 2, 2], NAMED, None, [0, 2, 2]),
        ([2, 0, 1], None, None, [2, 0, 1]),
        (["b", "a", "c"], None, None, [1, 0, 2]),  # in order, as class folders
        (["Bee", "ant", "cat"], None, ["ant", "bee", "cat"], [1, 0, 2]),
    ],
)
def test_labels_are_matched_to_the_classes_of_the_model(
    tmp_path: Path, labels: list[Any], metadata: Any, classes: list[str] | None, wanted: list[int]
) -> None:
    source = open_images(write(tmp_path / "a.parquet", [png(0)] * 3, labels, metadata=metadata))
    known = labels_for(model(classes), source, "auto")
    assert known == wanted


def test_numbers_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [png(0)] * 2, [0, 2], metadata=NAMED)
    with pytest.raises(UserError, match="do not fit the model's 2 classes"):
        labels_for(model(None, 2), open_images(path), "auto")
    path = write(tmp_path / "b.parquet", [png(0)] * 2, [0, 3], metadata=NAMED)
    with pytest.raises(UserError, match=r"b\.parquet has label 3 and 3 class names"):
        list_images(path)
    more = features(label={"_type": "ClassLabel", "names": [*CLASSES, "dog"]})
    write(tmp_path / "b.parquet", [png(0)] * 2, [0, 3], metadata=more)
    with pytest.raises(UserError, match=r"b\.parquet names other classes than .*a\.parquet"):
        list_images(tmp_path)


def test_columns_are_found_or_named(tmp_path: Path) -> None:
    one, other = [png(0), png(1)], [png(2), png(3)]
    two = write(tmp_path / "two.parquet", one, [0, 1], thumb=other, kind=["x", "y"])
    assert [image.content() for image in list_images(two)] == one, "a struct before plain bytes"
    found = list_images(two, "thumb", "kind")
    assert [image.content() for image in found] == other
    assert [image.folder for image in found] == ["x", "y"]
    pq.write_table(pa.table({"jpg": one, "cls": [3, 4]}), tmp_path / "plain.parquet")
    plain = list_images(tmp_path / "plain.parquet")
    assert [(image.content(), image.folder) for image in plain] == [(one[0], None), (one[1], None)]
    pq.write_table(pa.table({"a": one, "b": other}), tmp_path / "both.parquet")
    columns = r"Its columns: a \(binary\), b \(binary\)\. Set image_column = \"NAME\" in a RUN"
    words = rf"both\.parquet has 2 columns that may be images\. {columns}"
    with pytest.raises(UserError, match=words):
        list_images(tmp_path / "both.parquet")
    assert [i.content() for i in list_images(tmp_path / "both.parquet", "b")] == other
    marked = pa.table({"a": one, "b": other}).replace_schema_metadata(
        features(b={"_type": "Image"})
    )
    pq.write_table(marked, tmp_path / "marked.parquet")
    assert [i.content() for i in list_images(tmp_path / "marked.parquet")] == other


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            ("none", None),
            r"no column of images 'none'\. Its columns: image \(struct<.*label \(int64\)",
        ),
        (("label", None), r"no column of images 'label'"),
        ((None, "none"), r"no column of labels 'none'\. .*Set label_column = \"ANOTHER\" in a RUN"),
        ((None, "image"), r"no column of labels 'image'"),
        ((None, "score"), r"a\.parquet has label 0\.5: give class numbers or names"),
    ],
)
def test_wrong_columns_are_an_error_that_lists_them(
    tmp_path: Path, columns: tuple[str | None, str | None], words: str
) -> None:
    path = write(tmp_path / "a.parquet", [png(0)], [1], score=[0.5])
    with pytest.raises(UserError, match=words):
        list_images(path, *columns)


def test_columns_without_parquet_files_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(0))
    with pytest.raises(UserError, match="is no parquet file and holds none: leave out"):
        list_images(tmp_path, "image")
    pq.write_table(pa.table({"text": ["no image"]}), tmp_path / "words.parquet")
    assert [image.name for image in list_images(tmp_path)] == ["a.png"], "images come first"
    with pytest.raises(UserError, match=r"has no column of images\. Its columns: text \(string\)"):
        list_images(tmp_path / "words.parquet")


def test_bad_rows_are_skipped_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [png(0), None, b"no image", b"", png(1), png(2), b"x" * 5000]
    path = write(tmp_path / "a.parquet", contents)
    monkeypatch.setattr("sufficit.data.image_files.MOST_IMAGE", 4000)
    reader = ImageLoader(lambda entry: decode_entry(None, entry))
    items = reader.items([Entry(k, image) for k, image in enumerate(open_images(path))])
    assert [item.name for item in items] == ["a/0", "a/4", "a/5"]
    assert [(name, why.partition(" (")[0]) for name, why in reader.skipped.items()] == [
        ("a/1", "no bytes in its row"),
        ("a/2", "not a readable image"),
        ("a/3", "no bytes in its row"),
        ("a/6", "a file of 5000 bytes, the limit is 4000"),
    ]


def test_a_corrupt_file_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [png(k) for k in range(8)])
    content = bytearray(path.read_bytes())
    start = content.index(png(4)[40:120]) - 40
    content[start - 60 : start] = bytes(60)  # the header of the second row group's page
    found, before = list_images(path), path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(before, before))
    assert found[3].content() == png(3)
    with pytest.raises(BadImageError, match=r"row group of .*a\.parquet can't be read"):
        found[5].content()
    path.write_bytes(bytes(content[:-100]))
    with pytest.raises(UserError, match=r"a\.parquet is no readable parquet file .*fetch it again"):
        list_images(path)
    parquet._groups.clear()
    path.unlink()
    with pytest.raises(GoneError, match=r"a\.parquet can't be read any more"):
        found[0].content()


def test_a_file_that_is_replaced_after_it_was_listed_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [png(k) for k in range(8)])
    found, time = list_images(path), path.stat().st_mtime_ns
    write(path, [png(50 + k) for k in range(8)])
    os.utime(path, ns=(time, time + 10**6))
    with pytest.raises(UserError, match=r"a\.parquet was changed after it was listed"):
        found[5].content()


def test_two_columns_of_one_name_are_an_error(tmp_path: Path) -> None:
    table = pa.table([[png(0)], [1], [2]], names=["image", "label", "label"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has two columns called 'label': rename one"):
        list_images(tmp_path / "a.parquet")


def test_labels_as_floats_are_whole_numbers_or_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [png(0)] * 3, [2.0, None, float("nan")], metadata=NAMED)
    assert [image.folder for image in list_images(path)] == ["bee", None, None]


def test_few_row_groups_are_kept_while_threads_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [png(k) for k in range(60)]
    found = list_images(write(tmp_path / "a.parquet", contents, rows=10))
    parquet._groups.clear()
    monkeypatch.setattr(parquet, "MOST_KEPT", 3 * 11 * len(png(0)))
    read: list[int] = []
    whole = parquet._read_group

    def counted(image: ParquetImage) -> Any:
        read.append(image.start // 10)
        assert len(parquet._groups) <= 3
        return whole(image)

    monkeypatch.setattr(parquet, "_read_group", counted)
    assert [image.content() for image in found] == contents
    assert read == [0, 1, 2, 3, 4, 5], "each once"
    assert len(parquet._groups) == 3
    monkeypatch.setattr(parquet, "MOST_KEPT", 0)
    assert [found[k].content() for k in (0, 10, 0, 10)] == [contents[k] for k in (0, 10, 0, 10)]
    assert read[6:] == [0, 1], "two are kept, however large"
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda image: image.content(), found)) == contents


def test_a_comparison_on_parquet_is_that_on_its_folder(
    sufficit, photos: Path, bucket: str, object_server: ObjectServer
) -> None:
    files = sorted(photos.rglob("*.png"))
    names = [str(path.relative_to(photos)) for path in files]
    labels = [CLASSES.index(path.parent.name) for path in files]
    contents = [path.read_bytes() for path in files]
    write(photos.parent / "p" / "a.parquet", contents, labels, names, NAMED)
    object_server.upload(photos.parent / "p", f"{bucket}/p")
    rows = {}
    for data in (photos, photos.parent / "p", f"{bucket}/p/a.parquet"):
        config = config_for(photos, data=str(data), methods=["gradcam"])
        out = photos.parent / f"out-{len(rows)}"
        run(make_job(config, unit=4), out, progress=False)
        rows[data] = pandas.read_parquet(out / "gradcam" / "scores.parquet")
    local, *others = rows.values()
    for other in others:
        pandas.testing.assert_frame_equal(local, other, check_exact=True)
    words = ("compare", "--model", f"python:{photos.parent / 'model.py'}:make", "--out")
    (photos.parent / "no.toml").write_text('label_column = "no"')
    given = ("--data", photos.parent / "p", "--config", photos.parent / "no.toml")
    wrong = sufficit(*words, photos.parent / "x", *given)
    assert wrong.code == 2
    assert "no column of labels 'no'" in wrong.err


def test_training_takes_columns_too(tmp_path: Path) -> None:
    thumbs = [png(k) for k in range(12)]
    kinds = ["ant", "bee", "cat"] * 4
    path = write(tmp_path / "a.parquet", [png(0)] * 12, [0] * 12, thumb=thumbs, kind=kinds)
    classes = ["ant", "bee", "cat"]
    columns = {"image_column": "thumb", "label_column": "kind"}
    folder = read_folder(model(classes), path, "auto", 0.25, 0, **columns)
    found = {
        entry.image.start: (entry.image.content(), entry.label)
        for entry in (*folder.training, *folder.validation)
    }
    assert found == {row: (thumbs[row], row % 3) for row in range(12)}


def test_training_and_sanity_number_classes_as_the_files_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = [k % 3 for k in range(12)]
    path = write(tmp_path / "a.parquet", [png(k) for k in range(12)], labels, metadata=NAMED)
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    classifier = Classifier(model)  # without names of its own
    folder = read_folder(classifier, path)
    for entry in (*folder.training, *folder.validation):
        assert entry.label == CLASSES.index(entry.image.folder or "")
    seen: list[int] = []
    monkeypatch.setattr(checks, "sanity_check", lambda *given, **_: seen.extend(given[2].tolist()))
    checks.check_folder(RunConfig("", str(path), ("center",), images=12), classifier)
    assert seen == labels


def test_a_file_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for first in (0, 50):
        contents = [png(first + k) for k in range(6)]
        found = list_images(write(path, contents))
        assert [image.content() for image in found] == contents


def test_a_remote_file_is_read_by_ranges(bucket: str, object_server: ObjectServer) -> None:
    contents = [
        torch.randint(0, 256, (60_000,), dtype=torch.uint8).numpy().tobytes() for _ in range(60)
    ]
    written = pa.BufferOutputStream()
    pq.write_table(pa.table({"image": contents, "label": [1] * 60}), written, row_group_size=20)
    client = object_server.client()
    client.put_object(Bucket=bucket[5:], Key="a.parquet", Body=written.getvalue().to_pybytes())
    object_server.requests.clear()
    found = list_images(f"{bucket}/a.parquet")
    assert [image.content() for image in found[:20]] == contents[:20]
    assert len(object_server.requests) <= 12
    assert all("a.parquet" in path or method == "GET" for method, path in object_server.requests)
    object_server.faults.append(denied("GET"))
    with pytest.raises(GoneError, match="can't be reached"):
        found[20].content()
    object_server.faults.clear()
    assert found[20].content() == contents[20], "a failure of the server is not kept"
