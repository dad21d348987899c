"""One model: decode one image, explain it, score the explanation; nothing is kept between calls."""

import asyncio
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from torch import Tensor

from sufficit.classifier.classifier import Classifier
from sufficit.errors import EmptyHeatmapWarning, UserError, unknown
from sufficit.evaluation import evaluate
from sufficit.explainers import CAMS, EXPLAINERS, Explainer, explain_all, methods_for
from sufficit.explainers.explanation import Methods
from sufficit.explainers.registry import explainer_named
from sufficit.metrics.metric import Schedule
from sufficit.perturbation import bands
from sufficit.perturbation.fills import FILLS
from sufficit.perturbation.tokens import DROP, drops
from sufficit.progress import Progress
from sufficit.report import viewer_data
from sufficit.runs.overlays import class_number
from sufficit.web import schemas
from sufficit.web.schemas import LEAST_STEP, ExplainForm, ImageAnswer, ImageForm, Limits, ScoreForm

COLUMNS = ("insertion_pixel", "deletion_pixel", "base_score", "mask_penalty", "msi")
VALUE_STEP = 0.05  # the tables use 0.01, which takes five times as long
LIKELIEST = 5
ROUNDED = tuple((i + 0.5) / 255 for i in range(255))  # the grid whose steps are 255 M, rounded
RETRY_SECONDS = 5
GRACE = 3.0  # seconds that a running request has when the server stops
T = TypeVar("T")


@dataclass(frozen=True)
class Service:
    """A classifier and the methods that work on it."""

    classifier: Classifier
    methods: Mapping[str, Explainer]
    facts: schemas.ModelFacts

    def explain(self, images: Tensor, form: ExplainForm, progress: Progress) -> schemas.Explained:
        """The prediction and the heatmaps of one image [1,C,H,W], without masked images."""
        common, probabilities, heatmaps = self._look(images, form, form.methods, progress)
        likeliest = probabilities.nan_to_num(-1).topk(min(LIKELIEST, self.facts.n_classes)).indices
        # A page with one image can hold its maps at full size.
        maps = viewer_data.encode_heatmaps(heatmaps, common.grid, sides=(512,))
        values = viewer_data.encode_heatmaps(heatmaps, ROUNDED, sides=(512,))
        marked = bands.at_least(form.alpha_min)
        return schemas.Explained(
            **dict(common),
            height=images.shape[2],
            width=images.shape[3],
            image=viewer_data.encode_images(images)[0],
            fill=viewer_data.encode_fill(images, form.fill)[0],
            prediction=[self._class(number, probabilities) for number in likeliest.tolist()],
            maps=[
                schemas.Heatmap(
                    method=name,
                    class_agnostic=self.methods[name].class_agnostic,
                    map=maps[name][0],
                    values=values[name][0],
                    shares=[share or 0.0 for share in viewer_data.shares_of(found, common.grid)[0]],
                    mask_penalty=bands.inside(found.cpu(), marked).double().mean().item(),
                    empty=not bool(found.any()),
                )
                for name, found in heatmaps.items()
            ],
        )

    def score(self, images: Tensor, form: ScoreForm, progress: Progress) -> schemas.Scored:
        """The scores of one method on one image [1,C,H,W], as `evaluate` returns them."""
        common, _, heatmaps = self._look(images, form, [form.method], progress)
        target, heatmap = torch.tensor([common.target.number]), heatmaps[form.method]
        asked: Any = {"alpha_min": form.alpha_min, "score": form.score, "fill": form.fill}
        asked |= {"value_step": common.value_step, "columns": COLUMNS}
        scores = evaluate(self.classifier, images, heatmap, target, **asked, progress=progress)
        curves = viewer_data.answers_along(scores.answers, form.alpha_min, common.grid)[0]
        values = {name: scores[name].item() for name in COLUMNS}
        columns: dict[str, Any] = {n: None if math.isnan(v) else v for n, v in values.items()}
        return schemas.Scored(
            **dict(common),
            **columns,
            method=form.method,
            score=form.score,
            fill=form.fill,
            curves=schemas.Curves(**curves),
            classes={k: self.class_name(k) for k in sorted(viewer_data.classes_in(curves))},
            calls=int(scores.calls[0]),
        )

    def class_name(self, number: int) -> str:
        """The name of a class, or its number."""
        classes = self.classifier.classes
        return classes[number] if classes else f"class {number}"

    def _look(
        self, images: Tensor, form: ImageForm, names: Sequence[str], progress: Progress
    ) -> tuple[ImageAnswer, Tensor, dict[str, Tensor]]:
        """What both answers say, the probabilities [classes], the heatmaps by method [1,H,W]."""
        for name in names:
            if name not in self.methods:
                raise unknown("method", name, self.methods)
        if form.fill not in self.facts.fills:
            raise unknown("fill for this model", form.fill, self.facts.fills)
        with torch.no_grad():
            probabilities = self.classifier(images).float().softmax(1).cpu()[0]
        wanted, target = form.target.strip(), int(probabilities.argmax())
        if wanted:
            target = class_number(wanted, self.classifier.classes)
        most = self.facts.n_classes - 1
        if target > most:
            raise UserError(f"target must be a class of the model, 0..{most}, got {target}")
        progress(0, 1)
        usual = [method.name for method in self.facts.methods if method.usual]
        methods = {name: self.methods[name] for name in names or usual}
        heatmaps = _heatmaps(self.classifier, images, torch.tensor([target]), methods)
        step = self.facts.value_step if form.value_step is None else form.value_step
        grid = viewer_data.stops(Schedule(form.alpha_min, value_step=step).values, [form.alpha_min])
        common = ImageAnswer(
            target=self._class(target, probabilities),
            alpha_min=form.alpha_min,
            value_step=step,
            grid=list(grid),
            start=grid.index(form.alpha_min),
        )
        return common, probabilities, heatmaps

    def _class(self, number: int, probabilities: Tensor) -> schemas.ClassFacts:
        value = viewer_data.rounded(probabilities[number : number + 1])[0]
        return schemas.ClassFacts(number=number, name=self.class_name(number), probability=value)


