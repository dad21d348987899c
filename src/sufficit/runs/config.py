"""Every option of a run, declared once: flags, RUN.toml, Python and the page read it from here."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sufficit.declared import option
from sufficit.errors import UserError, unknown
from sufficit.files import refuse_secrets, writing

METHODS = ("gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam")
KINDS = ("accuracy", "confidence")
# The options that name a model.
MODEL = (
    *("model", "weights", "num_classes", "prompts", "output", "size", "layer"),
    *("device", "precision"),
)
MOST_BYTES = 2**20  # of a RUN.toml
UNIT = 32  # images per unit
# A run with few images has this many units, so that an interruption loses little, if its forward
# passes times weights are LONG: half a minute on a CPU. Shorter runs are faster in one unit.
FEWEST_UNITS = 8
LONG = 2 * 10**9
BUDGET = 10_000  # forward passes on masked images that a run of few images may take by default
SAMPLED = 26  # masks per image beyond that: a tenth of the work, MSI's interval 1 to 5 % wider
SEARCHED = 100  # the same while alpha_min is searched for
MANY = 10_000  # images whose mean needs no more than the fewest masks
RANKED = 18  # masks per image from which msi_rank is scored by default: the fewest it can have
DONORS = 16  # per image, for leakage
FEW_DONORS = 4  # where masks are sampled on more than FEW images
FEW = 200  # images up to which a mask has the many donors
CHECKS = {
    "controls": "score maps that ignore the image, which any method must beat",
    "fill": "MSI on few masks under a fill that is not among --fills, on up to 5,000 images",
    "leak": "does the shape of a mask reveal the class? On up to 5,000 images",
    "alpha-curve": "MSI over alpha_min on up to 16 images",
    "regions": "how many separate parts of a mask suffice alone?",
    "head": "do the maps change when the output layer is made random? On 8 images",
    "ceiling": "what a search for each image reaches, on up to 64 images; 1,500 passes each",
}
DEFAULT_CHECKS = ("controls", "fill", "leak", "alpha-curve")
CHECK_GROUPS = {"default": DEFAULT_CHECKS, "all": tuple(CHECKS), "none": ()}
QUICK = {"images": 32, "calls": SAMPLED, "checks": ("controls", "fill")}
QUICK_WORDS = f"32 images, {SAMPLED} masks per image, no leakage, no curve over alpha_min"

# The panels of --help.
_input = partial(option, panel="Input")
_method = partial(option, panel="Methods")
_scoring = partial(option, panel="Scoring")
_compute = partial(option, panel="Compute")
_output = partial(option, panel="Output")
# Options are shown by --help (FIRST), by --help-all (no word), or set in a RUN.toml alone (TOML).
FIRST = "first"
TOML = "toml"


@dataclass(frozen=True)
class RunConfig:
    """The model, the images, the heatmap sources, and how they are scored."""

    model: str = _input(
        MISSING,
        "torchvision:NAME, timm:NAME, transformers:NAME, clip:NAME with prompts, the folder of a"
        " saved classifier, or your own python:FILE.py:FUNCTION.",
        shown=FIRST,
    )
    data: str = _input(
        MISSING,
        "Folder of images; class folders give labels. Or tar shards, as in 'web/{000..012}.tar', or"
        " parquet files. Local, s3://, gs://, or hf://datasets/OWNER/NAME.",
        shown=FIRST,
    )
    methods: tuple[str, ...] = _method(
        METHODS,
        "Heatmap sources, comma-separated: a method, with options as in finer-cam:nearest=5, the"
        " folder of a LAX adapter, python:FILE.py:FUNCTION, or a heatmap file (.npz, .safetensors)."
        " NAME=SOURCE gives a name.",
        "--methods",
        "-m",
        shown=FIRST,
    )
    images: int | None = _input(
        None, "Score a random subset of N images. Default: all.", least=1, shown=FIRST
    )
    quick: bool = _input(
        False, f"A first look: {QUICK_WORDS}, where you do not say otherwise.", shown=FIRST
    )
    layer: str | None = _method(None, "Feature layer by name; found automatically for most models.")
    normalize: Literal["none", "minmax", "percentile", "rank"] = _method(
        "none",
        "How the maps of a heatmap file are brought to 0..1: none (they are), minmax, percentile"
        " (clipped at the 99th first), or rank. MSI depends on it.",
        shown=TOML,
    )
    truth: str | None = _input(
        None,
        "Where the objects are: a folder of masks named as the images or of Pascal VOC .xml, COCO's"
        " .json, or a .csv. Adds pointing game, IoU and others.",
    )
    targets: Literal["auto", "label", "prediction"] = _scoring(
        "auto", "Class to score each image for. auto: labels where there are any.", shown=FIRST
    )
    alpha_min: float | Literal["search"] = _scoring(
        0.5,
        "Pixels at or above it are marked: a number in 0..1, or search, which finds the best one"
        " on up to 500 of the images.",
        shown=FIRST,
    )
    score: str = _scoring(
        "accuracy",
        "What a masked image scores: accuracy, confidence, or python:FILE.py:FUNCTION, a number per"
        " image from what the model returns.",
    )
    fills: tuple[str, ...] = _scoring(
        ("black",),
        "What hidden pixels become: black, mean, blur, noise, road (imputed from neighbours), drop"
        " (tokens of a ViT). Every column is scored with each, as in black,blur.",
        shown=FIRST,
    )
    checks: tuple[str, ...] = _scoring(
        ("default",),
        f"Trust checks: default ({', '.join(DEFAULT_CHECKS)}), all, none, or a list of"
        f" {', '.join(CHECKS)}.",
        shown=FIRST,
    )
    twin: str | None = _scoring(
        None,
        "Also score with this classifier of the same classes, made by train-twin: msi_twin, ...",
    )
    donors: int | None = _scoring(
        None,
        f"Images of other classes under each mask, for leakage. Default: {DONORS}; {FEW_DONORS}"
        f" with sampled masks on more than {FEW} images.",
        least=1,
        most=10**6,
        shown=TOML,
    )
    columns: tuple[str, ...] | None = _scoring(
        None, "paper (the default), all, or columns by name, as in msi,srg."
    )
    calls: int | Literal["auto", "exact"] = _scoring(
        "auto",
        "Masks per image and source: a number (drawn by seed; means stay unbiased), or exact."
        f" auto: as many as {BUDGET:,} forward passes allow, {SAMPLED} or more. From {MANY:,}"
        " images on, and with --within: the fewest.",
    )
    within: float | None = _scoring(
        None,
        "Score images in random order until the 95 % interval of every method's MSI is within"
        " ± this, as in 0.01.",
        least=1e-6,
        most=1,
    )
    value_step: float = _scoring(0.01, "Step of the pixel-value curves.")
    percent_step: float = _scoring(0.02, "Step of the percentage curves.")
    weights: str = _input(
        "default", "default (published), none (random), or a .safetensors, .pt or .pth file."
    )
    prompts: tuple[str, ...] | None = _input(
        None, "Classes of a clip: model, comma-separated, as in 'a cat,a dog'.", shown=TOML
    )
    num_classes: int | None = _input(
        None, "Number of classes, for your own weights.", least=2, most=10**5, shown=TOML
    )
    output: Literal["logits", "probabilities"] | None = _input(
        None,
        "What the model gives; probabilities if it ends in a softmax or a sigmoid.",
        shown=TOML,
    )
    size: str | None = _input(None, "Input size: 224 or 224x320 (height x width).")
    image_column: str | None = _input(
        None, "Column of parquet files that holds the images, if there are several.", shown=TOML
    )
    label_column: str | None = _input(
        None, "Column that holds the labels. Default: label, labels or fine_label.", shown=TOML
    )
    on_error: Literal["skip", "stop"] = _input("skip", "What an unreadable image does.", shown=TOML)
    device: str = _compute("auto", "auto, cpu, cuda, cuda:1 or mps.", shown=FIRST)
    precision: Literal["fp32", "bf16", "fp16"] = _compute(
        "fp32", "Precision of weights and inputs."
    )
    compile: Literal["auto", "on", "off"] = _compute(
        "auto",
        "Score with a compiled copy of the model. auto: on CUDA, in runs that are long enough.",
        shown=TOML,
    )
    batch_size: int | None = _compute(None, "Masked images per forward pass.", least=1, most=10**6)
    unit_size: int | None = _compute(
        None,
        f"Images per checkpoint file. Default: {UNIT}; fewer in short runs.",
        least=1,
        most=10**5,
    )
    save_heatmaps: bool = _output(
        False, "Also write METHOD/heatmaps.npz at image size (large).", shown=TOML
    )
    log: Literal["tensorboard", "wandb", "mlflow", "csv"] | None = _output(
        None,
        "Also log the numbers there: tensorboard, wandb, mlflow (extras), or csv.",
        shown=TOML,
    )
    seed: int = _compute(0, "Seed of everything random.", least=0, most=2**63 - 1)

    def __post_init__(self) -> None:
        if not self.fills:
            raise UserError("fills must name at least one fill, got none: black is the default")
        for word in self.checks:
            if word not in {**CHECKS, **CHECK_GROUPS}:
                raise unknown("check", word, [*CHECK_GROUPS, *CHECKS])

    @property
    def wanted_checks(self) -> frozenset[str]:
        """The checks that are asked for, groups resolved."""
        return frozenset(one for word in self.checks for one in CHECK_GROUPS.get(word, (word,)))

    @property
    def score_kind(self) -> Literal["accuracy", "confidence"]:
        """Return the kind of score in curves; a function of the user's counts as a confidence."""
        return "accuracy" if self.score == "accuracy" else "confidence"

    @property
    def most_calls(self) -> int | None:
        """Masks per image, at most; None for all."""
        return self.calls if isinstance(self.calls, int) else None

    @property
    def column_words(self) -> tuple[str, ...]:
        """The columns that are wanted; msi_rank is one of the usual ones, where masks allow."""
        if self.columns is not None:
            return self.columns
        if self.most_calls is not None and self.most_calls < RANKED:
            return ("paper",)
        return ("paper", "msi_rank")

    def column_options(self) -> dict[str, str | None]:
        """Return the options for `open_images`."""
        return {"image_column": self.image_column, "label_column": self.label_column}

    def for_images(self, n: int, sources: int, *, masks: int, least: int) -> "RunConfig":
        """Return the config for n images: with numbers of calls and donors where none were given.

        `masks` is the number of all masks of an image and source, `least` the smallest number that
        leaves every column unbiased. The result depends on numbers alone, not on the machine, so
        that a run can be resumed elsewhere.

        >>> config = config_from({"model": "m", "data": "d"})
        >>> images = (4, 8, 500, 50_000)
        >>> [config.for_images(n, 7, masks=354, least=18).calls for n in images]
        ['exact', 178, 26, 18]
        """
        calls = self.calls
        if calls == "auto":
            # A run that stops once it is certain gains more from images than from masks.
            many = n >= MANY or self.within is not None
            calls = calls_for(n, sources, masks=masks, least=least, many=many)
        donors = self.donors
        if donors is None:
            is_sampled = isinstance(calls, int) and n > FEW
            donors = FEW_DONORS if is_sampled else DONORS
        return replace(self, calls=calls, donors=donors)


