"""Untrusted classifiers and adapters: one clear error, and no code, no file, no memory more."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sufficit import Classifier, Lax, UserError
from sufficit.classifier import loading as sources
from untrusted_files import (
    ANY,
    CHANGES,
    CUT,
    DEEP_JSON,
    FUZZ,
    HUGE,
    bent,
    described,
    reads,
    resnet,
)


@pytest.mark.parametrize(
    "text", [DEEP_JSON, '{"channels": ' + HUGE + "}", " " * (2**24 + 1) + "{}", "\udcff", ""]
)
def test_json_that_is_no_description_is_one_line(adapter: Path, saved: Path, text: str) -> None:
    for path, load in (
        (adapter / "config.json", Lax.from_pretrained),
        (saved / "classifier.json", Classifier.load),
    ):
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(UserError, match=rf"{path.name} could not be read") as told:
            load(path.parent)
        assert len(str(told.value)) < 500


def test_an_adapter_larger_than_its_weights_is_never_made(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    usual = torch.nn.init.kaiming_uniform_
    monkeypatch.setattr(
        "torch.nn.init.kaiming_uniform_", lambda t, **k: made.append(t.numel()) or usual(t, **k)
    )
    config = json.loads((adapter / "config.json").read_text())
    (adapter / "config.json").write_text(json.dumps(config | {"channels": 60_000, "widths": [200]}))
    with pytest.raises(UserError, match="asks for a larger model than the file can fill"):
        Lax.from_pretrained(adapter)
    assert made == []


VIEW = {"crop": [64, 64], "resize": None, "channels": 3, "stretch": False}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": resnet(num_classes=10**8)}, "asks for a larger model"),
        ({"recipe": resnet(num_classes=10**15)}, "asks for a larger model"),
        ({"recipe": resnet(num_classes=-1)}, "could not be read"),
        ({"recipe": {"source": "sufficit:digits", "options": {"num_classes": -1}}}, "is corrupt"),
        ({"recipe": {"source": "sufficit:digits", "options": {"width": 10**5}}}, "larger"),
        ({"recipe": "python:evil.py:run"}, "is corrupt"),
        ({"recipe": {"source": "python:evil.py:run", "options": {}}}, "names code to run"),
        ({"view": VIEW | {"interpolation": "magic"}}, "is corrupt"),
        ({"view": VIEW | {"interpolation": "bilinear", "crop": [10**6, 10**6]}}, "1..16384 pixels"),
        ({"view": VIEW | {"interpolation": "bilinear", "crop": [64]}}, "is corrupt"),
        ({"mean": ["a", "b", "c"]}, "is corrupt"),
        ({"classes": 7}, "is corrupt"),
    ],
)
def test_a_saved_classifier_is_what_it_says_or_one_line(
    saved: Path, changes: dict[str, object], words: str
) -> None:
    described(saved, **changes)
    with pytest.raises(UserError, match=words):
        Classifier.load(saved)


@pytest.mark.parametrize(
    ("source", "option", "value"),
    [
        ("timm:resnet18", "checkpoint_path", "/elsewhere/weights.pth"),
        ("timm:resnet18", "pretrained", True),
        ("timm:resnet18", "pretrained_cfg", {"file": "/elsewhere/weights.pth"}),
        ("timm:resnet18", "pretrained_cfg_overlay", {"hf_hub_id": "a/b"}),
        ("timm:resnet18", "cache_dir", "/elsewhere"),
        ("torchvision:resnet18", "weights", "DEFAULT"),
        ("torchvision:resnet18", "pretrained", True),
        ("torchvision:resnet18", "norm_layer", "x"),
        ("transformers:a/b", "cache_dir", "/elsewhere"),
        ("transformers:a/b", "revision", "other"),
        ("transformers:a/b", "proxies", {"https": "evil"}),
        ("transformers:a/b", "token", True),
        ("sufficit:digits", "weights", "/elsewhere/weights.pth"),
    ],
)
def test_a_saved_classifier_makes_no_library_read_other_files(
    saved: Path, monkeypatch: pytest.MonkeyPatch, source: str, option: str, value: object
) -> None:
    asked = list[object]()
    scheme = source.partition(":")[0]
    monkeypatch.setitem(sources.SOURCES, scheme, lambda *given: asked.append(given))
    described(saved, recipe={"source": source, "options": {"num_classes": 10, option: value}})
    with pytest.raises(UserError, match=f"has the option '{option}', which no saved classifier"):
        Classifier.load(saved)
    assert asked == []


def test_a_saved_classifier_keeps_the_options_of_its_shape(tmp_path: Path) -> None:
    options = {"num_classes": 4, "drop_rate": 0.5, "global_pool": "max"}
    whole = Classifier.load("timm:resnet10t", weights=None, **options)
    again = Classifier.load(whole.save(tmp_path / "saved"))
    images = torch.rand(1, 3, 64, 64)
    assert torch.equal(again(images), whole(images))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_adapters_with_any_bytes_are_read_or_refused(adapter: Path, name: str) -> None:
    whole = (adapter / name).read_bytes()

    @FUZZ
    @given(CHANGES, CUT)
    def bend(changes: list[tuple[int, int]], cut: int | None) -> None:
        (adapter / name).write_bytes(bent(whole, changes, cut))
        reads(lambda: Lax.from_pretrained(adapter))

    bend()


def test_descriptions_with_anything_in_a_place_are_read_or_refused(saved: Path) -> None:
    whole = json.loads((saved / "classifier.json").read_text())

    @FUZZ
    @given(st.sampled_from(sorted(whole)), ANY)
    def bend(key: str, value: object) -> None:
        (saved / "classifier.json").write_text(json.dumps(whole | {key: value}))
        reads(lambda: Classifier.load(saved))

    bend()
