"""Where models come from: torchvision, timm, transformers, the demo's net, a saved folder."""

import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from PIL.Image import Resampling
from torch import nn

from sufficit.classifier.checkpoint import (
    DESCRIPTION,
    SAVED_OPTIONS,
    WEIGHTS,
    Parts,
    Recipe,
    View,
    load_weights,
    no_larger_than,
    read_view,
    strange_options,
)
from sufficit.errors import UserError, unknown
from sufficit.files import read_json
from sufficit.seeds import seeded

RANDOM_SEED = 0  # random weights are the same at every load

Made = TypeVar("Made")
Builder = Callable[[str, bool, dict[str, Any]], Parts]


def load(source: str | Path, weights: str | Path | None, options: dict[str, Any]) -> Parts:
    """Build a model by name, or read a saved one, and put weights of one's own into it."""
    scheme, _, name = str(source).partition(":")
    weights = None if weights == "none" else weights
    if scheme in SOURCES and name:
        published = weights == "default"
        with seeded(RANDOM_SEED):
            parts = SOURCES[scheme](name, published, options)
        if weights is not None and not published:
            load_weights(parts.model, Path(weights))
        # A saved classifier must not run code when it is read again, so this one has no recipe.
        return parts if scheme == "python" else replace(parts, recipe=Recipe(str(source), options))
    if Path(source).is_dir():
        if options or weights != "default":
            raise UserError(f"{source} is a saved classifier: it takes no options and no weights")
        return _read(Path(source))
    if Path(source).exists() or "/" in str(source):
        raise UserError(
            f"{source} is no folder with {DESCRIPTION} and {WEIGHTS}: for a file of weights give"
            ' the architecture by name and the file as weights, "torchvision:resnet18" and'
            " weights=FILE"
        )
    if not name and str(source) in _torchvision_names():
        raise UserError(f"Unknown model {source!r}. Did you mean 'torchvision:{source}'?")
    raise unknown(
        "model", str(source), [f"{known}:NAME" for known in SOURCES] + ["a folder's PATH"]
    )


def _read(folder: Path) -> Parts:
    if not (folder / DESCRIPTION).is_file():
        raise UserError(f"{folder} has no {DESCRIPTION}: it is no saved classifier")
    saved = read_json(folder / DESCRIPTION)
    try:
        recipe = Recipe(str(saved["recipe"]["source"]), dict(saved["recipe"]["options"]))
        view = saved["view"] and read_view(saved["view"])
        _refuse_code(recipe, folder)
        _refuse_options(recipe, folder)
        with no_larger_than(folder / WEIGHTS):
            parts = load(recipe.source, None, recipe.options)
        parts = Parts(
            parts.model,
            recipe,
            None if saved["layer"] is None else str(saved["layer"]),
            saved["mean"] and tuple(float(value) for value in saved["mean"]),
            saved["std"] and tuple(float(value) for value in saved["std"]),
            saved["classes"] and tuple(str(name) for name in saved["classes"]),
            view,
        )
    except UserError:
        raise
    except Exception as error:  # an architecture's own code meets a stranger's options
        raise UserError(
            f"{folder / DESCRIPTION} is damaged ({error!r}): save the classifier again"
        ) from error
    load_weights(parts.model, folder / WEIGHTS)
    return parts


def _refuse_code(recipe: Recipe, folder: Path) -> None:
    """A description from a stranger may name an architecture, and nothing that runs."""
    scheme, _, name = recipe.source.partition(":")
    runs = scheme == "python" or recipe.options.keys() & {"trust_remote_code", "code_revision"}
    if runs or scheme not in SOURCES or not name:
        raise UserError(
            f"{folder / DESCRIPTION} names code to run, or no known architecture, which is refused:"
            f" {recipe.source} {recipe.options or ''}"
        )


def _refuse_options(recipe: Recipe, folder: Path) -> None:
    """Raise for an option that could make a library read other files, or the network."""
    known = SAVED_OPTIONS[recipe.source.partition(":")[0]]
    for name in strange_options(recipe):
        raise UserError(
            f"{folder / DESCRIPTION} has the option {name[:100]!r}, which no saved classifier"
            f" may have: one of {', '.join(sorted(known))} was wanted. If you trust it, load"
            f" {recipe.source} with your own options and weights={folder / WEIGHTS}"
        )


