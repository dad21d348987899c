"""Heatmap files on object storage."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from object_server import ObjectServer, denied
from sufficit.data.heatmap_files import HeatmapError, HeatmapFile, write_heatmaps
from sufficit.errors import GoneError, UserError
from sufficit.files import place

pytestmark = pytest.mark.processes
MAPS = torch.rand(3, 300, 400, generator=torch.Generator().manual_seed(0))
NAMED = {f"cat/{i}.png": one for i, one in enumerate(MAPS)}


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_heatmaps_on_object_storage_are_those_on_disk(
    bucket: str, object_server: ObjectServer, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"maps{suffix}"
    write_heatmaps(path, NAMED) if suffix == ".npz" else save_file(NAMED, path)
    object_server.upload(tmp_path, f"{bucket}/in")
    with HeatmapFile(path) as local, HeatmapFile(place(f"{bucket}/in/maps{suffix}")) as remote:
        assert remote.digest() == local.digest()
        for name, expected in NAMED.items():
            key = remote.key(name)
            assert key is not None
            assert torch.equal(remote.read(key), expected)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_lost_server_is_no_bad_heatmap(
    bucket: str, object_server: ObjectServer, tmp_path: Path, suffix: str
) -> None:
    path = place(f"{bucket}/in/maps{suffix}")
    with pytest.raises(UserError, match=f"no heatmap file at {path}"):
        HeatmapFile(path)
    (tmp_path / f"maps{suffix}").write_bytes(b"broken")
    object_server.upload(tmp_path, f"{bucket}/in")
    with pytest.raises(UserError, match=f"{path} could not be read as heatmaps"):
        HeatmapFile(path)
    object_server.faults.append(denied("GET"))
    with pytest.raises(GoneError, match="to resume"):
        HeatmapFile(path)


def test_a_server_lost_while_heatmaps_are_read_is_no_bad_heatmap(
    bucket: str, object_server: ObjectServer, tmp_path: Path
) -> None:
    path, maps = place(f"{bucket}/maps.npz"), torch.rand(20, 300, 400)  # larger than the buffer
    write_heatmaps(tmp_path / "maps.npz", {f"{i}.png": one for i, one in enumerate(maps)})
    object_server.upload(tmp_path, bucket)
    with HeatmapFile(path) as opened:
        object_server.faults.append(denied("GET"))
        with pytest.raises(GoneError) as raised:
            opened.read("0.png")
        assert not isinstance(raised.value, HeatmapError)
        object_server.faults.clear()
        assert torch.equal(opened.read("0.png"), maps[0])