def open_service(
    classifier: Classifier, name: str, methods: Methods = (), value_step: float = VALUE_STEP
) -> Service:
    """A service whose usual methods are `methods`, which must work; others that work follow.

    Without `methods` the usual ones are the CAMs and rollout, as far as they work on the model.
    """
    if classifier.view is None or classifier.view.crop is None:
        raise UserError(f"{name} has no input size of its own: give --size, as in --size 224")
    bands.grid(value_step)  # raises if the step makes no grid
    if value_step < LEAST_STEP:
        raise UserError(f"value_step must be {LEAST_STEP:g} or more, got {value_step}: raise it")
    h, w = classifier.view.crop
    grey = torch.full((1, classifier.view.channels, h, w), 0.5)
    with torch.no_grad():
        n_classes = classifier(grey).shape[1]
    own = methods_for(methods, classifier) if methods else {}
    if own:
        _heatmaps(classifier, grey, None, own)  # raises if one of them does not work
    others: dict[str, Explainer] = {}
    quick = [n for n, one in EXPLAINERS.items() if isinstance(one.passes, int) and one.passes <= 3]
    for other in (one for one in quick if one not in own):
        with suppress(UserError):  # it does not work on this model
            _heatmaps(classifier, grey, None, [other])
            others[other] = explainer_named(other)
    usual = tuple(own) or tuple(n for n in (*CAMS, "rollout") if n in others) or tuple(others)
    known = own | others
    fills = [fill for fill in FILLS if not drops(fill) or _can_drop(classifier, grey)]
    facts = schemas.ModelFacts(
        name=name,
        classes=None if classifier.classes is None else list(classifier.classes),
        n_classes=n_classes,
        height=h,
        width=w,
        channels=classifier.view.channels,
        device=str(classifier.device),
        methods=[
            schemas.MethodFacts(
                name=word,
                about=one.description,
                usual=word in usual,
                class_agnostic=one.class_agnostic,
            )
            for word, one in known.items()
        ],
        fills=fills,
        value_step=value_step,
        limits=Limits(),
    )
    return Service(classifier, known, facts)


