"""Ask a model for the bands that columns need: the paper's metrics, under any model and fill."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sufficit.data.batch import Batch, Sample
from sufficit.errors import UserError
from sufficit.metrics.column import CANDIDATE, Column, Columns, Heading
from sufficit.metrics.columns import ZERO_LINE
from sufficit.metrics.metric import Schedule, curves_of
from sufficit.perturbation.bands import EVERYTHING, Band, family, show, top
from sufficit.perturbation.masked_model import MaskedModel
from sufficit.perturbation.predictions import ROWS, Predictions
from sufficit.perturbation.sampling import Sampling, make_sampling
from sufficit.probes.probe import CALLS, RIGHT, Condition, ProbeBase, SourceRows, by_source

LARGE = 0.2  # share of a column's weight from which a band is asked for every image
ANSWERS = "answers."  # the start of what is kept of the answers themselves, not of columns
CURVE = "curve."


@dataclass(frozen=True)
class BandProbe(ProbeBase):
    """The columns of one masked model. The bands of all columns are merged and asked once."""

    asked: MaskedModel
    columns: Sequence[Column]
    key: str = ""  # the name of the condition; that of the first one is empty
    end: str = ""  # of its columns' names
    most: int | None = None  # masks per image, drawn where there are more; None for all
    seed: int = 0
    images: Sample = None
    condition: Condition | None = None
    counts_whole: bool = False  # whether the pass of the whole image counts here
    curves: Schedule | None = None  # whose mean curves are wanted
    keeps_answers: bool = False  # so that images can be shown with what the model said

    @cached_property
    def bands(self) -> list[Band]:
        """Every band that the model is asked for; what it says of whole images is known."""
        found = dict.fromkeys(band for column in self.columns for band in column.bands)
        return [band for band in found if band != EVERYTHING]

    @cached_property
    def sizes(self) -> tuple[Band, ...]:
        """Every band of which only the size is needed."""
        return tuple(dict.fromkeys(band for column in self.columns for band in column.sizes))

    @cached_property
    def _weights(self) -> tuple[dict[Band, float], set[Band]]:
        """How much each band weighs in the columns, and the bands that every image is asked.

        Of several schedules one is read in the end, so that they count as one column on average.
        """
        squares = dict.fromkeys([EVERYTHING, *self.bands], 0.0)
        always = {EVERYTHING}
        for column in self.columns:
            shares = dict.fromkeys(squares, 0.0)
            for schedule in column.schedules:
                weights = column.metric.weights(schedule)
                always.update(column.metric.asks(schedule))
                total = sum(map(abs, weights.values())) or 1.0
                for band, weight in weights.items():
                    squares[band] += weight**2 / len(column.schedules)
                    shares[band] += abs(weight) / total / len(column.schedules)
            always |= {band for band, share in shares.items() if share > LARGE}
        return {band: square**0.5 for band, square in squares.items()}, always

    @property
    def least(self) -> int:
        """The fewest masks per image that leave every column unbiased, the whole image included."""
        weights, always = self._weights
        drawn = {family(b) for b in self.bands if b not in always and weights[b] > 0}
        return len(always) + len(drawn)

    @cached_property
    def drawing(self) -> Sampling | None:
        """How bands are drawn for each image; None where all are asked.

        Always asked are the bands of metrics without weights, and a band with a large share of a
        column's weight: for MSI Show(>a_min) and Show(<=a_min), a quarter each. The others are as
        wide on the line they are drawn from as the root of their squared weights.
        """
        if self.most is None or self.most > len(self.bands):
            return None
        if self.most < self.least:  # in words of the option, which counts the whole image
            raise UserError(
                f"calls must be {self.least} or more for these columns, got {self.most}: ask more"
                " masks per image, or choose fewer columns"
            )
        weights, always = self._weights
        return make_sampling(self.bands, weights, always - {EVERYTHING}, self.most - 1)

    @property
    def calls(self) -> int:  # type: ignore[override]  # computed here
        """Forward passes per image and source, at most."""
        masks = len(self.bands) if self.drawing is None else self.drawing.width
        return masks + self.counts_whole

    @property
    def headings(self) -> Mapping[str, Heading]:  # type: ignore[override]
        """The columns that it adds to tables; of candidates none."""
        single = (column for column in self.columns if len(column.schedules) == 1)
        return {self._named(column.name): column.heading for column in single}

    @property
    def conditions(self) -> Sequence[Condition]:  # type: ignore[override]
        """Under which sources are ranked."""
        return () if self.condition is None else (self.condition,)

    def answers(self, batch: Batch, maps: Mapping[str, Tensor]) -> Predictions:
        """What the model says of every band, source after source: [MN,B]."""
        return self.asked.ask(
            batch,
            torch.cat([*maps.values()]),  # source after source, so that a GPU never waits
            self.bands,
            sizes=self.sizes,
            drawing=self.drawing,
            seed=self.seed,
        )

    def grouped_answers(
        self, batch: Batch, maps: Mapping[str, Tensor]
    ) -> list[tuple[list[str], Predictions]]:
        """The answers of groups of sources, with the sources' names.

        The control that marks everything is apart: its masks are the whole image, or nothing.
        """
        drawn = {name: one for name, one in maps.items() if name != ZERO_LINE}
        found: list[tuple[list[str], Predictions]] = []
        nothing = None
        if drawn:
            answers = self.answers(batch, drawn)
            found.append(([*drawn], answers))
            nothing = self._nothing(answers.rows(range(len(batch))))
        if ZERO_LINE in maps:
            everything = self.asked.everything(batch, self.bands, sizes=self.sizes, nothing=nothing)
            found.append(([ZERO_LINE], everything))
        return found

    def _nothing(self, answers: Predictions) -> Predictions | None:
        """The answers for images of which nothing is shown, if a source's masks include it."""
        # No map has values above 1.
        empty = next((one for one in (top(0.0), show(1.0)) if one in self.bands), None)
        if empty is None or answers.drawn is not None:
            return None
        return answers.column(empty)

    def values(self, answers: Predictions) -> Columns:
        """Every column under its own name: each [n]."""
        found = {n: v for column in self.columns for n, v in column.values(answers).items()}
        return {self._named(name): values for name, values in found.items()}

    def __call__(self, batch: Batch, maps: Mapping[str, Tensor]) -> SourceRows:
        """Ask for all bands, and compute the columns."""
        right = self.asked.whole(batch).of([EVERYTHING], "accuracy")[:, 0]
        rows: SourceRows = {}
        for names, answers in self.grouped_answers(batch, maps):
            found = answers.by_piece(self._rows)
            counts_whole = self.counts_whole and names != [ZERO_LINE]
            found[CALLS + self.key] = (answers.calls + counts_whole).double()
            found[RIGHT + self.key] = right.repeat(len(names))
            if self.keeps_answers:
                found |= {ANSWERS + name: getattr(answers, name) for name in ROWS}
            rows |= by_source(found, names)
        return {name: rows[name] for name in maps}

    def kept(self, parts: Columns) -> Predictions:
        """Answers that were kept by their parts."""
        bands = (EVERYTHING, *self.bands)
        counts = None if self.drawing is None else self.drawing.counts_with_whole
        return Predictions(bands=bands, weighed=self.sizes, counts=counts, **parts)

    def _rows(self, some: Predictions) -> Columns:
        found = self.values(some)
        for name, curve in curves_of(some, self.curves).items() if self.curves else ():
            found[f"{CURVE}{name}.accuracy"] = curve.accuracy
            found[f"{CURVE}{name}.confidence"] = curve.confidence
        return found

    def _named(self, column: str) -> str:
        """The name of a column, or of its candidate, under this condition."""
        stem, at, value = column.partition(CANDIDATE)
        return f"{stem}_{self.end}{at}{value}" if self.end else column
