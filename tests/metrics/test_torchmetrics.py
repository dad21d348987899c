import json
import os
import pickle
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchmetrics import MetricCollection

from reference import COLUMNS, gradient_case, heatmaps_like, join_leaks, leak_case, small_net
from sufficit import Classifier, Pool, UserError, evaluate, leak
from sufficit.metrics import MSI, Evaluation, Fidelity, InsertionDeletion, Leakage, MapMetric
from sufficit.metrics.leakage import TENSORS
from sufficit.metrics.metric import of_region

STEPS = {"value_step": 0.05, "percent_step": 0.1}
SIZE = (8, 6)
ASKED = {
    MSI: ("base_score", "mask_penalty", "msi"),
    InsertionDeletion: (
        "insertion_pixel",
        "deletion_pixel",
        "insertion_percent",
        "deletion_percent",
    ),
    Fidelity: ("fid_minus_pixel", "fid_plus_pixel", "fid_minus_percent", "fid_plus_percent"),
    Evaluation: COLUMNS,
}


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    return Classifier(small_net(size=SIZE, seed=2))


def assert_means(found: dict, wanted: dict, names=None) -> None:
    for name in names or wanted:
        assert float(found[name]) == pytest.approx(wanted[name], abs=1e-6), name


@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize("with_targets", [True, False])
def test_updates_in_pieces_give_what_evaluate_gives_for_all(classifier, kind, with_targets):
    images, heatmaps, targets = gradient_case()
    wanted = evaluate(classifier, images, heatmaps, targets if with_targets else None, **STEPS)
    metric = kind(classifier, **STEPS)
    for part in (slice(0, 3), slice(3, 4), slice(4, 7)):
        metric.update(images[part], heatmaps[part], targets[part] if with_targets else None)
    found = metric.compute()
    assert tuple(found) == ASKED[kind]
    assert_means(found, wanted.mean(), ASKED[kind])
    scores = metric.scores()
    for name in ASKED[kind]:
        torch.testing.assert_close(scores[name], wanted[name], rtol=0, atol=1e-6)
    assert scores.targets.tolist() == wanted.targets.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"alpha_min": 0.437},
        {"score": "confidence"},
        {"fill": "blur"},
        {"fill": torch.tensor([0.1, 0.9, 0.5])},
        {"batch_size": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_mean_what_they_mean_to_evaluate(classifier, options):
    images, heatmaps, targets = gradient_case()
    wanted = evaluate(classifier, images, heatmaps, targets, **STEPS, **options)
    metric = Evaluation(classifier, **STEPS, **options)
    for i in range(7):
        metric.update(images[i : i + 1], heatmaps[i : i + 1], targets[i : i + 1])
    assert_means(metric.compute(), wanted.mean())


def mean_value(heatmaps: Tensor, truth: Tensor | None) -> Tensor:
    """A column of a user's own, of the heatmap alone."""
    return heatmaps.mean((1, 2))


@pytest.mark.parametrize("alpha_min", [0.437, "search"])
@pytest.mark.parametrize(
    "options",
    [
        {"columns": "all"},
        {"columns": ["msi", "msi_rank", "sparseness", "infidelity"], "calls": 26, "seed": 3},
        {"columns": ["complexity", "msi", "iou"]},
        {"metrics": {"own": MapMetric(True, lambda _: mean_value)}},
        {
            "metrics": {
                "above": of_region(True, lambda a: lambda m, _: (m > a).double().mean((1, 2)))
            }
        },
    ],
    ids=["all", "some masks", "order", "own", "own at alpha_min"],
)
def test_every_kind_of_column_is_that_of_evaluate(classifier, alpha_min, options):
    images, heatmaps, targets = gradient_case(9)
    truth = heatmaps_like("random", 9, SIZE, seed=6) > 0.7
    options = {"alpha_min": alpha_min, **STEPS, **options}
    wanted = evaluate(classifier, images, heatmaps, targets, truth=truth, **options)
    metric = Evaluation(classifier, truth=True, **options)
    for part in (slice(0, 2), slice(2, 3), slice(3, 9)):
        metric.update(images[part], heatmaps[part], targets[part], truth=truth[part])
    found = metric.scores()
    assert [*found.columns] == [*wanted.columns]
    assert found.headings.items() >= {n: wanted.headings[n] for n in wanted.columns}.items()
    if alpha_min == "search" and "calls" in options:  # other masks are drawn, see the docstring
        assert found.search.alphas == wanted.search.alphas
        return
    assert found.alpha_min == wanted.alpha_min
    for name in wanted.columns:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-6, equal_nan=True)
    if alpha_min != "search":  # evaluate asks for some masks twice where it searches
        assert found.calls.tolist() == wanted.calls.tolist()


