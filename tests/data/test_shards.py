"""Pictures inside tar shards."""

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from own_model import MODEL
from shard_files import png, write_shard
from sufficit import UserError
from sufficit.data import image_files, shards
from sufficit.data.heatmap_files import HeatmapFile
from sufficit.data.images import (
    BadImageError,
    ImageSource,
    list_images,
    open_images,
    read_image,
)
from sufficit.data.loader import Entry, ImageLoader, Item
from sufficit.data.manifest import listed
from sufficit.data.shards import ShardImage
from sufficit.runs.config import config_from
from sufficit.runs.engine import run
from sufficit.runs.job import make_job
from sufficit.runs.overlays import explain_run


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_files_of_one_key_are_one_sample(tmp_path: Path, kind: int) -> None:
    long = f"{'deep/' * 18}{'name' * 15}"  # too long for a header's first field
    files = [
        ("a.cls", b"2\n"),
        ("a.png", png(0)),
        ("b.jpg.png", png(1)),
        ("b.json", b'{"label": "bee", "more": [1]}'),
        ("c.txt", b"no picture"),
        ("d.png", png(2)),
        (f"{long}.png", png(3)),
        (f"{long}.cls", b"1"),
        ("__meta.png", png(5)),
        ("e.png", png(4)),
    ]
    found = list_images(write_shard(tmp_path / "one.tar", files, kind))
    names = [
        ("a.png", "2"),
        ("b.jpg.png", "bee"),
        ("d.png", None),
        (f"{long}.png", "1"),
        ("e.png", None),
    ]
    assert [(p.name, p.folder) for p in found] == [(f"one.tar/{n}", word) for n, word in names]
    for number, picture in enumerate(found):
        (tmp_path / "same.png").write_bytes(png(number))
        assert picture.read(None).equal(read_image(tmp_path / "same.png", None))
        assert picture.size == len(png(number))


def test_shards_are_named_by_a_pattern_or_their_folder(tmp_path: Path) -> None:
    for number in (8, 9, 10):
        write_shard(tmp_path / "s" / f"{number:02d}.tar", [("x.png", png(number))])
    wanted = ["09.tar/x.png", "10.tar/x.png"]
    assert [p.name for p in list_images(tmp_path / "s" / "{09..10}.tar")] == wanted
    assert [p.name for p in list_images(tmp_path / "s")] == ["08.tar/x.png", *wanted]
    with pytest.raises(UserError, match=r"no file at .*11\.tar"):
        list_images(tmp_path / "s" / "{09..11}.tar")
    write_shard(tmp_path / "t" / "08.tar", [("x.png", png(0))])
    both = shards.images_of_shards([tmp_path / "s" / "08.tar", tmp_path / "t" / "08.tar"])
    assert [p.name for p in both] == ["s/08.tar/x.png", "t/08.tar/x.png"]


def test_links_and_devices_are_passed_over(tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(7))
    with tarfile.open(tmp_path / "odd.tar", "w") as shard:
        for name, kind in {"soft": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}.items():
            link = tarfile.TarInfo(f"{name}.png")
            link.type, link.linkname = kind, str(secret)
            shard.addfile(link)
        device = tarfile.TarInfo("device.png")
        device.type = tarfile.CHRTYPE
        shard.addfile(device)
        escaping = tarfile.TarInfo("../../out.png")
        escaping.size = len(png(1))
        shard.addfile(escaping, io.BytesIO(png(1)))
    before = sorted(tmp_path.rglob("*"))
    found = list_images(tmp_path / "odd.tar")
    assert [p.name for p in found] == ["odd.tar/at byte 1536"]
    assert sorted(tmp_path.rglob("*")) == before


ODD = ("../../out.png", "/out.png", "a\\..\\..\\out.png", "a/../../../out.png", "C:\\out.png")


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_leads_elsewhere_is_a_bad_picture_under_a_safe_name(
    sufficit, tmp_path: Path, name: str
) -> None:
    shard = write_shard(tmp_path / "in" / "odd.tar", [("a.png", png(0)), (name, png(1))])
    good, bad = list_images(shard)
    assert (good.name, bad.name) == ("odd.tar/a.png", "odd.tar/at byte 1024")
    with pytest.raises(BadImageError, match="can't be that of a file below a folder"):
        bad.read(None)
    words = ("explain", shard.parent, "--model", "sufficit:digits", "--targets", "prediction")
    run = sufficit(*words, "--out", tmp_path / "deep" / "out")
    assert run.code == 0, run.err
    assert "odd.tar/at byte 1024: its name can't be" in run.err
    (drawn,) = tmp_path.rglob("*.gradcam+fit.jpg")
    assert drawn == tmp_path / "deep" / "out" / "regions" / "odd.tar" / "a.png.gradcam+fit.jpg"
    stopped = sufficit(*words, "--out", tmp_path / "other", "--on-error", "stop")
    assert stopped.code == 2
    assert "its name can't be" in stopped.err


