"""Every source keeps the same promises, whatever its maps come from."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from extensions import Edges
from small_models import Traces, rand, small, small_model
from sufficit import Classifier, Lax, UserError, explain, resize
from sufficit.data.batch import Batch
from sufficit.data.heatmap_files import write_heatmaps
from sufficit.errors import SkipError
from sufficit.evaluation import batch_of
from sufficit.explainers import EXPLAINERS, Explainer
from sufficit.probes.probe import CALLS
from sufficit.runs.engine import quiet
from sufficit.sources import (
    STRETCHED,
    Cut,
    Fitted,
    Maps,
    MapTensor,
    Source,
    check_names,
    draw,
    noise,
    source_of,
    sources_of,
)

N, SIDE = 4, 16
NAMES = [f"{number}.png" for number in range(N)]
TARGETS = torch.tensor([0, 3, 1, 4])


def grey(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
    return images.mean(1)


def lots(classifier: Classifier, images: Tensor, targets: Tensor) -> Tensor:
    return torch.rand(len(images), *images.shape[2:])


def adapter(seed: int) -> Lax:
    torch.manual_seed(seed)
    lax = Lax(6)
    lax.belong_to(small(), "4")
    return lax


def map_file(place: Path, seed: int) -> Any:
    path = place / "maps.npz"
    maps = rand(N, 4, 5, seed=seed)
    write_heatmaps(path, dict(zip(NAMES, maps, strict=True)))
    return str(path)


def cut(word: str, share: float) -> Cut:
    return Cut(source_of(word, word), share)


# Each kind of source: the same again, and another one of the same name.
KINDS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "word": (lambda _: "gradcam", lambda _: "layercam"),
    "options": (lambda _: ("finer-cam", {"nearest": 2}), lambda _: "finer-cam:nearest=1"),
    "adapter": (lambda _: adapter(0), lambda _: adapter(1)),
    "function": (lambda _: grey, lambda _: lots),
    "random function": (lambda _: lots, lambda _: grey),
    "explainer": (lambda _: EXPLAINERS["gradcam++"], lambda _: EXPLAINERS["layercam"]),
    "random": (lambda _: "random", lambda _: "center"),
    "center": (lambda _: "center", lambda _: "random"),
    "tensor": (lambda _: rand(N, 4, 5), lambda _: rand(N, 4, 5, seed=1)),
    "file": (lambda place: map_file(place, 0), lambda place: map_file(place, 1)),
    "path": (lambda place: Path(map_file(place, 0)), lambda place: Path(map_file(place, 1))),
    "fitted": (lambda _: Fitted("gradcam"), lambda _: Fitted("layercam")),
    "fitted function": (lambda _: Fitted(grey), lambda _: Fitted(grey, fills=("mean",))),
    "cut": (lambda _: cut("gradcam", 0.25), lambda _: cut("gradcam", 0.5)),
    "own class": (lambda _: Edges(), lambda _: Edges(2.0)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, place: Path, which: int = 0, **options: Any) -> Source:
    given = KINDS[kind][which](place)
    name = given if kind in ("random", "center") else getattr(given, "name", "mine")
    return source_of(name if isinstance(name, str) else "mine", given, **options)


def batch_for(classifier: Classifier) -> Batch:
    return batch_of(classifier, rand(N, 3, SIDE, SIDE), TARGETS, names=NAMES)


def heatmaps(source: Source, classifier: Classifier, batch: Batch) -> Tensor:
    """What a run scores of a source, nothing drawn before."""
    return drawn_by(source, classifier, batch.for_another_model()).at(batch.size)


def drawn_by(source: Source, classifier: Classifier, batch: Batch) -> Maps:
    with torch.no_grad(), quiet():
        found = draw(classifier, batch, [source])[source.name]
    source.close()
    return found


@every_kind
def test_maps_are_at_the_images_size_and_in_0_to_1(kind: str, tmp_path: Path) -> None:
    classifier = small()
    found = heatmaps(made(kind, tmp_path), classifier, batch_for(classifier))
    assert found.shape == (N, SIDE, SIDE)
    precise = torch.float64 if kind.startswith(("fitted", "cut")) else torch.float32  # see `cut_at`
    assert found.dtype == precise
    assert 0 <= found.amin() < found.amax() <= 1
    assert not found.requires_grad


@every_kind
def test_the_model_is_left_as_it_was(kind: str, tmp_path: Path) -> None:
    model = small_model().train()
    model[1].eval()
    model[3].weight.requires_grad_(False)
    model[7].bias.grad = torch.ones(5)
    classifier = Classifier(model, layer="4")
    batch, traces = batch_for(classifier), Traces(model)
    heatmaps(made(kind, tmp_path), classifier, batch)
    traces.check()


@every_kind
def test_an_image_alone_has_the_map_it_has_in_a_batch(kind: str, tmp_path: Path) -> None:
    classifier = small()
    batch, source = batch_for(classifier), made(kind, tmp_path)
    whole = heatmaps(source, classifier, batch)
    for row in (2, 0, 3):
        alone = heatmaps(source, classifier, batch.rows([row]))
        torch.testing.assert_close(alone[0], whole[row], atol=1e-5, rtol=0)
    order = [3, 1, 0, 2]
    moved = heatmaps(source, classifier, batch.rows(order))
    torch.testing.assert_close(moved, whole[order], atol=1e-5, rtol=0)


@every_kind
def test_the_digest_is_that_of_the_content(kind: str, tmp_path: Path) -> None:
    found = []
    for which in (0, 0, 1):
        source = made(kind, tmp_path, which)
        found.append(source.digest())
        source.close()
    assert found[0] == found[1] != found[2]


@every_kind
def test_rows_and_joined_maps_are_those_of_the_whole(kind: str, tmp_path: Path) -> None:
    classifier = small()
    batch, source = batch_for(classifier), made(kind, tmp_path)
    drawn = drawn_by(source, classifier, batch)
    some = drawn.rows([2, 0])
    assert torch.equal(some.at(batch.size), drawn.at(batch.size)[[2, 0]])
    assert {n: v.tolist() for n, v in some.columns.items()} == {
        n: v[[2, 0]].tolist() for n, v in drawn.columns.items()
    }
    again = Maps.joined([drawn.rows([0, 1]), drawn.rows([2, 3])], batch.size)
    assert torch.equal(again.at(batch.size), drawn.at(batch.size))
    assert [n for n in again.columns if not n.startswith(CALLS)] == [*source.headings]
    assert {name: marks.tolist() for name, marks in again.notes.items()} == {
        name: marks.tolist() for name, marks in drawn.notes.items()
    }


@every_kind
def test_a_source_is_the_same_in_another_process(kind: str, tmp_path: Path) -> None:
    classifier, source = small(), made(kind, tmp_path)
    batch = batch_for(classifier)
    wanted = heatmaps(source, classifier, batch)
    again = cloudpickle.loads(cloudpickle.dumps(source))
    assert (again.name, again.role) == (source.name, source.role)
    assert torch.equal(heatmaps(again, classifier, batch), wanted)
    assert again.facts() == source.facts()
    again.close()
    source.close()


def test_what_is_drawn_is_remembered_by_the_batch() -> None:
    classifier, passes = small(), []
    batch = batch_for(classifier)
    classifier.model.register_forward_hook(lambda *_: passes.append(1))
    sources = sources_of({"a": "gradcam", "b": "layercam", "c": "gradcam"}, controls=True)
    with quiet():
        found = draw(classifier, batch, sources)
    assert len(passes) == 1, "one pass for all"
    assert [*found] == ["a", "b", "c", "everything", "random", "center"]
    draw(classifier, batch.rows([1, 3]), sources)
    assert len(passes) == 1, "rows keep what is known"
    with quiet():
        draw(classifier, batch.for_another_model(), sources)
    assert len(passes) == 2


def test_sources_draw_what_explain_draws() -> None:
    classifier = small()
    batch = batch_for(classifier)
    stack = rand(N, 4, 5)
    sources = sources_of({"mine": grey, "gradcam": "gradcam", "stored": stack}, seed=7)
    with quiet():
        drawn = draw(classifier, batch, sources)
        wanted = explain(classifier, batch.images, TARGETS)
    expected = {
        "mine": batch.images.mean(1),
        "gradcam": wanted,
        "stored": resize(stack, (SIDE, SIDE)),
        "everything": torch.ones(N, SIDE, SIDE),
        "random": noise((SIDE, SIDE), 7, range(N)),
        "center": explain(classifier, batch.images, TARGETS, "center"),
    }
    assert {*drawn} == {*expected}
    for name, maps in expected.items():
        assert torch.equal(drawn[name].at(batch.size), maps), name


def test_the_control_random_depends_on_seed_and_number_alone() -> None:
    whole = noise((4, 5), 1, [0, 1, 2])
    assert torch.equal(noise((4, 5), 1, [2])[0], whole[2])
    assert not torch.equal(noise((4, 5), 2, [0, 1, 2]), whole)


def test_a_seed_reaches_methods_that_draw_random_numbers(tmp_path: Path) -> None:
    classifier = small()
    batch = batch_for(classifier)
    for kind in ("random function", "random"):
        one, other, again = (
            heatmaps(made(kind, tmp_path, seed=seed), classifier, batch) for seed in (0, 1, 0)
        )
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


# Heatmaps from elsewhere


def written(path: Path, maps: Mapping[str, Tensor]) -> Source:
    write_heatmaps(path, maps)
    return source_of("file", str(path))


def test_images_without_a_usable_map_are_skipped_with_the_reason(tmp_path: Path) -> None:
    classifier = small()
    batch = batch_for(classifier)
    maps = {name: rand(4, 5, seed=k) for k, name in enumerate(NAMES)}
    maps["1.png"] = maps["1.png"] * torch.nan
    del maps["3.png"]
    source = written(tmp_path / "maps.npz", maps)
    with pytest.raises(SkipError) as caught:
        draw(classifier, batch, [source])
    reasons = caught.value.reasons
    assert [*reasons] == [1, 3]
    assert reasons[1] == "its heatmap in maps.npz has NaN or infinite values"
    assert reasons[3] == "no heatmap: maps.npz has no such key"
    left = draw(classifier, batch.rows([0]), [source])["file"]
    assert torch.equal(left.at(batch.size)[0], resize(maps["0.png"][None], batch.size)[0])
    source.close()


def test_a_map_out_of_range_stops_the_run_and_names_image_and_remedy(tmp_path: Path) -> None:
    maps = {name: 2 * rand(4, 5) for name in NAMES}
    source = written(tmp_path / "maps.npz", maps)
    words = r"heatmaps must lie in 0\.\.1, got .* in image 0\.png: .*--normalize minmax"
    with pytest.raises(UserError, match=words):
        draw(small(), batch_for(small()), [source])
    source.close()


def test_keys_may_be_paths_or_stems_and_a_closed_file_opens_again(tmp_path: Path) -> None:
    maps = {"a/1.png": rand(3, 4), "2": rand(2, 2, seed=1)}
    source = written(tmp_path / "maps.npz", maps)
    source.check(small(), ["a/1.png", "b/2.png", "c/3.png"])
    batch = replace(batch_for(small()).rows([0, 1]), names=("a/1.png", "b/2.png"))
    for _ in range(2):
        found = draw(small(), batch.for_another_model(), [source])["file"].at(batch.size)
        for row, one in enumerate(maps.values()):
            assert torch.equal(found[row], resize(one[None], batch.size)[0])
        source.close()


def test_a_file_may_hold_maps_of_several_sizes_and_notes_other_proportions(tmp_path: Path) -> None:
    classifier = small()
    batch = batch_for(classifier)
    sizes = [(4, 4), (3, 3), (4, 8), (16, 16)]
    maps = {name: rand(*size, seed=1) for name, size in zip(NAMES, sizes, strict=True)}
    source = written(tmp_path / "maps.npz", maps)
    found = draw(classifier, batch, [source])["file"]
    for row, name in enumerate(NAMES):
        wanted = resize(maps[name][None], batch.size)[0]
        assert torch.equal(found.at(batch.size)[row], wanted), name
    assert found.notes[STRETCHED].tolist() == [False, False, True, False]
    source.close()


@pytest.mark.parametrize("kind", ["minmax", "percentile", "rank"])
def test_maps_out_of_range_are_normalized_on_request(kind: str, tmp_path: Path) -> None:
    classifier = small()
    batch = batch_for(classifier)
    maps = 7 * rand(N, SIDE, SIDE) - 3
    path = tmp_path / "maps.npz"
    write_heatmaps(path, dict(zip(NAMES, maps, strict=True)))
    from_file = source_of("file", str(path), normalize=kind)
    in_memory = source_of("tensor", maps, normalize=kind)
    one, other = (heatmaps(source, classifier, batch) for source in (from_file, in_memory))
    torch.testing.assert_close(one, other)
    assert (one.amin(), one.amax()) == (0, 1)
    for source in (from_file, in_memory):
        source.check(classifier, NAMES)
        plain = replace(source, normalize="none")  # type: ignore[type-var]
        assert plain.digest() != source.digest()
        for one in (plain, source):
            one.close()


def test_a_file_for_none_of_the_images_is_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "maps.npz", {"other": rand(4, 5)})
    with pytest.raises(UserError, match=r"a heatmap for none of the 4 images.*'0\.png'.*'other'"):
        source.check(small(), NAMES)
    twice = written(tmp_path / "twice.npz", {"x": rand(4, 5)})
    with pytest.raises(UserError, match=r"key 'x' of .* fits 2 images or more"):
        twice.check(small(), ["a/x.png", "b/x.png"])


def test_heatmaps_in_memory_need_one_finite_map_in_0_to_1_per_image() -> None:
    MapTensor("maps", rand(3, 4, 5)).check(small(), ["a", "b", "c"])
    for maps, words in (
        (rand(3, 4, 5), r"\[N,h,w\] with N = 1 images, got \[3, 4, 5\]: give one map per image"),
        (rand(4, 5), r"heatmaps must be \[N,h,w\]"),
        (2 * rand(1, 4, 5), r"heatmaps must lie in 0\.\.1.*normalize=\"minmax\""),
        (rand(1, 4, 5) * torch.nan, "finite"),
    ):
        with pytest.raises(UserError, match=words):
            MapTensor("maps", maps).check(small(), ["a"])
    with pytest.raises(UserError, match="must be finite"):
        MapTensor("maps", rand(1, 4, 5) * torch.nan, "rank").check(small(), ["a"])


# Names, and sources of the user's own


def test_a_source_of_the_users_leaves_the_model_as_it_was() -> None:
    class Careless(Edges):
        def maps(self, model: Classifier, batch: Batch) -> Maps:
            model.model[1].running_mean.fill_(3)
            return super().maps(model, batch)

    with pytest.raises(UserError, match=r"^source edges changed the model: the values of 1\.run"):
        heatmaps(Careless(), small(), batch_for(small()))


def test_what_a_source_draws_at_random_belongs_to_the_image() -> None:
    class Lots(Edges):
        def maps(self, model: Classifier, batch: Batch) -> Maps:
            drawn = torch.rand(len(batch), *batch.size)
            return Maps(drawn, final=True, columns={"edge_share": drawn.mean((1, 2))})

    classifier = small()
    batch, source = batch_for(classifier), Lots()
    whole = draw(classifier, batch, [source])["edges"]
    some = draw(classifier, batch.rows([3, 1]), [source])["edges"]
    assert torch.equal(some.maps, whole.maps[[3, 1]])
    assert torch.equal(some.columns["edge_share"], whole.columns["edge_share"][[3, 1]])


def test_a_source_has_one_name() -> None:
    with pytest.raises(UserError, match="calls itself 'edges' and is given as 'mine'"):
        sources_of({"mine": Edges()})
    with pytest.raises(UserError, match="'random' is the name of a control"):
        sources_of({"random": "gradcam"})
    with pytest.raises(UserError, match="two sources are called 'a'"):
        check_names([MapTensor("a", rand(1, 2, 2)), MapTensor("a", rand(1, 2, 2))], ())
    for name in ("maps", "run.json", "report.html"):
        with pytest.raises(UserError, match="is a file of every run"):
            check_names([MapTensor(name, rand(1, 2, 2))], ("maps",))


def test_controls_come_last_and_once() -> None:
    names = [one.name for one in sources_of({"center": "center", "gradcam": "gradcam"})]
    assert names == ["gradcam", "everything", "random", "center"]
    names = [one.name for one in sources_of(["center", "gradcam"], controls=False)]
    assert names == ["gradcam", "center"]


def test_facts_are_those_of_the_method() -> None:
    facts = source_of("finer", ("finer-cam", {"nearest": 2})).facts()
    assert (facts.kind, facts.options["nearest"], facts.passes) == ("method", 2, 2 + 1)
    assert source_of("mine", grey).facts().kind == "function"
    assert source_of("lax", adapter(0)).facts().kind == "adapter"
    assert source_of("maps", rand(1, 2, 2)).facts().kind == "heatmaps"
    assert isinstance(EXPLAINERS["gradcam"], Explainer)
