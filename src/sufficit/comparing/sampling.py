"""MSI over alpha_min on some of the images, measured once all are scored."""

from sufficit.comparing.groups import Found, draw, quiet
from sufficit.comparing.jobs import Job
from sufficit.keeping import Parts
from sufficit.metrics.alpha_search import AlphaCurves, alpha_curves, coarse, spread
from sufficit.metrics.scores import AlphaSearch
from sufficit.progress import bar

ALPHA = "alpha"  # a stage that leaves one part


def sample_alphas(job: Job, parts: Parts, found: Found) -> AlphaCurves | None:
    """Every method's MSI over alpha_min; None where it is not wanted, or known of all images."""
    if not job.settings.alpha_curve or job.plan.searching:
        return None
    rows = spread(len(found.names))
    if not parts.has(ALPHA, 0):
        _keep(parts, _measured(job, parts, found, rows))
    return _kept(job, parts, rows)


def _measured(job: Job, parts: Parts, found: Found, rows: tuple[int, ...]) -> AlphaCurves:
    settings, targets = job.settings, found.targets[list(rows)]
    with quiet(), bar("MSI over alpha_min", job.progress) as tick:
        entries = found.roll.entries(rows, job.groups(), parts)
        images, heatmaps = draw(job, entries, targets)
        return alpha_curves(
            job.classifier,
            images,
            heatmaps,
            targets,
            rows,
            step=coarse(settings.value_step),
            score=settings.score,
            fill=job.fill,
            batch_size=settings.batch_size,
            tick=tick,
        )


def _keep(parts: Parts, curves: AlphaCurves) -> None:
    alphas = next(iter(curves.searches.values())).alphas
    tensors = {method: search.msi for method, search in curves.searches.items()}
    parts.write(ALPHA, 0, tensors, {"alphas": alphas, "step": curves.step, "calls": curves.calls})


def _kept(job: Job, parts: Parts, rows: tuple[int, ...]) -> AlphaCurves:
    part = parts.read(ALPHA, 0)
    alphas = tuple(part.facts["alphas"])
    searches = {method: AlphaSearch(alphas, part.tensors[method]) for method in job.methods}
    return AlphaCurves(rows, part.facts["step"], searches, part.facts["calls"])