def test_names_that_only_look_odd_are_read(tmp_path: Path) -> None:
    names = ["./a.png", "b..png", "..c.d/e.png", "f\\g.png", "h:i.png"]
    found = list_images(write_shard(tmp_path / "a.tar", [(name, png(0)) for name in names]))
    assert [picture.name for picture in found] == [f"a.tar/{name}" for name in names]
    assert [picture.read(None).shape for picture in found] == [(3, 12, 10)] * 5


def test_names_and_labels_that_are_no_text_can_be_written(tmp_path: Path) -> None:
    path, kind = tmp_path / "a.tar", tarfile.GNU_FORMAT
    with tarfile.open(path, "w", format=kind, encoding="latin-1") as tar:
        for name, content in (("caf\xe9.png", png(0)), ("caf\xe9.json", b'{"label": "\\ud800"}')):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    (image,) = listed(list_images(path), 4)
    assert (image.image.name, image.image.folder) == ("a.tar/caf\\xe9.png", "\\ud800")
    assert image.image.read(None).shape == (3, 12, 10)


@pytest.mark.parametrize("name", ["../../out.png", "/out.png"])
def test_nothing_is_drawn_outside_the_folder_for_any_name(tmp_path: Path, name: str) -> None:
    source = ImageSource.from_tensors(torch.rand(1, 3, 64, 64), names=[name])
    config = config_from({"model": "sufficit:digits", "data": "-", "methods": ["gradcam"]})
    job = make_job(config, images=source)
    with pytest.raises(UserError, match=r"out\.png.* leads out of .*: rename the image"):
        explain_run(job, tmp_path / "deep" / "out", progress=False)
    assert not list(tmp_path.rglob("*out.png*"))


def test_a_second_file_of_one_name_is_a_bad_picture(tmp_path: Path) -> None:
    files = [("a.png", png(0)), ("a.cls", b"1"), ("b.png", png(1)), ("b.cls", b"2")]
    again = [("a.png", png(2)), ("a.cls", b"2"), ("./b.png", png(3))]
    shard = write_shard(tmp_path / "a.tar", [*files, *again])
    write_shard(tmp_path / "b.tar", files)
    found = list_images(shard)
    assert [picture.name for picture in found[:2]] == ["a.tar/a.png", "a.tar/b.png"]
    assert len({picture.name for picture in found}) == 4
    assert [picture.folder for picture in found] == ["1", "2", "2", None]
    for picture in found[2:]:
        with pytest.raises(BadImageError, match="a second file of this name in the shard"):
            picture.read(None)
    assert len(list_images(tmp_path)) == 6, "another shard has names of its own"
    np.savez(tmp_path / "maps.npz", a=np.ones((2, 2)), b=np.ones((2, 2)))

    def read(entry: Entry) -> Item:
        item = Item(entry, entry.image.read(None))
        assert maps.key(item.name) is not None
        return item

    loader = ImageLoader(read)
    with HeatmapFile(tmp_path / "maps.npz") as maps:
        items = loader.items([Entry(number, image) for number, image in enumerate(found)])
    assert [item.name for item in items] == ["a.tar/a.png", "a.tar/b.png"]
    told = [f"a second file of this name in the shard ({name!r})" for name in ("a.png", "./b.png")]
    assert list(loader.skipped.values()) == told


def names_and_rows(tmp_path: Path, out: str, **more: object) -> tuple[list[str], dict[str, str]]:
    """The images that a comparison of the shards scored, and those that it left out."""
    config = config_from(
        {"model": f"python:{tmp_path / 'model.py'}:make", "data": str(tmp_path / "s")}
        | {"methods": ["gradcam"], "device": "cpu", "donors": 2, "value_step": 0.25}
        | {"percent_step": 0.25, **more}
    )
    run(make_job(config, unit=2), tmp_path / out, progress=False)
    record = json.loads((tmp_path / out / "run.json").read_text())
    rows = pandas.read_parquet(tmp_path / out / "gradcam" / "scores.parquet")
    return rows["image"].tolist(), {one["name"]: one["reason"] for one in record["skipped"]}


