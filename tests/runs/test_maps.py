"""Heatmap sources: files and tensors, controls drawn again, pixels packed without loss."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sufficit.runs.explanations import MapBatch, Sample, draw_sources
from sufficit.runs.maps import (
    MapFile,
    MapTensor,
    maps_from_file,
    noise,
    pack,
    unpack,
)
from torch import Tensor

from own_model import MODEL
from small_models import rand
from small_runs import config_for, run_small
from sufficit import UserError, explain, normalize, resize
from sufficit.classifier.classifier import Classifier
from sufficit.data.heatmap_files import write_heatmaps
from sufficit.data.images import BadImageError, ImageFile, ImageTensor, list_images
from sufficit.data.loader import Entry
from sufficit.explainers.explanation import DrawnMaps
from sufficit.runs.store import Store


def entry(name: str, number: int = 0) -> Entry:
    return Entry(number, ImageFile(name, name, None))


def own_classifier() -> Classifier:
    made: dict[str, object] = {}
    exec(MODEL, made)
    return made["make"]()  # type: ignore[operator]  # the function of the text


def test_a_file_gives_each_image_its_map(tmp_path: Path) -> None:
    maps = {"a/1.png": rand(3, 4), "2": 4 * rand(2, 2, seed=1) - 1}
    write_heatmaps(tmp_path / "maps.npz", maps)
    source = MapFile(tmp_path / "maps.npz")
    source.check(["a/1.png", "b/2.png", "c/3.png"])
    assert torch.equal(source.read(entry("a/1.png")), maps["a/1.png"])
    with pytest.raises(UserError, match=r"heatmaps must lie in 0\.\.1.*b/2\.png"):
        source.read(entry("b/2.png"))
    stretched = MapFile(tmp_path / "maps.npz", normalize="minmax")
    assert torch.equal(stretched.read(entry("b/2.png")), normalize(maps["2"][None])[0])
    with pytest.raises(BadImageError, match=r"no heatmap: maps\.npz has no such key"):
        source.read(entry("c/3.png"))
    assert source.digest() != stretched.digest()
    source.close()
    assert torch.equal(source.read(entry("a/1.png")), maps["a/1.png"]), "it opens again"
    again = pickle.loads(pickle.dumps(source))  # a worker opens it itself
    assert torch.equal(again.read(entry("a/1.png")), maps["a/1.png"])
    for one in (source, stretched, again):
        one.close()


def test_a_map_with_nan_is_a_bad_image(tmp_path: Path) -> None:
    write_heatmaps(tmp_path / "maps.npz", {"a": torch.tensor([[0.5, torch.nan]])})
    source = MapFile(tmp_path / "maps.npz")
    with pytest.raises(BadImageError, match=r"its heatmap in maps\.npz has NaN or infinite"):
        source.read(entry("a.png"))
    source.close()


def test_a_file_for_other_images_is_refused(tmp_path: Path) -> None:
    write_heatmaps(tmp_path / "maps.npz", {"x": rand(2, 2)})
    with pytest.raises(
        UserError, match=r"none of the 2 images.*'a/1\.png', its keys like 'x': use"
    ):
        MapFile(tmp_path / "maps.npz").check(["a/1.png", "b/1.png"])
    with pytest.raises(UserError, match=r"key 'x' of .* fits 2 images or more"):
        MapFile(tmp_path / "maps.npz").check(["a/x.png", "b/x.png"])


def test_heatmaps_in_memory_need_one_map_in_0_to_1_per_image() -> None:
    source = MapTensor(rand(3, 4, 5))
    source.check(["a", "b", "c"])
    image = ImageTensor("b", None, rand(3, 8, 8))
    assert torch.equal(source.read(Entry(1, image)), source.maps[1])
    with pytest.raises(UserError, match=r"\[N,h,w\] with N = 2 images, got \[3, 4, 5\]: give one"):
        source.check(["a", "b"])
    with pytest.raises(UserError, match=r"heatmaps must be \[N,h,w\]"):
        MapTensor(rand(4, 5)).check(["a"])
    with pytest.raises(UserError, match=r"heatmaps must lie in 0\.\.1"):
        MapTensor(2 * rand(1, 4, 5)).check(["a"])
    assert source.digest() != MapTensor(source.maps.flip(0)).digest()


def drawn_by(
    classifier: Classifier,
    sources: dict[str, Any],
    images: Tensor,
    targets: Tensor,
    numbers: list[int],
    given: list[dict[str, Tensor]],
    seed: int = 0,
) -> dict[str, DrawnMaps]:
    """What a run draws of images with these numbers and given maps."""
    config: Any = SimpleNamespace(seed=seed, layer=None)
    job: Any = SimpleNamespace(classifier=classifier, sources=sources, config=config)
    found = zip(numbers, images, given, strict=True)
    items = [Sample(entry(str(k), k), pixels, maps, "", None, "") for k, pixels, maps in found]
    return draw_sources(job, items, images, targets)


def test_all_sources_are_drawn_as_explain_draws_them_and_stored_without_loss(
    tmp_path: Path,
) -> None:
    classifier, images, targets = own_classifier(), rand(3, 3, 12, 10), torch.tensor([0, 2, 1])
    given = [{"file": rand(4, 5, seed=k)} for k in range(3)]
    stack = torch.stack([one["file"] for one in given])
    sources = {
        "mine": lambda model, images, targets: images.mean(1),
        "gradcam": "gradcam",
        "file": MapTensor(stack),
        "random": "random",
        "middle": "center",
    }
    numbers = [4, 5, 6]
    drawn = drawn_by(classifier, sources, images, targets, numbers, given, seed=7)
    assert list(drawn) == list(sources)
    noises = [np.random.default_rng([7, k]).random((12, 10), dtype=np.float32) for k in numbers]
    expected = {
        "mine": images.mean(1),
        "gradcam": explain(classifier, images, targets),
        "file": resize(stack, (12, 10)),
        "random": torch.from_numpy(np.stack(noises)),
        "middle": explain(classifier, images, targets, "center"),
    }
    batch = MapBatch(numbers, ["a", "b", "c"], images, targets, drawn)
    _, tensors, facts = batch.as_file(sources)
    assert list(tensors) == ["maps/mine", "maps/gradcam", "maps/file"], "controls are drawn again"
    store = Store(tmp_path)
    store.write("heatmaps", 0, tensors, facts)
    again = maps_from_file(store.read("heatmaps", 0), 7)
    for name, wanted in expected.items():
        assert torch.equal(drawn[name].at((12, 10)), wanted), name
        assert torch.equal(again[name].at((12, 10)), wanted), name


def test_maps_of_several_sizes_are_resized_one_by_one() -> None:
    classifier, images, goals = own_classifier(), rand(2, 3, 12, 10), torch.tensor([0, 1])
    given = [{"file": rand(4, 5)}, {"file": rand(3, 3, seed=1)}]
    sources = {"file": MapTensor(rand(2, 1, 1))}
    drawn = drawn_by(classifier, sources, images, goals, [0, 1], given)
    for row, one in enumerate(given):
        assert torch.equal(drawn["file"].at((12, 10))[row], resize(one["file"][None], (12, 10))[0])


def test_the_control_random_depends_on_the_number_of_the_image_alone() -> None:
    images = rand(3, 3, 4, 5)
    whole = noise(images, 1, [0, 1, 2])
    assert torch.equal(noise(images[:1], 1, [2])[0], whole[2])
    assert not torch.equal(noise(images, 2, [0, 1, 2]), whole)


def test_packed_images_lose_nothing() -> None:
    whole = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    floats = unpack(whole)
    assert torch.equal(pack(floats), whole)
    assert pack(floats).dtype == torch.uint8
    between = floats + 1e-4
    assert torch.equal(pack(between), between), "values between two bytes stay as they are"


def test_maps_of_other_proportions_are_counted(photos: Path, tmp_path: Path) -> None:
    names = [image.name for image in list_images(photos)]
    write_heatmaps(tmp_path / "maps.npz", {name: rand(5, 10) for name in names})
    config = config_for(photos, methods=[str(tmp_path / "maps.npz")], leak=False, controls=False)
    results = run_small(config, tmp_path / "out")
    assert results.record["stretched_heatmaps"] == names
    assert any("11 heatmaps (first ant/00.png) have other" in one for one in results.remarks())
