"""Data sets of the Hugging Face Hub, on a server of the loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hub_server import hub_of
from shard_files import png, write_shard
from small_runs import FLAGS
from sufficit import UserError
from sufficit.data.images import list_images, open_images
from sufficit.data.loader import Entry, ImageLoader, decode_entry

CLASSES = ["cat", "ant", "bee"]
FEATURES = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": CLASSES}}


def write(path: Path, images: list[bytes], labels: list[int]) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pairs = pa.array([{"bytes": one, "path": None} for one in images], kind)
    table = pa.table({"image": pairs, "label": labels})
    about = {b"huggingface": json.dumps({"info": {"features": FEATURES}}).encode()}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(about), path)


@pytest.fixture
def hub_requests() -> list[str]:
    return []


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_requests: list[str]) -> Iterator[Path]:
    """The folder of a hub's data sets, to which hf:// leads."""
    from huggingface_hub import constants

    with hub_of(tmp_path / "hub", hub_requests) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)  # read from HF_ENDPOINT at the import
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield tmp_path / "hub"


def test_a_data_set_is_read_by_its_parquet_files(hub: Path) -> None:
    contents = [png(k) for k in range(4)]
    for number in range(2):
        some = contents[2 * number :][:2]
        write(hub / "me" / "birds" / "data" / f"train-0000{number}-of-00002.parquet", some, [0, 2])
    (hub / "me" / "birds" / "page.png").write_bytes(png(9))
    for words in ("me/birds", "me/birds@main", "me/birds/data", "me/birds/data/train-*.parquet"):
        found = list_images(f"hf://datasets/{words}")
        assert [image.content() for image in found] == contents
        assert [image.folder for image in found] == ["cat", "bee"] * 2
        assert [image.name for image in found] == [
            f"train-0000{number}-of-00002/{row}" for number in range(2) for row in range(2)
        ]


def test_configurations_and_splits_are_picked_by_the_path(hub: Path) -> None:
    for config in ("large", "small"):
        for split in ("train", "test"):
            write(hub / "me" / "birds" / config / split / "0000.parquet", [png(0)], [1])
    listed = "large/test/0000.parquet, large/train/0000.parquet, small/test/0000.parquet, small/tr"
    with pytest.raises(UserError, match=rf"hf://datasets/me/birds holds several splits \({listed}"):
        list_images("hf://datasets/me/birds")
    with pytest.raises(UserError, match=r"small holds several splits \(test/.*, train/"):
        list_images("hf://datasets/me/birds/small")
    assert len(list_images("hf://datasets/me/birds/small/train")) == 1
    (found,) = list_images("hf://datasets/me/birds@refs/convert/parquet/small/train")
    assert found.content() == png(0)


def test_folders_and_shards_of_the_hub_are_read_too(hub: Path, hub_requests: list[str]) -> None:
    for number in range(20):
        path = hub / "me" / "photos" / "ant" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    found = open_images("hf://datasets/me/photos")
    assert [(i.name, i.folder, i.content()) for i in found] == [
        (f"ant/{number:02d}.png", "ant", png(number)) for number in range(20)
    ]
    hub_requests.clear()
    items = ImageLoader(partial(decode_entry, None)).items(Entry(k, i) for k, i in enumerate(found))
    assert len(items) == 20
    assert sum("/resolve/" in path for path in hub_requests) == 20
    path.with_name("new.png").write_bytes(png(3))
    assert len(list(found)) == 21, "new files are seen"
    write_shard(hub / "me" / "web" / "0.tar", [("a.png", png(5)), ("a.cls", b"1")])
    (one,) = list_images("hf://datasets/me/web/{0..0}.tar")
    assert (one.name, one.folder, one.content()) == ("0.tar/a.png", "1", png(5))


@pytest.mark.parametrize("words", ["me/none", "me/birds@v2", "me/birds/none"])
def test_what_the_hub_does_not_have_is_said(hub: Path, words: str) -> None:
    write(hub / "me" / "birds" / "a.parquet", [png(0)], [1])
    with pytest.raises(
        UserError, match=rf"no folder of images at hf://datasets/{words}: .*HF_TOKEN"
    ):
        list_images(f"hf://datasets/{words}")


@pytest.mark.slow
@pytest.mark.processes
def test_a_comparison_takes_a_data_set_of_the_hub(sufficit, photos: Path) -> None:
    place = photos.parent
    files = sorted(photos.rglob("*.png"))
    labels = [CLASSES.index(path.parent.name) for path in files]
    write(place / "hub" / "me" / "p" / "a.parquet", [path.read_bytes() for path in files], labels)
    model = f"python:{place / 'model.py'}:make"
    words = ["compare", "--model", model, "--methods", "gradcam", *FLAGS]
    local = sufficit(*words, "--data", photos, "--out", place / "local")
    assert local.code == 0, local.err
    requests: list[str] = []
    with hub_of(place / "hub", requests) as address:
        words += ["--data", "hf://datasets/me/p", "--out", str(place / "remote")]
        subprocess.run(
            [sys.executable, "-m", "sufficit.cli", *words],
            env={**os.environ, "HF_ENDPOINT": address, "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
        )
    assert any(path.endswith("/resolve/main/a.parquet") for path in requests)
    rows = [pandas.read_parquet(place / out / "gradcam" / "scores.parquet").drop(columns="image")
            for out in ("local", "remote")]  # fmt: skip
    pandas.testing.assert_frame_equal(*rows, check_exact=True)