def test_columns_of_the_map_alone_ask_for_no_mask(classifier):
    images, heatmaps, targets = gradient_case()
    wanted = evaluate(classifier, images, heatmaps, targets, columns=["sparseness"])
    metric = Evaluation(classifier, columns=["sparseness"])
    metric.update(images, heatmaps, targets)
    assert metric.scores().sparseness.tolist() == wanted.sparseness.tolist()
    assert metric.scores().calls.tolist() == wanted.calls.tolist()


def test_settings_that_cannot_be_scored_are_refused(classifier):
    with pytest.raises(UserError, match='add "msi"'):
        InsertionDeletion(classifier, alpha_min="search")
    with pytest.raises(UserError, match="calls must be"):
        Evaluation(classifier, calls=3)
    images, heatmaps, targets = gradient_case()
    with pytest.raises(UserError, match="truth=masks"):
        Evaluation(classifier, truth=True).update(images, heatmaps, targets)
    own = Evaluation(classifier.with_score(lambda logits: logits[:, 0]))
    with pytest.raises(UserError, match="no classes"):
        own.update(images, heatmaps, targets)


def test_reset_forgets_what_was_seen(classifier):
    metric = MSI(classifier, **STEPS)
    metric.update(*gradient_case(3, seed=5))
    first = metric.compute()["msi"]
    metric.reset()
    metric.update(*gradient_case(4, seed=2))
    wanted = evaluate(classifier, *gradient_case(4, seed=2), **STEPS).mean()
    assert wanted["msi"] != pytest.approx(float(first), abs=1e-3)
    assert_means(metric.compute(), wanted, ASKED[MSI])
    assert len(metric.scores()) == 4


def test_forward_gives_the_batch_and_keeps_the_sum(classifier):
    images, heatmaps, targets = gradient_case()
    metric = MSI(classifier, **STEPS)
    for part in (slice(0, 4), slice(4, 7)):
        batch = metric(images[part], heatmaps[part], targets[part])
        alone = evaluate(classifier, images[part], heatmaps[part], targets[part], **STEPS)
        assert_means(batch, alone.mean(), ASKED[MSI])
    assert_means(
        metric.compute(),
        evaluate(classifier, images, heatmaps, targets, **STEPS).mean(),
        ASKED[MSI],
    )


@pytest.mark.parametrize("kind", [MSI, Evaluation])
def test_the_search_is_over_all_images_seen(classifier, kind):
    images, heatmaps, targets = gradient_case(9)
    wanted = evaluate(classifier, images, heatmaps, targets, alpha_min="search", **STEPS)
    metric = kind(classifier, alpha_min="search", **STEPS)
    parts = [slice(0, 2), slice(2, 5), slice(5, 9)]
    for part in parts:
        metric.update(images[part], heatmaps[part], targets[part])
    found = metric.compute()
    assert float(found["alpha_min"]) == pytest.approx(wanted.alpha_min)
    assert_means(found, wanted.mean(), ASKED[kind])
    torch.testing.assert_close(metric.scores().search.msi, wanted.search.msi, rtol=0, atol=1e-9)
    # An alpha_min chosen batch by batch would be another one.
    each = {
        evaluate(
            classifier, images[p], heatmaps[p], targets[p], alpha_min="search", **STEPS
        ).alpha_min
        for p in parts
    }
    assert each != {wanted.alpha_min}


def test_a_collection_gives_every_column_of_its_members(classifier):
    images, heatmaps, targets = gradient_case()
    wanted = evaluate(classifier, images, heatmaps, targets, **STEPS).mean()
    collection = MetricCollection(
        [kind(classifier, **STEPS) for kind in ASKED if kind is not Evaluation]
    )
    for part in (slice(0, 3), slice(3, 5), slice(5, 7)):
        collection.update(images[part], heatmaps[part], targets[part])
    found = collection.compute()
    assert set(found) == set(COLUMNS)
    assert_means(found, wanted)
    collection.reset()
    collection.update(images[:3], heatmaps[:3], targets[:3])
    first = evaluate(classifier, images[:3], heatmaps[:3], targets[:3], **STEPS).mean()
    assert_means(collection.compute(), first)