@pytest.mark.parametrize("cut", [0, 1], ids=["the first shard", "the last shard"])
@pytest.mark.parametrize("left", [2, 1, 0], ids=["in an image", "before a label", "at once"])
def test_a_shard_that_is_cut_off_gives_what_is_before_the_cut(
    tmp_path: Path, cut: int, left: int
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    for shard in range(2):
        keys = [(f"{k}", ("ant", "bee", "cat")[k]) for k in range(3)]
        files = [[(f"{k}.jpg", png(int(k))), (f"{k}.json", json.dumps({"cls": w}).encode())]
                 for k, w in keys]  # fmt: skip
        write_shard(tmp_path / "s" / f"{shard}.tar", [one for both in files for one in both])
    path = tmp_path / "s" / f"{cut}.tar"
    third = path.read_bytes().index(b"2.jpg")
    kept = {2: third + 600, 1: path.read_bytes().index(b"2.json"), 0: 0}[left]
    path.write_bytes(path.read_bytes()[:kept])
    names, skipped = names_and_rows(tmp_path, "out")
    whole = [f"{shard}.tar/{k}.jpg" for shard in range(2) for k in range(3)]
    lost = [f"{cut}.tar/{k}.jpg" for k in range(3)][2 if left else 0 :]
    assert names == [name for name in whole if name not in lost]
    where = "in '2.jpg'" if left == 2 else f"at byte {kept}"
    assert skipped.pop(f"{cut}.tar/at byte {third if left == 2 else kept}") == (
        f"cut off {where}: fetch it again"
    )
    reasons = {f"{cut}.tar/at byte {third}": "the shard is cut off before its label"}
    assert skipped == (reasons if left == 1 else {})
    with pytest.raises(UserError, match=rf"{cut}\.tar/at byte .*cut off"):
        names_and_rows(tmp_path, "other", on_error="stop")


def test_a_shard_that_vanishes_is_no_bad_picture(tmp_path: Path) -> None:
    for number in range(2):
        write_shard(tmp_path / "s" / f"{number}.tar", [("a.png", png(0)), ("b.png", png(1))])
    first, *_ = open_images(tmp_path / "s")
    walk = shards.images_of_shards(sorted((tmp_path / "s").glob("*.tar")))
    next(walk)
    (tmp_path / "s").rename(tmp_path / "away")
    for read in (lambda: first.read(None), lambda: list(walk)):
        with pytest.raises(UserError, match=r"\d\.tar can't be read any more .* same command"):
            read()


def test_what_is_wrong_with_a_shard_is_said(tmp_path: Path) -> None:
    whole = write_shard(tmp_path / "whole.tar", [("a.png", png(0)), ("b.png", png(1))])
    content = whole.read_bytes()
    ends = {600: "in 'a.png'", 1024: "at byte 1024", 1100: "at byte 1024"}
    for kept, where in ends.items():
        (tmp_path / "cut.tar").write_bytes(content[:kept])
        *before, last = list_images(tmp_path / "cut.tar")
        assert [picture.name for picture in before] == (["cut.tar/a.png"] if kept > 600 else [])
        with pytest.raises(BadImageError, match=f"^cut off {where}: fetch it again$"):
            last.read(None)
    (tmp_path / "zipped.tar").write_bytes(gzip.compress(os.urandom(2000)))
    with pytest.raises(UserError, match=r"zipped\.tar is no plain tar at byte 0.*\.tar\.gz"):
        list_images(tmp_path / "zipped.tar")
    write_shard(tmp_path / "none.tar", [("a.txt", b"words")])
    with pytest.raises(UserError, match=r"no images in .*none\.tar"):
        list_images(tmp_path / "none.tar")


def test_sizes_are_checked_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard(tmp_path / "a.tar", [("a.png", png(0))])
    picture = list_images(tmp_path / "a.tar")[0]
    monkeypatch.setattr(image_files, "MOST_IMAGE", 100)
    with pytest.raises(BadImageError, match="the limit is 100"):
        picture.read(None)
    empty = ShardImage(picture.file, "empty.png", None, start=512, size=0)
    with pytest.raises(BadImageError, match="0 bytes"):
        empty.read(None)


def pax(records: bytes) -> bytes:
    """A header with these records, and one file after it."""
    about = tarfile.TarInfo("about")
    about.type, about.size = tarfile.XHDTYPE, len(records)
    image = tarfile.TarInfo("a.png")
    image.size = 600
    filled = records.ljust(-(-len(records) // 512) * 512, b"\0")
    return about.tobuf() + filled + image.tobuf() + bytes(2048)


@pytest.mark.parametrize("records", [b"12 size=-99\n", b"0 x=1\n"])
def test_odd_headers_are_refused(tmp_path: Path, records: bytes) -> None:
    (tmp_path / "odd.tar").write_bytes(pax(records))
    with pytest.raises(UserError, match=r"odd\.tar (is no plain tar|holds a sparse file)"):
        list_images(tmp_path / "odd.tar")


def test_a_corrupt_header_between_images_is_a_bad_picture(tmp_path: Path) -> None:
    files = [(f"{k}.png", png(k)) for k in range(3)]
    path = write_shard(tmp_path / "a.tar", files)
    content = bytearray(path.read_bytes())
    place = content.index(b"1.png")
    content[place + 148 : place + 156] = b"7777777\0"  # the checksum of the second header
    path.write_bytes(content)
    good, bad = list_images(path)
    assert (good.name, bad.name) == ("a.tar/0.png", f"a.tar/at byte {place}")
    with pytest.raises(BadImageError, match=f"^cut off at byte {place}: fetch it again$"):
        bad.read(None)


def test_a_size_beyond_the_end_is_a_cut(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(pax(b"27 size=999999999999999999\n"))
    (found,) = list_images(tmp_path / "a.tar")
    with pytest.raises(BadImageError, match=r"cut off in 'a\.png'"):
        found.read(None)


def test_a_size_of_records_is_not_that_of_a_long_name(tmp_path: Path) -> None:
    name = b"long/" * 30 + b"a.png\0"
    about = tarfile.TarInfo("about")
    about.type, about.size = tarfile.GNUTYPE_LONGNAME, len(name)
    content = pax(b"10 size=7\n")
    (tmp_path / "a.tar").write_bytes(content[:1024] + about.tobuf() + name.ljust(512, b"\0"))
    with (tmp_path / "a.tar").open("ab") as file:
        file.write(content[1024:])
    (found,) = list_images(tmp_path / "a.tar")
    assert (found.name, found.size) == (f"a.tar/{'long/' * 30}a.png", 7)


def test_words_in_json_that_are_no_label_are_none(tmp_path: Path) -> None:
    odd = [b"[1]", b"{", b'{"label": true}', b'{"label": null}', b"[" * 100_000, b'{"cls": 4}']
    files = [pair for i, c in enumerate(odd) for pair in ((f"{i}.json", c), (f"{i}.png", png(i)))]
    found = list_images(write_shard(tmp_path / "a.tar", files))
    assert [p.folder for p in found] == [None] * 5 + ["4"]


def test_a_comparison_on_shards_is_that_on_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    classes = ["ant", "bee", "cat"]
    files = [(classes[i // 3], f"{i:02d}", png(i)) for i in range(9)]
    for label, key, content in files:
        path = tmp_path / "photos" / label / f"{key}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for number in range(3):
        inside = [(f"{key}.png", content) for _, key, content in files[number * 3 :][:3]]
        words = [(f"{key}.cls", label.encode()) for label, key, _ in files[number * 3 :][:3]]
        write_shard(tmp_path / "s" / f"{number}.tar", sorted([*inside, *words]))
    found = {}
    for data in ("photos", "s/{0..2}.tar"):
        config = config_from(
            {"model": f"python:{tmp_path / 'model.py'}:make", "data": str(tmp_path / data)}
            | {"methods": ["gradcam"], "device": "cpu", "donors": 2, "value_step": 0.25}
            | {"percent_step": 0.25}
        )
        out = tmp_path / f"out-{data[0]}"
        run(make_job(config, unit=2), out, progress=False)
        found[data[0]] = [
            pandas.read_parquet(out / m / "scores.parquet") for m in ("gradcam", "random")
        ]
        record = json.loads((out / "run.json").read_text())
        assert record["targets"] == "label"
        assert record["class_folders"] == ({} if data[0] == "s" else {"ant": 0, "bee": 1, "cat": 2})
    for one, other in zip(found["p"], found["s"], strict=True):
        pandas.testing.assert_frame_equal(
            one.drop(columns="image"), other.drop(columns="image"), check_exact=True
        )
    assert found["s"][0]["image"].tolist()[:2] == ["0.tar/00.png", "0.tar/01.png"]


def test_pictures_of_a_folder_come_as_sorted_paths_do(tmp_path: Path) -> None:
    names = ["b.png", "b/2.png", "b!/1.png", "a-b/1.png", "a/z.png", "a.b/c.png", "a/b/c.PNG"]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "d.png").write_bytes(b"x")
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "link.png").symlink_to(tmp_path / "elsewhere" / "d.png")
    (tmp_path / "in" / "broken.png").symlink_to(tmp_path / "nothing")
    (tmp_path / "in" / "folder.png").mkdir()
    root = tmp_path / "in"
    linked = ["link.png", "broken.png", "linked/d.png"]  # what is broken is told when it is read
    wanted = sorted(root / name for name in [*names, *linked])
    assert [p.path for p in list_images(root)] == wanted
    assert [p.name for p in list_images(root)] == [str(p.relative_to(root)) for p in wanted]
    folders = {p.name: p.folder for p in list_images(root)}
    assert folders["a/b/c.PNG"] == "a"
    assert folders["b.png"] is None