def _refuse_random(name: str, published: bool, options: dict[str, Any]) -> None:
    if published and "num_classes" in options:
        raise UserError(
            f"{name} has no published weights for {options['num_classes']} classes: give your own"
            " with weights=FILE, or weights=None for random ones (--weights FILE, --weights none)"
        )


def _torchvision_names() -> list[str]:
    from torchvision import models

    return list(models.list_models(module=models))


def _from_torchvision(name: str, published: bool, options: dict[str, Any]) -> Parts:
    from torchvision import models

    if name not in _torchvision_names():
        raise unknown("torchvision model", name, _torchvision_names())
    _refuse_random(name, published, options)
    weights = models.get_model_weights(name).DEFAULT
    given = weights if published else None
    model = _fetch(name, lambda: models.get_model(name, weights=given, **options))
    preset = weights.transforms()
    crop = options.get("image_size", preset.crop_size[0])
    resize = max(crop, round(preset.resize_size[0] * crop / preset.crop_size[0]))
    view = View((crop, crop), resize, interpolation=preset.interpolation.value)
    classes = None if "num_classes" in options else tuple(weights.meta["categories"])
    mean, std = tuple(preset.mean), tuple(preset.std)
    return Parts(model, None, None, mean, std, classes, view)


def _from_timm(name: str, published: bool, options: dict[str, Any]) -> Parts:
    timm = _extra("timm")
    if not timm.is_model(name.partition(".")[0]):
        raise unknown("timm model", name, timm.list_models())
    _refuse_random(name, published, options)
    model = _fetch(name, lambda: timm.create_model(name, pretrained=published, **options))
    config = timm.data.resolve_model_data_config(model)
    channels, h, w = (int(side) for side in config["input_size"])
    view = View(
        (h, w),
        int(min(h, w) / float(config["crop_pct"])),
        channels,
        config["crop_mode"] == "squash",
        str(config["interpolation"]),
    )
    names = model.pretrained_cfg.get("label_names") if hasattr(model, "pretrained_cfg") else None
    mean, std = tuple(config["mean"]), tuple(config["std"])
    return Parts(model, None, None, mean, std, names and tuple(names), view)


def _from_transformers(name: str, published: bool, options: dict[str, Any]) -> Parts:
    transformers = _extra("transformers")
    auto = transformers.AutoModelForImageClassification
    _refuse_random(name, published, options)
    given = {"num_labels" if key == "num_classes" else key: v for key, v in options.items()}
    if published:
        model = _fetch(name, lambda: auto.from_pretrained(name, use_safetensors=True, **given))
    else:
        config = _fetch(name, lambda: transformers.AutoConfig.from_pretrained(name, **given))
        model = auto.from_config(config)
    processor = _fetch(name, lambda: transformers.AutoImageProcessor.from_pretrained(name))
    labels = tuple(str(model.config.id2label[i]) for i in range(model.config.num_labels))
    mean, std = tuple(processor.image_mean), tuple(processor.image_std)
    return Parts(model, None, None, mean, std, labels, _processor_view(processor))


def _processor_view(processor: Any) -> View:
    """What a processor of transformers does to a picture, as far as a View can say it."""
    size, crop = dict(processor.size), dict(getattr(processor, "crop_size", None) or {})
    how = Resampling(getattr(processor, "resample", None) or 2).name.lower()
    if size.get("shortest_edge") is None:
        return View((int(size["height"]), int(size["width"])), stretch=True, interpolation=how)
    edge = int(size["shortest_edge"])
    share = getattr(processor, "crop_pct", None)  # ConvNeXt's
    if share and edge >= 384:
        return View((edge, edge), stretch=True, interpolation=how)
    if share:
        return View((edge, edge), int(edge / share), interpolation=how)
    h, w = int(crop.get("height", edge)), int(crop.get("width", edge))
    return View((h, w), edge, interpolation=how)