def test_a_collection_keeps_apart_members_that_agree_on_the_first_batch(classifier):
    # A heatmap of zeros and ones has the same masks at both values of alpha_min; the next has not.
    images, heatmaps, targets = gradient_case(6)
    heatmaps[:3] = heatmaps_like("saturated", 3, SIZE).round()
    alphas = {"low": 0.405, "high": 0.435}
    collection = MetricCollection(
        {name: MSI(classifier, alpha_min=alpha, **STEPS) for name, alpha in alphas.items()}
    )
    for part in (slice(0, 3), slice(3, 6)):
        collection.update(images[part], heatmaps[part], targets[part])
    found = collection.compute()
    wanted = {}
    for name, alpha in alphas.items():
        scores = evaluate(classifier, images, heatmaps, targets, alpha_min=alpha, **STEPS)
        wanted[name] = scores.mean()["msi"]
    assert wanted["low"] != wanted["high"]
    for name in alphas:
        assert float(found[f"{name}_msi"]) == pytest.approx(wanted[name], abs=1e-6)


@pytest.mark.parametrize(
    "copied",
    [deepcopy, lambda m: m.clone(), lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "clone", "pickle"],
)
def test_a_copy_continues_by_itself(classifier, copied):
    images, heatmaps, targets = gradient_case()
    metric = Evaluation(classifier, **STEPS)
    metric.update(images[:3], heatmaps[:3], targets[:3])
    other = copied(metric)
    other.update(images[3:], heatmaps[3:], targets[3:])
    assert_means(other.compute(), evaluate(classifier, images, heatmaps, targets, **STEPS).mean())
    first = evaluate(classifier, images[:3], heatmaps[:3], targets[:3], **STEPS)
    assert_means(metric.compute(), first.mean())


def test_states_saved_and_loaded_continue(classifier):
    images, heatmaps, targets = gradient_case()
    metric = MSI(classifier, **STEPS)
    metric.persistent(True)
    metric.update(images[:3], heatmaps[:3], targets[:3])
    other = MSI(classifier, **STEPS)
    other.persistent(True)
    other.load_state_dict(metric.state_dict())
    other.update(images[3:], heatmaps[3:], targets[3:])
    wanted = evaluate(classifier, images, heatmaps, targets, **STEPS).mean()
    assert_means(other.compute(), wanted, ASKED[MSI])


def test_the_metric_has_no_weights_of_its_own(classifier):
    metric = MSI(classifier, **STEPS)
    assert list(metric.parameters()) == []
    assert metric.state_dict() == {}


# The leak


def test_updates_give_what_leak_gives_for_each_batch(classifier) -> None:
    images, heatmaps, targets = leak_case(12)
    metric = Leakage(classifier, donors=3, seed=4, alpha_min=0.4)
    metric.update(images[:7], heatmaps[:7], targets[:7])
    first = leak(classifier, images[:7], heatmaps[:7], targets[:7], donors=3, seed=4, alpha_min=0.4)
    found = metric.compute()
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        first.mean() | {"leak_ratio": first.ratio}
    )
    metric.update(images[7:], heatmaps[7:], targets[7:])
    assert len(metric.leaked()) == 12
    assert metric.leaked().donors[:7].tolist() == first.donors.tolist()
    metric.reset()
    with pytest.raises(UserError, match="no images"):
        metric.leaked()


def test_updates_with_a_pool_give_what_leak_gives_for_all(classifier) -> None:
    images, heatmaps, targets = leak_case(9)
    pool = Pool(*leak_case(8, seed=5))
    wanted = leak(classifier, images, heatmaps, targets, donors=3, pool=pool)
    metric = Leakage(classifier, donors=3, pool=pool)
    for i in range(0, 9, 2):
        metric.update(images[i : i + 2], heatmaps[i : i + 2], targets[i : i + 2])
    for name in TENSORS:
        assert getattr(metric.leaked(), name).tolist() == getattr(wanted, name).tolist()
    assert float(metric.compute()["leak_ratio"]) == pytest.approx(wanted.ratio)


def test_a_batch_of_one_class_is_left_out_of_the_leak(classifier) -> None:
    images, heatmaps, targets = leak_case(8)
    metric = Leakage(classifier, donors=3)
    metric.update(images, heatmaps, targets)
    before = metric.compute()
    metric.update(images[:1], heatmaps[:1], targets[:1])
    after = metric.compute()
    for name in ("leak", "leak_chance", "leak_ratio"):
        assert float(after[name]) == float(before[name])
    assert metric.leaked().donors.isnan().tolist() == [False] * 8 + [True]


