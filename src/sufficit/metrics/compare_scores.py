"""`compare_scores`: methods ranked by their scores on the same images."""

from collections.abc import Mapping, Sequence

from sufficit.errors import UserError
from sufficit.metrics.scores import Scores
from sufficit.perturbation.bands import EVERYTHING
from sufficit.statistics import Standing, check_equal, check_values, compare_values

FAR, FEW = 0.1, 0.05  # rounding changes few confidences of whole images by so much


def compare_scores(
    scores: Mapping[str, Scores],
    column: str = "msi",
    *,
    names: Mapping[str, Sequence[str]] | None = None,
    seed: int = 0,
) -> Standing:
    """Rank methods by a column of their scores on the same images.

    With `names`, the names of the images per method, the names must be equal too.
    """
    for method, found in scores.items():
        if not isinstance(found, Scores):
            raise UserError(
                f"scores must be what evaluate returns, got {type(found).__name__} for {method}:"
                " compare bare values with sufficit.statistics.compare_values"
            )
    values = {method: found[column].numpy() for method, found in scores.items()}
    check_values(values)
    if names is not None:
        _check_names(names, {method: len(found) for method, found in scores.items()})
    _check_scoring(scores)
    higher = next(iter(scores.values())).plan.higher_is_better(column)
    if higher is None:
        raise UserError(f"{column} has no better or worse to compare by: choose another column")
    return compare_values(values, column, higher_is_better=higher, seed=seed)


def _check_names(names: Mapping[str, Sequence[str]], counts: Mapping[str, int]) -> None:
    """Raise unless every image has a name, and the same one for all methods."""
    for method, n in counts.items():
        given = len(names.get(method, ()))
        if given != n:
            raise UserError(
                f"names must hold one name per image for each method, but {method} has {n} images"
                f" and {given} names: name every image"
            )
    for i, alike in enumerate(zip(*(names[method] for method in counts), strict=True)):
        check_equal(f"name of image {i}", dict(zip(counts, alike, strict=True)))


def _check_scoring(scores: Mapping[str, Scores]) -> None:
    """Raise unless all methods were scored in the same way, by the same model."""
    check_equal("alpha_min", {method: found.alpha_min for method, found in scores.items()})
    for name in ("score", "value_step", "percent_step"):
        used = {m: getattr(found.plan.schedules[0], name) for m, found in scores.items()}
        check_equal(name, used)
    first, *others = scores
    one = scores[first]
    for other in others:
        two = scores[other]
        apart = (one.targets != two.targets).nonzero()
        if len(apart):
            i = int(apart[0])
            both = {first: int(one.targets[i]), other: int(two.targets[i])}
            check_equal(f"target of image {i}", both)
        whole, again = (s.answers.of([EVERYTHING], "confidence")[:, 0] for s in (one, two))
        if float(((whole - again).abs() > FAR).double().mean()) > FEW:
            raise UserError(
                "methods to compare must be scored on the same images by the same model, but its"
                f" predictions for the whole images differ between {first} and {other}: score both"
                " on the same images and model"
            )