def _can_drop(classifier: Classifier, grey: Tensor) -> bool:
    """Whether a model has tokens that can be left out, and answers without some of them."""
    half = torch.zeros_like(grey[:, 0])
    half[:, : half.shape[1] // 2] = 1
    target = torch.zeros(1, dtype=torch.long)
    try:
        evaluate(
            classifier,
            grey,
            half,
            target,
            fill=DROP,
            value_step=0.5,
            columns=("base_score",),
            progress=False,
        )
    except UserError:
        return False
    return True


def _heatmaps(
    classifier: Classifier, images: Tensor, targets: Tensor | None, methods: Methods
) -> dict[str, Tensor]:
    """The heatmaps of each method, without warnings for empty ones: answers say so themselves."""
    with warnings.catch_warnings():  # safe: one thread alone runs the model
        warnings.simplefilter("ignore", EmptyHeatmapWarning)
        return explain_all(classifier, images, targets, methods, progress=False)


class ModelQueue:
    """A bounded number of requests, of which one at a time uses the model.

    All jobs run in one thread: each thread that calls torch keeps a pool of threads of its own. To
    end a request early, cancel its task.
    """

    def __init__(self, places: int, per_address: int | None = None) -> None:
        self.places, self.per_address, self.closed = places, per_address or places, False
        self._holders: dict[asyncio.Task[Any], str] = {}  # requests that are here, by address
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sufficit-model")

    def close(self) -> None:
        """Answer all requests that wait or come with 503; the one that runs has a few seconds."""
        self.closed = True
        for task in self._holders:
            task.cancel()

    @contextmanager
    def place(self, address: str = "") -> Iterator[None]:
        """Hold one of the places, or refuse with 503 if all are taken, or many by this address.

        A request that is cancelled meanwhile gets 503 too, or nothing if its client is gone.
        """
        if self.closed:
            raise stopping()
        held, full = [*self._holders.values()].count(address), self.taken >= self.places
        if full or held >= self.per_address:
            whose, number = ("the", self.taken) if full else ("your", held)
            raise HTTPException(
                503,
                f"{whose} queue is full ({number} requests): retry in {RETRY_SECONDS} seconds",
                {"Retry-After": str(RETRY_SECONDS)},
            )
        task = asyncio.current_task()
        assert task is not None
        self._holders[task] = address
        try:
            yield
        except asyncio.CancelledError:
            task.uncancel()
            raise stopping() if self.closed else ClientDisconnect from None
        finally:
            del self._holders[task]

    @property
    def taken(self) -> int:
        """The places that are held."""
        return len(self._holders)

    async def run(self, job: Callable[[Progress], T]) -> T:
        """The result of the job, which calls its argument often; this raises once it is cancelled.

        A job that runs when the queue closes has a few seconds.
        """
        cancelled = threading.Event()

        def check(done: float, total: float) -> None:
            if cancelled.is_set():
                raise ClientDisconnect

        work = self._thread.submit(job, check)
        waiting = asyncio.wrap_future(work)
        waiting.add_done_callback(lambda one: one.cancelled() or one.exception())  # as read
        try:
            await asyncio.wait({waiting})
        except asyncio.CancelledError:
            if work.cancel():
                raise
            if not self.closed:  # it runs: the place is free once the model is
                cancelled.set()
            await asyncio.wait({waiting}, timeout=GRACE if self.closed else None)
            if cancelled.is_set() or not waiting.done():
                raise
        finally:
            cancelled.set()
        return waiting.result()


def stopping() -> HTTPException:
    """What requests get while the server stops."""
    text = f"the server stops: retry in {RETRY_SECONDS} seconds"
    return HTTPException(503, text, {"Retry-After": str(RETRY_SECONDS)})