def test_a_metric_that_is_called_draws_for_every_image_its_own_donors(classifier) -> None:
    images, heatmaps, targets = leak_case(9)
    pool = Pool(*leak_case(7, seed=5))
    metric = Leakage(classifier, donors=3, pool=pool)
    for part in (slice(0, 4), slice(4, 9)):
        metric(images[part], heatmaps[part], targets[part])
    wanted = leak(classifier, images, heatmaps, targets, donors=3, pool=pool)
    assert metric.leaked().donors.tolist() == wanted.donors.tolist()
    assert metric.leaked().donors_chance.tolist() == wanted.donors_chance.tolist()


# Two processes

RANKS = """
import json, os, sys
from datetime import timedelta
import torch.distributed as dist

sys.path.insert(0, sys.argv[3])
from reference import gradient_case, leak_case, small_net
from sufficit import Classifier
from sufficit.metrics import Evaluation, Leakage

folder, runs = sys.argv[1], json.loads(sys.argv[2])
second = os.fork()  # so that all of the above is imported once
rank = 0 if second else 1
dist.init_process_group(
    "gloo",
    init_method=f"file://{folder}/store",
    rank=rank,
    world_size=2,
    timeout=timedelta(seconds=60),
)
classifier = Classifier(small_net(seed=2))
steps = {"value_step": 0.05, "percent_step": 0.1}


def means(metric, case, parts):
    for start, stop in parts:
        metric.update(*(tensor[start:stop] for tensor in case))
    return {column: float(value) for column, value in metric.compute().items()}


output = {}
for name, parts in runs.items():
    for alpha_min in (0.5, "search"):
        metric = Evaluation(classifier, alpha_min=alpha_min, **steps)
        found = means(metric, gradient_case(), parts[rank])
        metric.update(*(tensor[:1] for tensor in gradient_case()))
        output[f"{name} {alpha_min}"] = found, len(metric.scores())
    some = Evaluation(classifier, calls=12, **steps)
    output[f"{name} some masks"] = means(some, gradient_case(), parts[rank])
    output[f"{name} leak"] = means(Leakage(classifier, donors=3), leak_case(7), parts[rank])
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(output, file)
dist.barrier()
dist.destroy_process_group()
if second:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))
"""

# For each process the images of each of its updates.
RUNS = {
    "five and two": [[[0, 5]], [[5, 7]]],
    "one and six in three updates": [[[0, 1]], [[1, 3], [3, 6], [6, 7]]],
    "seven and none": [[[0, 7]], []],
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> list[dict]:
    """What each of two processes finds; they are started once, because that is slow."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "ranks.py").write_text(RANKS)
    words = [folder / "ranks.py", folder, json.dumps(RUNS), Path(__file__).parents[1]]
    package = Path(sys.modules["sufficit"].__file__).parents[1]
    paths = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("alpha_min", [0.5, "search"])
def test_two_processes_give_the_numbers_of_one(classifier, outputs, name, alpha_min):
    scores = evaluate(classifier, *gradient_case(), alpha_min=alpha_min, **STEPS)
    wanted = scores.mean() | ({"alpha_min": scores.alpha_min} if scores.search else {})
    for output, parts in zip(outputs, RUNS[name], strict=True):
        found, seen = output[f"{name} {alpha_min}"]
        assert found == pytest.approx(wanted, abs=1e-6)
        # After compute each process holds its own images again, and can continue.
        assert seen == sum(stop - start for start, stop in parts) + 1


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_draw_masks_by_rank_and_number(classifier, outputs, name):
    counts = [sum(stop - start for start, stop in parts) for parts in RUNS[name]]
    names = [f"{rank}/{i}" for rank, count in enumerate(counts) for i in range(count)]
    wanted = evaluate(classifier, *gradient_case(), calls=12, names=names, **STEPS).mean()
    for output in outputs:
        assert output[f"{name} some masks"] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_give_the_leak_over_both(classifier, outputs, name):
    images, heatmaps, targets = leak_case(7)
    metric = Leakage(classifier, donors=3)
    parts = []
    for updates in RUNS[name]:
        metric.reset()
        for start, stop in updates:
            part = slice(start, stop)
            metric.update(images[part], heatmaps[part], targets[part])
        parts += [metric.leaked()] if updates else []
    both = join_leaks(parts)
    for output in outputs:
        wanted = both.mean() | {"leak_ratio": both.ratio}
        assert output[f"{name} leak"] == pytest.approx(wanted, nan_ok=True)
