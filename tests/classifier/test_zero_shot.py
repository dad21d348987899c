"""CLIP-like models of transformers as classifiers of prompts."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from small_models import Traces, random_images
from sufficit import Classifier, UserError, evaluate, explain
from sufficit.classifier.fingerprint import fingerprint, same
from sufficit.classifier.zero_shot import zero_shot

transformers = pytest.importorskip("transformers")

PROMPTS = ["a cat", "a dog", "a small bird"]
WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "a", "cat", "dog", "small", "bird"]


def write_model(folder: Path, kind: str) -> Path:
    """A tiny random model with tokenizer and processor, as the hub has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(0)
    tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower |= {"intermediate_size": 24}
    text = {**tower, "vocab_size": len(WORDS), "max_position_embeddings": 64, "pad_token_id": 0}
    text |= {"bos_token_id": 1, "eos_token_id": 2}
    vision = {**tower, "image_size": 32, "patch_size": 8}
    if kind == "clip":
        config = transformers.CLIPConfig(
            text_config=text, vision_config=vision, projection_dim=12, logit_scale_init_value=3.0
        )
        model = transformers.CLIPModel(config)
    else:
        config = transformers.SiglipConfig(text_config=text, vision_config=vision)
        model = transformers.SiglipModel(config)
        model.logit_scale.data.fill_(2.0)
        model.logit_bias.data.fill_(-1.5)
    generator = torch.Generator().manual_seed(1)
    for weights in model.parameters():
        if weights.ndim > 1:
            weights.data += 0.2 * torch.randn(weights.shape, generator=generator)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        "<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    ).save_pretrained(folder)
    side = {"height": 32, "width": 32}
    transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=side).save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="module", params=["clip", "siglip"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), request.param)


def test_logits_are_those_of_the_whole_model(folder: Path) -> None:
    classifier = Classifier.load(f"clip:{folder}", prompts=PROMPTS)
    images = random_images(3, 32)
    whole = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    fixed = {"padding": "max_length", "max_length": 64}
    given = fixed if "siglip" in folder.name else {"padding": True}
    tokens = tokenizer(PROMPTS, return_tensors="pt", **given)
    with torch.no_grad():
        wanted = whole(pixel_values=classifier.normalize(images), **tokens).logits_per_image
    assert torch.allclose(classifier(images), wanted, atol=1e-4)
    assert wanted.std(dim=1).min() > 1e-3
    assert classifier.classes == tuple(PROMPTS)
    assert classifier.view is not None
    assert classifier.view.crop == (32, 32)


@pytest.mark.parametrize(
    "method",
    ["gradcam", "rollout", "generic-attribution", "attnlrp", "smoothgrad:samples=3"],
)
def test_methods_explain_and_evaluate_scores_them(folder: Path, method: str) -> None:
    classifier = Classifier.load(f"clip:{folder}", prompts=PROMPTS)
    traces = Traces(classifier.model)
    images, targets = random_images(2, 32), torch.tensor([0, 2])
    found = explain(classifier, images, targets, method)
    assert found.shape == (2, 32, 32)
    assert found.amax() == 1
    scores = evaluate(classifier, images, found, targets, value_step=0.25, percent_step=0.5)
    assert scores.msi.isfinite().all()
    traces.check()


def test_attention_that_may_be_code_from_the_hub_is_refused(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "copied"))
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"attn_implementation": "me/kernel"}))
    for weights in ("default", None):
        with pytest.raises(UserError, match="clip:.* asks for the attention 'me/kernel'"):
            Classifier.load(f"clip:{copied}", prompts=PROMPTS, weights=weights)


def test_prompts_belong_to_the_fingerprint_and_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    one = Classifier.load(f"clip:{folder}", prompts=PROMPTS)
    other = Classifier.load(f"clip:{folder}", prompts=["a cat", "a dog", "a bird"])
    assert same(fingerprint(one), fingerprint(Classifier.load(f"clip:{folder}", prompts=PROMPTS)))
    assert not same(fingerprint(one), fingerprint(other))
    one.save(tmp_path / "saved")
    again = Classifier.load(tmp_path / "saved")
    images = random_images(2, 32)
    assert torch.equal(again(images), one(images))
    assert again.classes == tuple(PROMPTS)
    assert json.loads((tmp_path / "saved/classifier.json").read_text())["recipe"]["options"] == {
        "prompts": PROMPTS
    }


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "two or more different prompts, one per class, got None"),
        (["a cat"], r'or set prompts = \["a cat", "a dog"\] in a RUN.toml.*--prompts .a cat,a dog'),
        ("a cat", "two or more different prompts"),
        (["a cat", " a cat "], "two or more different prompts"),
        (["a cat", ""], "two or more different prompts"),
        (["a cat", 3], "two or more different prompts"),
    ],
)
def test_wrong_prompts_are_refused(folder: Path, prompts: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Classifier.load(f"clip:{folder}", prompts=prompts)


def test_other_models_and_options_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="takes prompts, got trust_remote_code"):
        Classifier.load(f"clip:{folder}", prompts=PROMPTS, trust_remote_code=True)
    with pytest.raises(UserError, match="needs a CLIP-like model.*got Linear: for a plain"):
        zero_shot(torch.nn.Linear(2, 2), None, PROMPTS)


def test_compare_on_the_command_line(folder: Path, tmp_path: Path, sufficit) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 40, 36, 3), dtype=np.uint8)
    for i, one in enumerate(pixels):
        path = tmp_path / "photos" / ("a cat", "a dog")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(one).save(path)
    words = ["--model", f"clip:{folder}", "--data", str(tmp_path / "photos")]
    words += ["--methods", "gradcam,rollout", "--value-step", "0.25"]
    words += ["--percent-step", "0.5", "--checks", "controls,fill,leak"]
    prompts = tmp_path / "prompts.toml"
    prompts.write_text(f"prompts = {json.dumps(PROMPTS)}")
    to = ["--out", str(tmp_path / "run"), "--config", str(prompts)]
    ran = sufficit("compare", *words, *to)
    assert ran.code == 0, ran.err
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["class_names"] == PROMPTS
    assert record["config"]["prompts"] == PROMPTS
    elsewhere = ["--out", str(tmp_path / "other")]
    wrong = sufficit("compare", *words, *elsewhere)
    assert wrong.code == 2
    assert "two or more different prompts" in wrong.err
    plain = [word if word != f"clip:{folder}" else "torchvision:resnet18" for word in words]
    refused = sufficit("compare", *plain, *elsewhere, "--config", str(prompts))
    assert "prompts go with clip:NAME" in refused.err
