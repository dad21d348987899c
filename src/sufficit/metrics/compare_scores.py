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
    controls: Sequence[str] = (),
    seed: int = 0,
) -> Standing:
    """Rank methods by a column of their scores on the same images.

    - `scores`: what `evaluate` returns, by method.
    - `column`: the column to rank by.
    - `names`: names of the images, by method; they must be equal for all.
    - `controls`: methods that are tested against the others and not ranked.
    - `seed`: of the draws of the sign-flip test.
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
        for method, found in scores.items():
            if len(names.get(method, ())) != len(found):
                raise UserError(
                    f"names must hold one name per image for each method, but {method} has"
                    f" {len(found)} images and {len(names.get(method, ()))} names: name every image"
                )
        _check_rows("name", {method: names[method] for method in scores})
    check_equal("alpha_min", {method: found.alpha_min for method, found in scores.items()})
    for name in ("score", "value_step", "percent_step"):
        check_equal(name, {m: getattr(s.schedule, name) for m, s in scores.items()})
    _check_rows("target", {method: found.targets.tolist() for method, found in scores.items()})
    whole = {m: s.answers.of([EVERYTHING], "confidence")[:, 0] for m, s in scores.items()}
    first, *others = scores
    for other in others:
        if float(((whole[first] - whole[other]).abs() > FAR).double().mean()) > FEW:
            raise UserError(
                "methods to compare must be scored on the same images by the same model, but its"
                f" predictions for the whole images differ between {first} and {other}: score both"
                " on the same images and model"
            )
    higher = scores[first].headings[column].higher_is_better
    if higher is None:
        raise UserError(f"{column} has no better or worse to compare by: choose another column")
    return compare_values(values, column, higher_is_better=higher, controls=controls, seed=seed)


def _check_rows(what: str, rows: Mapping[str, Sequence[object]]) -> None:
    """Raise unless all methods have the same value for each image."""
    for i, alike in enumerate(zip(*rows.values(), strict=True)):
        check_equal(f"{what} of image {i}", dict(zip(rows, alike, strict=True)))
