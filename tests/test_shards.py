"""Pictures inside tar shards."""

import gzip
import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas
import pytest
from PIL import Image

from own_model import MODEL
from sufficit import UserError
from sufficit.compare import compare_folder
from sufficit.comparing.settings import settings_from
from sufficit.data import shards
from sufficit.data.finding import stream_pictures
from sufficit.data.images import BadPictureError, find_pictures, read_picture
from sufficit.data.shards import Member, expand


def png(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "png")
    return written.getvalue()


def write_shard(
    path: Path, files: Sequence[tuple[str, bytes]], kind: int = tarfile.GNU_FORMAT
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as shard:
        for name, content in files:
            facts = tarfile.TarInfo(name)
            facts.size = len(content)
            shard.addfile(facts, io.BytesIO(content))
    return path


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
    found = find_pictures(write_shard(tmp_path / "one.tar", files, kind))
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
        assert picture.read(None).equal(read_picture(tmp_path / "same.png", None))
        assert picture.bytes() == len(png(number))


def test_shards_are_named_by_a_pattern_or_their_folder(tmp_path: Path) -> None:
    for number in (8, 9, 10):
        write_shard(tmp_path / "s" / f"{number:02d}.tar", [("x.png", png(number))])
    wanted = ["09.tar/x.png", "10.tar/x.png"]
    assert [p.name for p in find_pictures(tmp_path / "s" / "{09..10}.tar")] == wanted
    assert [p.name for p in find_pictures(tmp_path / "s")] == ["08.tar/x.png", *wanted]
    with pytest.raises(UserError, match=r"no shard at .*11\.tar"):
        find_pictures(tmp_path / "s" / "{09..11}.tar")
    write_shard(tmp_path / "t" / "08.tar", [("x.png", png(0))])
    both = shards.pictures_of_shards([tmp_path / "s" / "08.tar", tmp_path / "t" / "08.tar"])
    assert [p.name for p in both] == ["s/08.tar/x.png", "t/08.tar/x.png"]
    assert expand("{1..2}/{09..10}.tar") == ["1/09.tar", "1/10.tar", "2/09.tar", "2/10.tar"]


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
    found = find_pictures(tmp_path / "odd.tar")
    assert [p.name for p in found] == ["odd.tar/../../out.png"]
    assert found[0].read(None).shape == (3, 12, 10)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_shard_that_vanishes_is_no_bad_picture(tmp_path: Path) -> None:
    for number in range(2):
        write_shard(tmp_path / "s" / f"{number}.tar", [("a.png", png(0)), ("b.png", png(1))])
    walk = iter(stream_pictures(tmp_path / "s"))
    first = next(walk)
    (tmp_path / "s").rename(tmp_path / "away")
    for read in (lambda: first.read(None), lambda: list(walk)):
        with pytest.raises(UserError, match=r"\d\.tar can't be read any more .* same command"):
            read()


def test_what_is_wrong_with_a_shard_is_said(tmp_path: Path) -> None:
    whole = write_shard(tmp_path / "whole.tar", [("a.png", png(0)), ("b.png", png(1))])
    content = whole.read_bytes()
    for kept, where in {600: "'a.png'", 1024: "at byte 1024", 1100: "at byte 1024"}.items():
        (tmp_path / "cut.tar").write_bytes(content[:kept])
        with pytest.raises(UserError, match=rf"cut\.tar is cut off (in )?{where}: fetch it again"):
            find_pictures(tmp_path / "cut.tar")
    (tmp_path / "zipped.tar").write_bytes(gzip.compress(os.urandom(2000)))
    with pytest.raises(UserError, match=r"zipped\.tar is no plain tar at byte 0.*\.tar\.gz"):
        find_pictures(tmp_path / "zipped.tar")
    write_shard(tmp_path / "none.tar", [("a.txt", b"words")])
    with pytest.raises(UserError, match=r"no images in .*none\.tar"):
        find_pictures(tmp_path / "none.tar")


def test_sizes_are_checked_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard(tmp_path / "a.tar", [("a.png", png(0))])
    picture = find_pictures(tmp_path / "a.tar")[0]
    monkeypatch.setattr(shards, "MOST_IMAGE", 100)
    with pytest.raises(BadPictureError, match="the limit is 100"):
        picture.read(None)
    empty = Member(picture.path, "empty.png", None, 512, 0)
    with pytest.raises(BadPictureError, match="0 bytes"):
        empty.read(None)
    monkeypatch.setattr(shards, "MOST_WORDS", 150)
    long = [(f"{'name' * 50}.png", png(0))]
    with pytest.raises(UserError, match=r"a name of 20\d bytes"):
        find_pictures(write_shard(tmp_path / "long.tar", long))
    worded = [("a.cls", b" " * 200 + b"3"), ("a.png", png(0))]
    assert find_pictures(write_shard(tmp_path / "worded.tar", worded))[0].folder is None


def pax(records: bytes) -> bytes:
    """A header with these records, and one file after it."""
    about = tarfile.TarInfo("about")
    about.type, about.size = tarfile.XHDTYPE, len(records)
    image = tarfile.TarInfo("a.png")
    image.size = 600
    filled = records.ljust(-(-len(records) // 512) * 512, b"\0")
    return about.tobuf() + filled + image.tobuf() + bytes(2048)


@pytest.mark.parametrize(
    ("records", "error"),
    [
        (b"22 GNU.sparse.major=1\n", "sparse"),
        (b"12 size=-99\n", "size '-99'"),
        (b"27 size=999999999999999999\n", "cut off"),
        (b"29 size=99999999999999999999\n", "size '9999"),
    ],
)
def test_odd_headers_are_refused(tmp_path: Path, records: bytes, error: str) -> None:
    (tmp_path / "odd.tar").write_bytes(pax(records))
    with pytest.raises(UserError, match=error):
        find_pictures(tmp_path / "odd.tar")


def test_a_header_of_records_renames_what_follows_it(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(pax(b"0 x=1\n14 path=b.png\n11 size=7\n"))
    (found,) = find_pictures(tmp_path / "a.tar")
    assert (found.name, found.bytes()) == ("a.tar/a.png", 600)  # a length of 0 ends nothing well
    (tmp_path / "b.tar").write_bytes(pax(b"14 path=b.png\n10 size=7\n"))
    (found,) = find_pictures(tmp_path / "b.tar")
    assert (found.name, found.bytes()) == ("b.tar/b.png", 7)


def test_a_size_of_records_is_not_that_of_a_long_name(tmp_path: Path) -> None:
    name = b"long/" * 30 + b"a.png\0"
    about = tarfile.TarInfo("about")
    about.type, about.size = tarfile.GNUTYPE_LONGNAME, len(name)
    content = pax(b"10 size=7\n")
    (tmp_path / "a.tar").write_bytes(content[:1024] + about.tobuf() + name.ljust(512, b"\0"))
    with (tmp_path / "a.tar").open("ab") as file:
        file.write(content[1024:])
    (found,) = find_pictures(tmp_path / "a.tar")
    assert (found.name, found.bytes()) == (f"a.tar/{'long/' * 30}a.png", 7)


def test_words_in_json_that_are_no_label_are_none(tmp_path: Path) -> None:
    odd = [b"[1]", b"{", b'{"label": true}', b'{"label": null}', b"[" * 100_000, b'{"cls": 4}']
    files = [pair for i, c in enumerate(odd) for pair in ((f"{i}.json", c), (f"{i}.png", png(i)))]
    found = find_pictures(write_shard(tmp_path / "a.tar", files))
    assert [p.folder for p in found] == [None] * 5 + ["4"]


def test_a_comparison_on_shards_is_that_on_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slow in ("_save_sheet", "write_report"):
        monkeypatch.setattr(f"sufficit.comparing.saving.{slow}", lambda *_: None)
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
        settings = settings_from(
            {"model": f"python:{tmp_path / 'model.py'}:make", "data": str(tmp_path / data)}
            | {"methods": ["gradcam"], "device": "cpu", "donors": 2, "value_step": 0.25}
            | {"percent_step": 0.25}
        )
        out = tmp_path / f"out-{data[0]}"
        compare_folder(settings, out, group=2)
        found[data[0]] = [
            pandas.read_parquet(out / m / "scores.parquet") for m in ("gradcam", "random")
        ]
        run = json.loads((out / "run.json").read_text())
        assert run["targets"] == "label"
        assert run["class_folders"] == ({} if data[0] == "s" else {"ant": 0, "bee": 1, "cat": 2})
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
    assert [p.path for p in find_pictures(root)] == wanted
    assert [p.name for p in find_pictures(root)] == [str(p.relative_to(root)) for p in wanted]
    folders = {p.name: p.folder for p in find_pictures(root)}
    assert folders["a/b/c.PNG"] == "a"
    assert folders["b.png"] is None
