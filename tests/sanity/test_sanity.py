"""Sanity checks of methods: the model stays as it is, and answers known beforehand come out."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr
from torch import Tensor, nn
from torchvision import models
from typer.testing import CliRunner

from sufficit import Classifier, UserError, compare, explain
from sufficit.classifier.randomization import (
    Block,
    cascade,
    copied,
    randomise,
)
from sufficit.cli import app
from sufficit.data.digits import synthetic_digits
from sufficit.data.images import read_image
from sufficit.sanity import SanityReport, sanity_check
from sufficit.sanity.checks import Likeness, _verdict
from sufficit.similarity import structural_similarity
from sufficit.statistics import Estimate

IMAGES = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
CLASSES = 3


def small_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def small() -> Classifier:
    return Classifier(small_net().eval(), layer="4")


def means(report: SanityReport, method: str) -> list[float]:
    return [float(found.rank_correlation.nanmean()) for found in report.cascade_of(method)]


# What is made random


def names(model: nn.Module, size: int, steps: int = 8) -> list[str]:
    return [block.name for block in cascade(Classifier(model), torch.rand(1, 3, size, size), steps)]


def test_the_stages_of_a_resnet_become_random_from_the_output_downwards() -> None:
    assert names(models.resnet18(), 32) == [
        "fc", "layer4", "layer3", "layer2", "layer1", "bn1", "conv1",
    ]  # fmt: skip


def test_too_many_blocks_are_joined_and_the_head_stands_alone() -> None:
    net = models.resnet18()
    assert names(net, 32, steps=4) == ["fc", "layer4 to layer3", "layer2 to layer1", "bn1 to conv1"]
    assert names(net, 32, steps=3) == ["fc", "layer4 to layer2", "layer1 to conv1"]
    assert names(net, 32, steps=1) == ["fc to conv1"]
    (everything,) = cascade(Classifier(net), torch.rand(1, 3, 32, 32), 1)
    assert sorted(everything.modules) == sorted(
        name for name, m in net.named_modules() if list(m.parameters(recurse=False))
    )


class Turned(nn.Module):
    """Its layers are written down in another order than they are used in, and one never is."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 2)
        self.second = nn.Conv2d(4, 4, 1)
        self.first = nn.Conv2d(3, 4, 1)
        self.twice = nn.Conv2d(4, 4, 1)
        self.scale = nn.Parameter(torch.arange(1.0, 5.0)[:, None, None])

    def forward(self, images: Tensor) -> Tensor:
        seen = self.second(self.twice(self.first(images * self.scale[:3])))
        return self.head(self.twice(seen).mean((2, 3)))


def test_the_order_is_that_of_use_and_not_of_writing() -> None:
    blocks = cascade(Classifier(Turned()), IMAGES)
    assert [block.name for block in blocks] == ["head", "twice", "second", "first", "(model)"]
    assert blocks[-1].modules == ("", "unused")


def test_a_part_that_is_never_called_goes_with_the_module_around_it() -> None:
    vit = tiny_vit()
    blocks = cascade(Classifier(vit), IMAGES)
    names = [name for block in blocks for name in block.modules]
    attention = "encoder.layers.encoder_layer_0.self_attention"
    assert names.index(f"{attention}.out_proj") == names.index(attention) + 1
    assert blocks[0].modules == ("heads.head",)
    assert names[-1] == ""  # the class token is the model's own, and used first
    own = {name for name, m in vit.named_modules() if list(m.parameters(recurse=False))}
    assert sorted(names) == sorted(own)


def test_a_module_with_a_reset_of_its_own_uses_it_and_statistics_go_too() -> None:
    net = small_net()
    with torch.no_grad():
        for tensor in [*net.parameters(), net[1].running_mean, net[1].running_var]:
            tensor.fill_(7)
    randomise(net, Block("all", ("0", "1", "3", "7")), seed=0)
    assert (net[1].weight == 1).all()
    assert (net[1].bias == 0).all()
    assert (net[1].running_mean == 0).all()
    assert (net[1].running_var == 1).all()
    for module, fan_in in ((net[0], 27), (net[3], 54), (net[7], 32)):
        assert 0.5 < float(module.weight.detach().abs().max()) * math.sqrt(fan_in) <= 1
        assert module.weight.unique().numel() == module.weight.numel()