def calls_for(
    images: int, sources: int, *, masks: int, least: int, many: bool
) -> int | Literal["exact"]:
    """Return the masks per image and source of a run, where they are not given.

    With `many` images the fewest do. They depend on numbers alone, not on the machine, so that a
    run can be resumed elsewhere.

    >>> [calls_for(n, 7, masks=354, least=18, many=n >= 10_000) for n in (4, 8, 500, 50_000)]
    ['exact', 178, 26, 18]
    """
    wanted = least if many else SAMPLED
    wanted = max(wanted, least, BUDGET // (images * max(sources, 1)))
    return "exact" if wanted >= masks else wanted


@dataclass(frozen=True)
class Workers:
    """Who computes a run. It decides no number, so that a run may be resumed with others."""

    count: int | None = None  # None: one here, or as many as a cluster has room for
    address: str | None = None  # of a Ray cluster; None: Ray is started on this machine
    gpus: float | None = None  # per worker; None: one if the model is on a GPU
    cpus: float = 1.0  # and threads, per worker
    unit_timeout: float | None = None  # seconds after which a worker is replaced

    def __post_init__(self) -> None:
        count = self.count
        if count is not None and (type(count) is not int or count < 1):
            raise UserError(f"workers must be 1 or more, got {count!r}")
        bounds = {"cpus": self.cpus, "gpus": self.gpus, "unit_timeout": self.unit_timeout}
        for name, value in bounds.items():
            if value is None:
                continue
            if type(value) not in (int, float):
                raise UserError(f"{name} must be a number, got {value!r:.100}")
            zero_is_fine = name == "gpus"
            if not (0 < value < math.inf or (zero_is_fine and value == 0)):
                bound = "0 or more" if zero_is_fine else "more than 0"
                raise UserError(f"{name} must be {bound}, got {value}")
        address = self.address
        if address is None or address == "auto":
            return
        host, _, port = str(address).removeprefix("ray://").rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(
                f"workers must be a number, auto, HOST:PORT or ray://HOST:PORT, got {address!r}: as"
                " in ray://10.0.0.1:10001"
            )


def config_from(values: Mapping[str, Any]) -> RunConfig:
    """Return a config from plain values by name; defaults for the rest."""
    # Of the command line, a RUN.toml, Python or the page: all arrive as plain values.
    known = check_values(values)
    if known.get("quick"):
        known = QUICK | known  # --quick does not override what was said
    for one in fields(RunConfig):
        if one.name not in known and one.default is MISSING:
            raise UserError(
                f"no {one.name} given: pass --{one.name} or set it in --config RUN.toml"
            )
    return RunConfig(**known)


def check_values(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return values of known options, each converted to its type; raise for any other."""
    hints = get_type_hints(RunConfig)
    for name, value in values.items():
        words = [value] if isinstance(value, str) else value
        for word in words if isinstance(words, list | tuple) else ():
            refuse_secrets(str(word))
        if name not in hints:
            raise unknown(f"option{where}", name, hints)
    return {name: _converted(name, value, hints[name]) for name, value in values.items()}


def read_toml(path: Path) -> dict[str, Any]:
    """Return the options that a RUN.toml sets, those of workers aside."""
    content = {name: one for name, one in _read_table(path).items() if name != "workers"}
    return check_values(content, f" in {path.name}")


def _read_table(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "not a file")
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): give a RUN.toml") from error
    if len(text) > MOST_BYTES:
        raise UserError(f"{path} has more than {MOST_BYTES} bytes: give a RUN.toml")
    try:
        content = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:  # broken TOML, text or numbers
        raise UserError(f"{path} is not valid TOML ({error}): fix or remove it") from error
    return content


def read_workers(path: Path) -> dict[str, Any]:
    """Return the table [workers] of a RUN.toml: what `Workers` has."""
    found = _read_table(path).get("workers", {})
    if not isinstance(found, dict):
        raise UserError(f"workers in {path.name} must be a table, [workers], got {found!r:.100}")
    known = [one.name for one in fields(Workers)]
    for name in found:
        if name not in known:
            raise unknown(f"option of [workers] in {path.name}", name, known)
    return dict(found)


def workers_from(values: Mapping[str, Any]) -> Workers | None:
    """Return the workers of plain values; None where units are computed in this process.

    `workers` is the word of the command line: a count, or the address of a cluster. The others are
    the fields of `Workers`.

    >>> workers_from({"workers": "4"}).count, workers_from({"workers": "auto"}).address
    (4, 'auto')
    """
    given = {name: one for name, one in values.items() if name != "workers" and one is not None}
    word = values.get("workers")
    if word is not None:
        try:
            given["count"] = int(word)
        except ValueError:
            given["address"] = word
    found = Workers(**given)  # also without workers, so that a wrong time is refused
    return None if found.count is None and found.address is None else found


def write_toml(path: Path, config: RunConfig) -> None:
    """Write the RUN.toml that repeats a run."""
    # tomllib only reads. JSON's values are valid TOML, but for the character DEL.
    values = {name: value for name, value in asdict(config).items() if value is not None}
    lines = [
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items()
    ]
    try:
        content = "".join(lines).replace("\x7f", "\\u007f").encode()
    except UnicodeEncodeError as error:
        raise UserError(f"a path is not valid UTF-8 ({error.object[:80]!r}): rename it") from error
    with writing(path) as part:
        part.write_bytes(content)


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type.

    >>> kinds_of(int | None), kinds_of(str)
    ((<class 'int'>, <class 'NoneType'>), (<class 'str'>,))
    """
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _converted(name: str, value: Any, hint: Any) -> Any:
    """Return the value as the type of an option; raise where it has another or is out of bounds."""
    if name == "score" and isinstance(value, str):
        is_function = value.startswith("python:")
        if value not in KINDS and not is_function:
            raise unknown("score", value, (*KINDS, "python:FILE.py:FUNCTION"))
    kinds = kinds_of(hint)
    # Bounds are declared beside the option.
    about = RunConfig.__dataclass_fields__[name].metadata
    if value is None and type(None) in kinds:
        return None
    fits = [_as(value, kind) for kind in kinds]
    found = next((one for one in fits if one is not None), None)
    if found is None:
        words = [word for kind in kinds for word in _words(kind)]
        if isinstance(value, str) and get_origin(hint) is Literal:
            raise unknown(name, value, words)
        try:
            shown = repr(value)
        except (ValueError, RecursionError):
            shown = "a value too large to show"
        if len(shown) > 200:
            shown = f"{shown[:200]}..."
        raise UserError(f"{name} must be {' or '.join(words)}, got {shown}")
    if about["least"] is not None and not found >= about["least"]:  # NaN neither
        raise UserError(f"{name} must be {about['least']} or more, got {found}")
    if about["most"] is not None and found > about["most"]:
        raise UserError(f"{name} must be {about['most']} or less, got {found:.3g}")
    return found


def _as(value: Any, kind: Any) -> Any:
    """Return the value as this type, None where it does not fit."""
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else None
    if get_origin(kind) is tuple:
        words = value.split(",") if isinstance(value, str) else value
        is_list = isinstance(words, list | tuple) and all(isinstance(word, str) for word in words)
        return tuple(words) if is_list else None
    if isinstance(value, bool) != (kind is bool):  # bool is a subclass of int
        return None
    if isinstance(value, int) and abs(value) >= 2**64:  # a seed or a float could not hold it
        return None
    if kind is float and isinstance(value, int):
        return float(value)
    return value if isinstance(value, kind) else None


def _words(kind: Any) -> tuple[str, ...]:
    """Return the words for a type in messages."""
    if get_origin(kind) is Literal:
        return tuple(str(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return ("a list of words",)
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    return (names[kind],) if kind in names else ()
