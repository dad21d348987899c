"""Images on object storage: folders, shards, and servers that fail."""

import io
import tarfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas
import pytest
import torch
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from object_server import ObjectServer, busy, denied
from shard_files import png, write_shard
from small_runs import config_for
from sufficit import UserError
from sufficit.data import loader as loading
from sufficit.data import shards
from sufficit.data.image_files import ImageFile
from sufficit.data.images import BadImageError, ImageTensor, SourceImage, list_images, open_images
from sufficit.data.loader import Download, Entry, ImageLoader, decode_entry, downloaded, runs
from sufficit.data.shards import ShardImage
from sufficit.errors import GoneError
from sufficit.runs.engine import run
from sufficit.runs.job import make_job


def put(bucket: str, objects: Mapping[str, bytes]) -> None:
    """Make objects without a request for each."""
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]  # of the server, which is in this process
    for key, content in objects.items():
        backend.put_object(bucket.removeprefix("s3://"), key, content)


def put_folder(bucket: str, folder: Path, prefix: str = "") -> None:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    put(bucket, {prefix + f.relative_to(folder).as_posix(): f.read_bytes() for f in files})


def loader() -> ImageLoader:
    return ImageLoader(partial(decode_entry, None))


def entries_of(root: str) -> list[Entry]:
    return [Entry(number, image) for number, image in enumerate(open_images(root))]


def download(images: Sequence[SourceImage]) -> list[SourceImage]:
    entries = [Entry(number, image) for number, image in enumerate(images)]
    return [entry.image for entry in downloaded(entries)]