class Bare(nn.Module):
    """Weights and statistics without a reset of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(60.0).view(3, 4, 5))
        self.register_buffer("running_mean", torch.full((3,), 5.0))
        self.register_buffer("running_var", torch.full((3,), 5.0))


def test_a_module_without_one_has_its_values_permuted() -> None:
    module = Bare()
    randomise(module, Block("all", ("",)), seed=0)
    assert not torch.equal(module.weight, Bare().weight)
    assert module.weight.detach().flatten().sort().values.tolist() == list(range(60))
    assert module.running_mean.tolist() == [0, 0, 0]
    assert module.running_var.tolist() == [1, 1, 1]


def test_random_weights_depend_on_seed_and_name_and_on_nothing_else() -> None:
    nets = [small_net() for _ in range(4)]
    randomise(nets[0], Block("all", ("7", "3", "0")), seed=1)
    for name in ("0", "7", "3"):
        torch.rand(5)  # what was drawn before does not matter
        randomise(nets[1], Block(name, (name,)), seed=1)
    randomise(nets[2], Block("all", ("7", "3", "0")), seed=2)
    same, other = (torch.equal(nets[0][0].weight, net[0].weight) for net in nets[1:3])
    assert same
    assert not other
    twins = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    randomise(twins, Block("all", ("0", "1")), seed=0)
    assert not torch.equal(twins[0].weight, twins[1].weight)


def test_a_model_without_weights_is_refused() -> None:
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(UserError, match="no weights to randomise"):
        sanity_check(Classifier(net, layer="0"), IMAGES, methods=["center"])


def test_a_model_that_can_not_be_copied_is_refused() -> None:
    net = small_net()
    net.made = net[0].weight * 2  # no leaf, so no copy
    with pytest.raises(UserError, match="Cannot copy the model"):
        copied(Classifier(net, layer="4"))


# The check


def state(model: nn.Module) -> list[object]:
    return [
        [(name, value.clone()) for name, value in model.state_dict().items()],
        [module.training for module in model.modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        [p.requires_grad for p in model.parameters()],
        [p.grad for p in model.parameters()],
    ]


def test_the_model_and_the_randomness_outside_stay_bit_for_bit() -> None:
    net = small_net().train()
    net[1].eval()
    net[3].requires_grad_(False)
    before, lots = state(net), torch.get_rng_state()
    methods = ["gradcam", "kpca-cam", "random"]
    sanity_check(Classifier(net, layer="4"), IMAGES, methods=methods)
    after = state(net)
    for (name, was), (_, is_now) in zip(before[0], after[0], strict=True):
        assert torch.equal(was, is_now), name
    assert before[1:] == after[1:]
    assert torch.equal(lots, torch.get_rng_state())


def test_each_step_is_the_comparison_done_by_hand() -> None:
    classifier, goals = small(), torch.tensor([0, 1, 2, 0, 1, 2])
    report = sanity_check(classifier, IMAGES, goals, ["kpca-cam", "layercam"], seed=4)
    changed = Classifier(copy.deepcopy(classifier.model), layer="4")
    steps = report.cascade_of("layercam")
    assert [found.layer for found in steps] == ["7", "3", "1", "0"]
    assert [found.step for found in steps] == [1, 2, 3, 4]
    original = explain(classifier, IMAGES, goals, "layercam")
    for found in steps:
        randomise(changed.model, Block(found.layer, (found.layer,)), seed=4)
        maps = explain(changed, IMAGES, goals, "layercam")
        pairs = zip(original.flatten(1), maps.flatten(1), strict=True)
        expected = [spearmanr(a, b).statistic for a, b in pairs]
        np.testing.assert_allclose(found.rank_correlation, expected, atol=1e-9)
        np.testing.assert_allclose(found.ssim, structural_similarity(original, maps), atol=1e-9)


def test_a_method_that_reads_features_only_does_not_feel_the_head() -> None:
    report = sanity_check(small(), IMAGES, methods=["kpca-cam", "gradcam"])
    assert report.cascade_of("kpca-cam")[0].rank_correlation.tolist() == [1.0] * 6
    assert report.cascade_of("kpca-cam")[0].ssim.tolist() == pytest.approx([1.0] * 6)
    assert means(report, "kpca-cam")[1] < 0.9
    assert means(report, "gradcam")[0] < 0.9


def test_controls_that_ignore_the_model_are_flagged() -> None:
    report = sanity_check(small(), IMAGES, methods=["center", "random"], seed=3)
    for name in ("center", "random"):
        assert means(report, name) == [1.0] * 4
        assert report.verdicts()[name] == "insensitive"
        assert report.sentences()[name] == (
            "insensitive to the weights: rank correlation is still 1.00 with all layers random."
        )


def test_grad_cam_falls_on_the_digits() -> None:
    digits = synthetic_digits(24, seed=1)
    classifier = Classifier.load("sufficit:digits")
    report = sanity_check(classifier, digits.images, digits.labels, ["gradcam", "center"])
    found = means(report, "gradcam")
    assert len(found) == 7
    assert found[0] < 0.6
    assert abs(found[-1]) < 0.25
    assert report.verdicts() == {"gradcam": "passes", "center": "insensitive"}
    assert report.sentences()["gradcam"].startswith("passes: rank correlation falls to ")


def test_the_targets_stay_the_originals_whatever_the_copy_says() -> None:
    classifier, seen = small(), []

    def watch(model: Classifier, images: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            seen.append((targets.tolist(), model(images).argmax(1).tolist()))
        return images.mean(1)

    report = sanity_check(classifier, IMAGES, methods={"bright": watch}, seed=1)
    predicted = classifier(IMAGES).argmax(1).tolist()
    assert [targets for targets, _ in seen] == [predicted] * 5
    assert any(said != predicted for _, said in seen[1:])
    assert report.targets.tolist() == predicted
    assert report.verdicts() == {"bright": "insensitive"}
    assert means(report, "bright") == [1.0] * 4


def test_a_method_of_ones_own_may_follow_the_model_and_draw_lots() -> None:
    def noisy(model: Classifier, images: Tensor, targets: Tensor) -> Tensor:
        return torch.rand(len(images), 16, 16)

    def weights(model: Classifier, images: Tensor, targets: Tensor) -> Tensor:
        first = model.bare[0].weight.detach().flatten().sigmoid()
        return first[:144].view(1, 12, 12).repeat(len(images), 2, 2)[:, :16, :16]

    report = sanity_check(small(), IMAGES, methods={"noisy": noisy, "weights": weights})
    assert means(report, "noisy") == [1.0] * 4  # the same lots for every model
    assert means(report, "weights")[:3] == [1.0] * 3
    assert abs(means(report, "weights")[3]) < 0.3


def test_the_last_step_does_not_depend_on_how_many_there_are() -> None:
    reports = [sanity_check(small(), IMAGES, methods=["layercam"], steps=n) for n in (1, 2, 8)]
    ends = [report.cascade[-1].rank_correlation for report in reports]
    assert [len(report.cascade) for report in reports] == [1, 2, 4]
    torch.testing.assert_close(ends[0], ends[2], equal_nan=True)
    torch.testing.assert_close(ends[1], ends[2], equal_nan=True)


def tiny_vit() -> nn.Module:
    torch.manual_seed(0)
    return models.VisionTransformer(
        image_size=16, patch_size=4, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=16,
        num_classes=CLASSES,
    ).eval()  # fmt: skip


def timm_vit() -> nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=3, num_heads=2,
        num_classes=CLASSES,
    ).eval()  # fmt: skip


def transformers_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
            image_size=16, patch_size=4, num_labels=CLASSES,
        )
    ).eval()  # fmt: skip


@pytest.mark.parametrize("build", [tiny_vit, timm_vit, transformers_vit])
def test_vision_transformers_are_checked_too(build) -> None:
    model = build()
    with torch.no_grad():  # published weights look at some tokens more than at others
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight))
    report = sanity_check(Classifier(model), IMAGES, methods=["rollout", "layercam"])
    for untouched in report.cascade_of("rollout")[:2]:  # the head, and the norm before it
        assert untouched.rank_correlation.tolist() == [1.0] * 6
    assert means(report, "rollout")[2] < 1
    assert max(means(report, "rollout")[-1], means(report, "layercam")[-1]) < 0.5
    assert len({found.layer for found in report.cascade}) == len(report.cascade_of("rollout"))


def test_steps_must_be_positive() -> None:
    with pytest.raises(UserError, match="steps must be 1 or more, got 0"):
        sanity_check(small(), IMAGES, methods=["center"], steps=0)


# The report


def report_of(*steps: list[float]) -> SanityReport:
    found = tuple(
        Likeness("m", i, f"block{i}", torch.tensor(values).double(), torch.ones(len(values)))
        for i, values in enumerate(steps, 1)
    )
    return SanityReport(found, torch.zeros(len(steps[0])), 0.5, 0)


def test_the_frame_holds_means_intervals_and_counts() -> None:
    frame = report_of([1.0, 1.0, 1.0, 1.0], [0.2, math.nan, 0.4, 0.3]).frame()
    assert list(frame["rank_correlation"]) == pytest.approx([1, 0.3])
    assert list(frame["n"]) == [4, 4]
    assert list(frame["n_nan"]) == [0, 1]
    assert list(frame["step"]) == [1, 2]
    last = frame.iloc[1]
    ends = (last["rank_correlation_low"], last["rank_correlation_high"])
    # Symmetric: the error is 0.1 / sqrt(3), and Student's t for two degrees of freedom is 4.303.
    assert ends == pytest.approx((0.3 - 0.2484, 0.3 + 0.2484), abs=1e-3)


@pytest.mark.parametrize(
    ("low", "mean", "high", "verdict"),
    [
        (0.5, 0.6, 0.7, "insensitive"),
        (0.3, 0.4, 0.49, "passes"),
        (0.3, 0.4, 0.5, "undecided"),
        (0.4, 0.6, 0.7, "undecided"),
        (math.nan, 0.5, math.nan, "undecided"),
        (math.nan, 0.4, math.nan, "undecided"),
    ],
)
def test_the_whole_interval_decides(low: float, mean: float, high: float, verdict: str) -> None:
    assert _verdict(Estimate(mean, low, high, 8, 0, True), 0.5) == verdict


def test_maps_that_mostly_vanish_decide_nothing_and_it_is_said() -> None:
    report = report_of([0.1, math.nan, math.nan, 0.2, math.nan])
    assert report.verdicts() == {"m": "undecided"}
    assert report.sentences()["m"] == "undecided: 3 of 5 images have a constant heatmap."
    report = report_of([0.1, math.nan, 0.1, 0.1])
    assert "(1 of 4 images have a constant heatmap)" in report.sentences()["m"]
    assert report_of([math.nan, math.nan]).verdicts() == {"m": "undecided"}


def test_the_sentence_names_the_block_from_which_the_method_feels_the_weights() -> None:
    report = report_of([0.9] * 4, [0.3] * 4, [0.6] * 4, [0.2] * 4, [0.1] * 4)
    assert report.sentences()["m"] == (
        "passes: rank correlation falls to 0.10 with all layers random, and stays below 0.5 once"
        " block4 is random."
    )


def test_the_figure_has_a_line_per_method() -> None:
    report = sanity_check(small(), IMAGES, methods=["layercam", "center"])
    left, right = report.figure().axes
    for axis, column in ((left, "rank_correlation"), (right, "ssim")):
        frame = report.frame()
        for name in ("layercam", "center"):
            (line,) = (found for found in axis.lines if found.get_label() == name)
            rows = frame[frame["method"] == name]
            assert list(line.get_ydata()) == [1.0, *rows[column]]
        words = [tick.get_text() for tick in axis.get_xticklabels()]
        assert words == ["original", "7", "3", "1", "0"]


# The command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = synthetic_digits(12, seed=4)
    for i, (image, label) in enumerate(zip(made.images, made.labels.tolist(), strict=True)):
        path = tmp_path / "digits" / str(label) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy()).save(path)
    return tmp_path / "digits"


def run(*words: object) -> str:
    done = CliRunner().invoke(app, ["sanity", *map(str, words)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_the_command_writes_what_the_function_gives(folder: Path, tmp_path: Path) -> None:
    (folder / "3").mkdir(exist_ok=True)
    (folder / "3" / "broken.png").write_bytes(b"no picture")
    out = tmp_path / "out"
    printed = run(
        "--model", "sufficit:digits", "--data", folder, "--methods", "gradcam, center",
        "--images", 20, "--out", out, "--seed", 1,
    )  # fmt: skip
    record = json.loads((out / "run.json").read_text())
    assert record["n"] == 12
    assert record["targets"] == "label"
    assert list(record["skipped"]) == ["3/broken.png"]
    assert record["verdicts"]["center"] == "insensitive"
    assert record["config"]["options"] == {"steps": 8}
    assert record["versions"]["torch"]
    frame = pandas.read_csv(out / "sanity.csv")
    names = record["images"]
    images = torch.stack([read_image(folder / name, None) for name in names])
    labels = torch.tensor([int(name.split("/")[0]) for name in names])
    expected = sanity_check(
        Classifier.load("sufficit:digits"), images, labels, ["gradcam", "center"], seed=1
    )
    for column in ("rank_correlation", "ssim", "rank_correlation_low", "n_nan"):
        np.testing.assert_allclose(frame[column], expected.frame()[column], atol=1e-6)
    assert len(frame) == 7 * 2
    assert expected.sentences()["center"][:-1] in printed
    with Image.open(out / "sanity.png") as picture:
        assert picture.width > 1000


def test_the_command_draws_images_by_seed_and_knows_all_class_folders(
    folder: Path, tmp_path: Path
) -> None:
    shared = ["--model", "sufficit:digits", "--data", folder, "--methods", "center", "--images", 5]
    drawn = []
    for seed in (0, 1):
        run(*shared, "--out", tmp_path / str(seed), "--seed", seed, "--steps", 2)
        drawn.append(json.loads((tmp_path / str(seed) / "run.json").read_text())["images"])
    assert [len(names) for names in drawn] == [5, 5]
    assert drawn[0] != drawn[1]
    assert drawn[0] == sorted(drawn[0])


def test_the_command_refuses_before_any_work(folder: Path, tmp_path: Path) -> None:
    shared = ["--model", "sufficit:digits", "--data", folder]
    with pytest.raises(UserError, match="Did you mean 'gradcam'"):
        run(*shared, "--methods", "gradcamm")
    with pytest.raises(UserError, match="is inside"):
        run(*shared, "--out", folder / "inside")
    for path in folder.rglob("*.png"):
        path.rename(folder / path.name)
    for path in folder.iterdir():
        if path.is_dir():
            path.rmdir()
    with pytest.raises(UserError, match="--targets label needs class folders"):
        run(*shared, "--targets", "label", "--out", tmp_path / "out")


def test_compare_says_whose_maps_a_random_output_layer_leaves_alone(sufficit, photos) -> None:
    out = photos.parent / "out"
    words = ["compare", "--model", f"python:{photos.parent / 'model.py'}:make", "--data", photos]
    words += ["--methods", "gradcam,old=kpca-cam", "--checks", "controls,fill,head", "--out", out]
    run = sufficit(*words, "--value-step", 0.25, "--percent-step", 0.5)
    assert run.code == 0, run.err
    summary = json.loads((out / "summary.json").read_text())
    found = {name: one["random_head"] for name, one in summary.items() if "random_head" in one}
    assert {*found} == {"old", "gradcam"}  # not the controls, which see no model
    assert {one["n"] for one in found.values()} == {8}
    old = found["old"]["mean"]
    assert old == pytest.approx(1), "it reads the features below the output layer"
    assert found["gradcam"]["mean"] < 0.9
    told = "The maps of old stay when the output layer is made random."
    assert told in " ".join(run.err.split())
    written = (out / "report.html").read_text()
    assert told in written
    assert "old: rank correlation 1.00. Such maps do not show what this output rests on." in written


def test_compare_in_python_makes_the_head_alone_random_and_leaves_the_model_alone() -> None:
    classifier = Classifier.load("sufficit:digits")
    before = [weight.clone() for weight in classifier.bare.parameters()]
    digits, methods = synthetic_digits(3), ["gradcam", "kpca-cam"]
    images, targets = digits.images, digits.labels
    quick = {"value_step": 0.25, "percent_step": 0.5}
    checks = ("controls", "head")
    result = compare(classifier, images, methods, targets, checks=checks, **quick)
    whole = sanity_check(classifier, images, targets, methods)
    for name in methods:
        first = whole.cascade_of(name)[0].rank_correlation
        found = result.rows[name]["random_head"].to_numpy()
        assert found == pytest.approx(first.numpy(), abs=1e-6)
        estimate = result.summaries[name]["random_head"]
        assert estimate.mean == pytest.approx(float(first.nanmean()))
    assert "random_head" not in result.summaries["center"]  # which sees no model
    assert all(torch.equal(a, b) for a, b in zip(before, classifier.bare.parameters(), strict=True))
    said = "stay when the output layer is made random"
    assert said in result._repr_html_()
    plain = compare(classifier, images, methods, targets, checks=("controls",), **quick)
    assert said not in plain._repr_html_()


def test_the_report_of_a_sanity_check_is_one_page_with_the_verdicts(sufficit, photos) -> None:
    out = photos.parent / "sane"
    words = ["sanity", "--model", f"python:{photos.parent / 'model.py'}:make", "--data", photos]
    run = sufficit(*words, "--methods", "gradcam,center", "--out", out)
    assert run.code == 0, run.err
    page = (out / "report.html").read_text()
    verdicts = json.loads((out / "run.json").read_text())["verdicts"]
    assert verdicts["center"] == "insensitive"
    assert "Insensitive to the weights: " in page
    for name, verdict in verdicts.items():
        assert f'<th scope="row">{name}</th><td>{verdict}</td>' in page
    assert "Only 11 images" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
