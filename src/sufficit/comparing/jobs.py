"""What is to be done: the model, the images and the methods that settings stand for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.classifier.fingerprint import digest, fingerprint
from sufficit.comparing.settings import CONTROLS, Settings
from sufficit.data.finding import ImageSource
from sufficit.data.loader import GROUP, Entry, Group, ImageLoader, Item, Labels, grouped, labels_for
from sufficit.errors import UserError, unknown
from sufficit.explainers import EXPLAINERS, explain_all
from sufficit.explainers.explanation import Method
from sufficit.explainers.lax import Lax, name_of
from sufficit.metrics.plan import Plan, check_asking, make_plan
from sufficit.parsing import classifier_from, fill_from
from sufficit.progress import Progress

FILES = ("curves.png", "pairs.csv", "report.html", "run.json", "RUN.toml", "sheet.png")
RESERVED = ("parts", "summary.json", *FILES)  # no method may be called so: its folder is taken


@dataclass(frozen=True)
class Job:
    """What is to be done: the model, the images, the methods, and how they are scored."""

    classifier: Classifier
    pictures: ImageSource
    labels: Labels
    methods: Mapping[str, Method]
    settings: Settings
    fill: str | Tensor = "black"
    held_out_fill: str | Tensor | None = None
    group: int = GROUP
    progress: bool | Progress | None = None
    columns: tuple[str, ...] | None = None  # all where it is None

    @cached_property
    def plan(self) -> Plan:
        """What is asked of the model for every heatmap."""
        return make_plan(**self.scoring)

    @property
    def scoring(self) -> dict[str, Any]:
        """What of the settings makes a plan."""
        names = ("alpha_min", "score", "value_step", "percent_step")
        chosen: dict[str, Any] = {name: getattr(self.settings, name) for name in names}
        return chosen | ({} if self.columns is None else {"columns": self.columns})

    def groups(self) -> Iterator[Group]:
        """All images in groups, from the first on, as they are found."""
        return grouped(self.pictures, self.labels, self.group)

    def reader(self, on_error: Literal["skip", "stop"] = "stop") -> ImageLoader[Item]:
        """Reads images as the model sees them."""
        view = self.classifier.view
        return ImageLoader(lambda entry: Item(entry, entry.picture.read(view)), on_error)

    def read(self, entries: Sequence[Entry]) -> Tensor:
        """Images that were scored, once more: [N,C,H,W]."""
        return torch.stack([item.image for item in self.reader().items(entries)])

    def explain(self, numbers: Sequence[int], images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Heatmaps by every method: [N,C,H,W], [N] -> each [N,H,W].

        What `random` draws follows from the seed and the image's number, whatever the group.
        """
        methods = dict(self.methods)
        if methods.get("random") == "random":
            seed = self.settings.seed
            entry = replace(
                EXPLAINERS["random"], draw=lambda images, _: noise(images, seed, numbers)
            )
            methods["random"] = entry
        layer = self.settings.layer
        return explain_all(self.classifier, images, targets, methods, layer=layer, progress=False)


def make_job(
    settings: Settings,
    classifier: Classifier,
    pictures: ImageSource,
    group: int,
    progress: bool | Progress | None,
    columns: Sequence[str] | None = None,
) -> Job:
    """Everything that can be wrong with the settings is said here, before anything is scored."""
    held_out = settings.held_out_fill
    job = Job(
        classifier=classifier,
        pictures=pictures,
        labels=labels_for(classifier, pictures, settings.targets),
        methods=_methods(settings, classifier),
        settings=settings,
        fill=fill_from(settings.fill, classifier),
        held_out_fill=None if held_out is None else fill_from(held_out, classifier),
        group=group,
        progress=progress,
        columns=None if columns is None else tuple(columns),
    )
    check_asking(job.plan, job.fill, job.held_out_fill, settings.batch_size)
    return job


def load(settings: Settings) -> Classifier:
    """The classifier that the settings name."""
    return classifier_from(
        settings.model,
        settings.weights,
        settings.num_classes,
        settings.size,
        settings.device,
        settings.precision,
    )


def check_methods(settings: Settings) -> None:
    """Raise for methods that are not known, before a model is loaded."""
    if not settings.methods and not settings.lax:
        raise UserError(f"give at least one method of {', '.join(EXPLAINERS)}, or an adapter")
    for name in settings.methods:
        if name == "lax":
            raise UserError("lax is learned for each classifier: give its folder with --lax PATH")
        if name not in EXPLAINERS:
            raise unknown("method", name, EXPLAINERS)


def _methods(settings: Settings, classifier: Classifier) -> dict[str, Method]:
    """Every method by its name, adapters by their folder's name, the controls last."""
    methods: dict[str, Method] = {name: name for name in settings.methods}
    for source in settings.lax:
        name = name_of(source)
        if name in RESERVED or not name:
            raise UserError(f"no method can be called {name!r}: rename the folder {source}")
        if name in {*methods, *EXPLAINERS}:
            raise UserError(f"two methods would be called {name!r}: rename the folder {source}")
        adapter = Lax.from_pretrained(source)
        adapter.check(classifier)
        methods[name] = adapter
    beside = CONTROLS if settings.controls else ()
    last = {name: name for name in CONTROLS if name in {*methods, *beside}}
    return {name: m for name, m in methods.items() if name not in last} | last


def identity(job: Job) -> dict[str, Any]:
    """All that must be the same for a run to go on where it was stopped."""
    adapters = {
        name: digest(*lax.state_dict().values())
        for name, lax in job.methods.items()
        if isinstance(lax, Lax)
    }
    own_fills = [f for f in (job.fill, job.held_out_fill) if isinstance(f, Tensor)]
    classifier = job.classifier
    deciding = asdict(job.settings)
    del deciding["alpha_curve"]  # it changes no score
    return deciding | {
        "device": str(classifier.device),
        "first image": next(iter(job.pictures)).name,  # the others when they are met
        "model's fingerprint": asdict(fingerprint(classifier)),
        "model's layer": classifier.layer,
        "model's view": classifier.view and asdict(classifier.view),
        "fills' values": digest(*own_fills),
        "adapters' weights": adapters,
        "images a group": job.group,
        "columns": job.columns,
        "torch": version("torch"),
    }


def noise(images: Tensor, seed: int, numbers: Sequence[int]) -> Tensor:
    """Uniform noise in each pixel by the seed and an image's number: [N,C,H,W] -> [N,H,W]."""
    drawn = [
        np.random.default_rng([seed, number]).random(images.shape[2:], dtype=np.float32)
        for number in numbers
    ]
    return torch.from_numpy(np.stack(drawn)).to(images.device)