def _from_sufficit(name: str, published: bool, options: dict[str, Any]) -> Parts:
    from sufficit.classifier.architectures import MODELS, build
    from sufficit.classifier.digit_net import SMALL_NETS

    if name in MODELS:
        if published or not {"num_classes", "image_size"} <= options.keys():
            raise UserError(
                f"sufficit:{name} ships without weights: sufficit reproduce trains it, and the"
                " folder RUN/classifier that it saves is the model. In Python, give weights=FILE"
                " or None, num_classes= and image_size="
            )
        return Parts(_fetch(name, lambda: build(name, **options)))
    if name not in SMALL_NETS:
        raise unknown("sufficit model", name, [*SMALL_NETS, *MODELS])
    _refuse_random(name, published, options)
    if published:
        return _read(SMALL_NETS[name].folder)
    return Parts(SMALL_NETS[name].build(**options))


def _from_python(name: str, published: bool, options: dict[str, Any]) -> Parts:
    """Call a function of the user's own: FILE.py:FUNCTION or MODULE:FUNCTION."""
    place, _, function = name.rpartition(":")
    if not place:
        raise UserError(f"python:{name} names no function: write python:FILE.py:FUNCTION")
    build = getattr(_own_module(place), function, None)
    if not callable(build):
        raise UserError(f"{place} has no function {function!r}")
    made = _own(f"{function} of {place}", lambda: build(**options))
    if isinstance(made, nn.Module):
        return Parts(made)
    if not isinstance(getattr(made, "model", None), nn.Module):
        raise UserError(
            f"{function} must return an nn.Module or a Classifier, got {type(made).__name__}"
        )
    told = (made.layer, made.mean, made.std, made.classes, made.view, made.reshape)
    return Parts(made.model, None, *told)


def _own_module(place: str) -> ModuleType:
    """The user's module, whose own folder it may import from."""
    path = Path(place)
    if path.suffix != ".py":
        return _own(place, lambda: import_module(place))
    spec = spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"no Python file at {place}")
    module = module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    loader = spec.loader
    try:
        _own(place, lambda: loader.exec_module(module))
    finally:
        sys.path.pop(0)
    return module


def _own(what: str, run: Callable[[], Made]) -> Made:
    """Run code of the user's, and say in one line what it raised and where."""
    try:
        return run()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{what} raised {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        ) from error


SOURCES: dict[str, Builder] = {
    "torchvision": _from_torchvision,
    "timm": _from_timm,
    "transformers": _from_transformers,
    "sufficit": _from_sufficit,
    "python": _from_python,
}


def known_models() -> Iterator[tuple[str, str]]:
    """Every model that has a name here, with a line about it."""
    from torchvision import models

    from sufficit.classifier.architectures import MODELS
    from sufficit.classifier.digit_net import SMALL_NETS

    for name in SMALL_NETS:
        yield f"sufficit:{name}", "ships with the package, for the demo"
    for name, model in MODELS.items():
        yield f"sufficit:{name}", f"to train with sufficit reproduce: {model.about}"
    for name in _torchvision_names():
        meta = models.get_model_weights(name).DEFAULT.meta
        yield f"torchvision:{name}", f"{meta['num_params'] / 1e6:.1f} million weights, ImageNet"
    try:
        timm = import_module("timm")
    except ImportError:
        yield "timm:NAME", "a thousand more with pip install 'sufficit[timm]'"
        return
    for name in timm.list_models():
        yield (
            f"timm:{name}",
            "pretrained" if timm.is_model_pretrained(name) else "random weights only",
        )


def _extra(package: str) -> ModuleType:
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(
            f"{package} models need the extra: pip install 'sufficit[{package}]'"
        ) from error


def _fetch(name: str, build: Callable[[], Any]) -> Any:
    """Build a model, and say plainly when it can't be downloaded or its options do not fit."""
    try:
        return build()
    except UserError:
        raise
    except TypeError as error:
        raise UserError(f"{name} does not take these options: {error}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{name} could not be had ({str(error).splitlines()[0]}): check name and network, or"
            " give weights of your own: weights=FILE, --weights FILE, or none for random ones"
        ) from error