def test_a_folder_of_more_than_a_page_is_that_on_disk(bucket: str, tmp_path: Path) -> None:
    one = png(0)
    names = [f"c{n % 3}/{n // 9:03d}/{n}.png" for n in range(200)]
    names += [f"c!/{n}.PNG" for n in range(1100)]  # in one folder
    for name in [*names, "d.png", "notes.txt", "c0/.hidden.txt"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(one)
    put_folder(bucket, tmp_path)
    local, remote = list_images(tmp_path), list_images(bucket)
    assert len(remote) == 1301
    facts = [(image.name, image.folder, image.size) for image in remote]
    assert facts == [(image.name, image.folder, image.size) for image in local]
    assert all(image.file == f"{bucket}/{image.name}" for image in remote)


def test_odd_names_are_listed_and_read(bucket: str) -> None:
    names = ["a b/1 #?%41.png", "é/ü&+.png", "x=1/[2]*.png", "dot./..3.png"]
    objects = {f"in/{name}": png(k) for k, name in enumerate(names)}
    put(bucket, objects | {"in/": b"", "in/a b/": b"", "in//nameless.png": b"x"})
    found = {image.name: image for image in open_images(f"{bucket}/in/")}
    assert sorted(found) == sorted(names)
    assert {name: found[name].content() for name in names} == {
        name: objects[f"in/{name}"] for name in names
    }


def test_files_added_later_are_seen_in_the_same_process(bucket: str) -> None:
    put(bucket, {"in/a/1.png": png(0)})
    source = open_images(f"{bucket}/in")
    assert [image.name for image in source] == ["a/1.png"]
    put(bucket, {"in/a/2.png": png(1), "in/b/3.png": png(2)})
    assert [image.name for image in source] == ["a/1.png", "a/2.png", "b/3.png"]


def test_a_missing_or_bad_object_is_skipped(bucket: str, object_server: ObjectServer) -> None:
    objects = {"in/a.png": png(0), "in/b.png": png(1), "in/c.png": b"", "in/d.png": b"no image"}
    put(bucket, objects)
    entries = entries_of(f"{bucket}/in")
    object_server.client().delete_object(Bucket=bucket.removeprefix("s3://"), Key="in/b.png")
    reader = loader()
    (item,) = reader.items(entries)
    assert item.pixels.equal(ImageFile(f"{bucket}/in/a.png", "a.png", None).read(None))
    assert [(name, why.partition(" (")[0]) for name, why in reader.skipped.items()] == [
        ("b.png", "can't be opened"),
        ("c.png", "a file of 0 bytes, the limit is 67108864"),
        ("d.png", "not a readable image"),
    ]
    with pytest.raises(BadImageError, match="can't be opened .*no such object"):
        entries[1].image.read(None)
    assert [entry.image.is_there() for entry in entries[:2]] == [True, False]


def test_an_object_that_is_replaced_after_it_was_listed_is_refused(bucket: str) -> None:
    put(bucket, {"in/a.png": png(0), "in/b.png": png(1)})
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        member = tarfile.TarInfo("a.png")
        member.size = len(png(0))
        tar.addfile(member, io.BytesIO(png(0)))
    put(bucket, {"s/0.tar": shard.getvalue()})
    images = [*list_images(f"{bucket}/in"), *list_images(f"{bucket}/s")]
    assert [len(one.content()) for one in images] == [len(png(k)) for k in (0, 1, 0)]
    put(bucket, {"in/a.png": png(2), "s/0.tar": shard.getvalue() + b"\0"})
    for image in (images[0], images[2]):
        for read in (image.content, lambda image=image: download([image])):
            with pytest.raises(UserError, match=f"^{image.file} was changed after it was listed"):
                read()
    assert images[1].content() == png(1)
    with pytest.raises(UserError, match=r"a\.png was changed"):
        loader().items([Entry(k, image) for k, image in enumerate(images)])


def test_an_address_without_a_bucket_is_refused() -> None:
    with pytest.raises(UserError, match="s3:// names no folder: write s3://BUCKET/FOLDER"):
        list_images("s3://")


def test_a_folder_that_vanishes_is_no_bad_image(bucket: str, object_server: ObjectServer) -> None:
    put(bucket, {"in/a.png": png(0), "out/b.png": png(1)})
    entries = entries_of(f"{bucket}/in")
    object_server.client().delete_object(Bucket=bucket.removeprefix("s3://"), Key="in/a.png")
    with pytest.raises(GoneError, match=r"/in can't be read any more .* to resume"):
        loader().items(entries)


@pytest.mark.slow
def test_a_server_that_fails_ends_the_run_and_skips_nothing(
    bucket: str, object_server: ObjectServer
) -> None:
    put(bucket, {f"in/{k}.png": png(k) for k in range(4)})
    entries = entries_of(f"{bucket}/in")
    object_server.faults.append(denied("GET", "2.png"))
    with pytest.raises(GoneError, match=r"2\.png can't be reached .*credentials"):
        loader().items(entries)
    object_server.faults[:] = [busy(1, "GET", "2.png")]
    assert len(loader().items(entries)) == 4, "a busy server is asked again"
    object_server.stop()
    reader = loader()
    with pytest.raises(GoneError, match="can't be reached .*same command to resume"):
        reader.items(entries)
    assert reader.skipped == {}
    with pytest.raises(GoneError, match="can't be reached"):
        list_images(f"{bucket}/in")
    object_server.start()
    assert len(loader().items(entries)) == 4


def test_what_is_not_there_or_not_allowed_is_said_when_it_is_listed(
    bucket: str, object_server: ObjectServer
) -> None:
    put(bucket, {"in/a.txt": b"words"})
    for address in (f"{bucket}/none", "s3://no-such-bucket-here/in"):
        with pytest.raises(UserError, match=f"no folder of images at {address}: "):
            list_images(address)
    with pytest.raises(UserError, match=f"no images in {bucket}/in: expected files ending in"):
        list_images(f"{bucket}/in")
    with pytest.raises(UserError, match=r"no file at .*/0\.tar: check the path or the range"):
        list_images(f"{bucket}/{{0..1}}.tar")
    object_server.faults.append(denied())
    with pytest.raises(GoneError, match="can't be reached .*credentials"):
        list_images(f"{bucket}/in")


def write_shards(folder: Path, number: int = 3, each: int = 40) -> Path:
    """Shards with labels, a long name, a bad name and a cut."""
    for shard in range(number):
        files = []
        for k in range(each):
            content = png(shard * each + k)
            files += [(f"{k:03d}.png", content), (f"{k:03d}.cls", f"{k % 3}".encode())]
        files += [("long/" * 40 + "x.png", png(0)), ("../out.png", png(1))]
        write_shard(folder / f"{shard}.tar", files, tarfile.PAX_FORMAT)
    cut = folder / f"{number - 1}.tar"
    cut.write_bytes(cut.read_bytes()[:30_000])
    return folder


@pytest.mark.slow
def test_remote_shards_are_the_local_ones_bit_for_bit(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path / "s")
    put_folder(bucket, tmp_path / "s", "s/")
    monkeypatch.setattr(shards, "AHEAD", 4096)  # several requests per shard
    local = list_images(tmp_path / "s")
    for words in ("s", "s/{0..2}.tar", "s/*.tar"):
        remote = list_images(f"{bucket}/{words}")
        facts = [(i.name, i.folder, i.problem, i.size, i.start) for i in remote]
        assert facts == [(i.name, i.folder, i.problem, i.size, i.start) for i in local]
    both = [(image, found) for image, found in zip(local, download(remote), strict=True)]
    good = [(image, found) for image, found in both if not image.problem]
    assert len(good) > 80
    assert all(found.content() == image.content() for image, found in good)
    assert all(isinstance(found, Download) for _, found in good)
    assert all(
        image.content() == found.content()
        for image, found in zip(remote, local, strict=True)
        if not image.problem
    )
    bad = [found for image, found in both if image.problem]
    assert bad
    for image in bad:
        with pytest.raises(BadImageError):
            image.read(None)


def test_few_requests_read_a_shard(bucket: str, object_server: ObjectServer) -> None:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as shard:
        for number in range(200):
            about = tarfile.TarInfo(f"{number}.png")
            about.size = 40_000
            shard.addfile(about, io.BytesIO(bytes([number]) * about.size))
    put(bucket, {"a.tar": written.getvalue()})
    object_server.requests.clear()
    images = list_images(f"{bucket}/a.tar")
    assert len(images) == 200
    assert len(object_server.requests) <= 8  # 8 MB: two for headers, and some for its size
    object_server.requests.clear()
    found = download([images[k] for k in (5, 3, 4, 6, 100)])
    assert len(object_server.requests) == 2
    assert [one.content()[0] for one in found] == [5, 3, 4, 6, 100]
    assert {len(one.content()) for one in found} == {40_000}


def test_one_request_reads_neighbours_only() -> None:
    def image(file: str, start: int, size: int = 10) -> ShardImage:
        return ShardImage(file, f"{file}/{start}", None, "", size, "", start)

    near, far = image("a", 10 + loading.GAP), image("a", 31 + 2 * loading.GAP)
    large = image("b", 10, loading.MOST_RUN)
    files = [ImageFile("c", "c", None), ImageFile("d", "d", None)]
    found = runs([far, *files, large, near, image("b", 0), image("a", 0)])
    assert found == [[image("a", 0), near], [far], [image("b", 0)], [large], *([f] for f in files)]


def test_images_at_hand_are_not_downloaded(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(0))
    images = [*list_images(tmp_path), ImageTensor("b", None, torch.zeros(3, 2, 2))]
    assert [one is other for one, other in zip(download(images), images, strict=True)] == [True] * 2


def test_a_comparison_on_object_storage_is_that_on_disk(bucket: str, photos: Path) -> None:
    put_folder(bucket, photos, "photos/")
    inside = []
    for path in sorted(photos.rglob("*.png")):
        inside += [(path.name, path.read_bytes()), (f"{path.stem}.cls", path.parent.name.encode())]
    write_shard(photos.parent / "s" / "0.tar", inside)
    put_folder(bucket, photos.parent / "s", "s/")
    rows = {}
    for data in (str(photos), f"{bucket}/photos", f"{bucket}/s/{{0..0}}.tar"):
        config = config_for(photos, data=data, methods=["gradcam"])
        out = photos.parent / f"out-{len(rows)}"
        run(make_job(config, unit=4), out, progress=False)
        rows[data] = pandas.read_parquet(out / "gradcam" / "scores.parquet")
    local, *others = rows.values()
    for other in others:
        pandas.testing.assert_frame_equal(
            local.drop(columns="image"), other.drop(columns="image"), check_exact=True
        )
    assert local["image"].tolist() == others[0]["image"].tolist()
