"""Plant faults into a copy of this tree, one at a time, and count how many the tests catch.

    python tools/plant_faults.py                      # all faults, a table at the end
    python tools/plant_faults.py sign-of-msi no-relu  # some
    python tools/plant_faults.py --table research/faults.md

A fault is a small change that makes results wrong or leaves traces: one text of one file is
replaced by another. It names the tests that should notice, the fastest ones that do. A fault whose
text is not found exactly once is refused before anything runs, so that FAULTS follows the code. The
tests that failed are run once more at the end, all together on the unchanged copy: they must pass.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = "src/sufficit"
NOT_COPIED = (".git", ".*_cache", ".cache", ".venv", "__pycache__", "sufficit-*", "*.egg-info")
SECONDS = 300  # after which a test run counts as stuck
PASSED, FAILED = 0, 1  # exit codes of pytest; others mean that the tests did not run


@dataclass(frozen=True)
class Fault:
    """One text of one file, replaced by another, and the tests that should notice."""

    name: str
    about: str  # what is wrong with the planted code
    file: str  # below src/sufficit
    old: str
    new: str
    tests: str  # arguments of pytest: files, and -k with one word


@dataclass(frozen=True)
class Outcome:
    """What the tests said of a fault."""

    fault: Fault
    caught_by: str  # the first test that failed; empty if none did
    seconds: float


EVALUATE = "tests/metrics/test_evaluate.py"
CAMS = "tests/explainers/test_cams.py"
EXPLANATION = "tests/explainers/test_explanation.py"
SOURCES = "tests/test_sources.py"
FITTED = "tests/test_fitted.py"
CONDITIONS = "tests/runs/test_conditions.py"
CEILING = "tests/runs/test_ceiling.py"
STORE = "tests/runs/test_store.py"
LIFE = "tests/runs/test_life.py"
ENGINE = "tests/runs/test_engine.py"

FAULTS: tuple[Fault, ...] = (
    # Metrics
    Fault(
        "sign-of-msi",
        "MSI adds the mask penalty",
        "metrics/columns.py",
        "return base_score(predictions, schedule) - mask_penalty(predictions, schedule)",
        "return base_score(predictions, schedule) + mask_penalty(predictions, schedule)",
        f"{EVALUATE} -k hand",
    ),
    Fault(
        "area-not-normalised",
        "the areas in MSI are multiplied by 1 - alpha_min",
        "metrics/columns.py",
        "means = mean_weights(schedule.alphas)",
        "means = [w * (1 - schedule.alpha_min) for w in mean_weights(schedule.alphas)]",
        f"{EVALUATE} -k hand",
    ),
    Fault(
        "penalty-above",
        "the mask penalty counts > instead of >= alpha_min",
        "perturbation/bands.py",
        "at.nextafter(at - 1).item()",
        "at.item()",
        f"{EVALUATE} -k hand",
    ),
    Fault(
        "deletion-below",
        "deletion keeps values < alpha instead of <= alpha",
        "perturbation/bands.py",
        'return Band("value", -math.inf, alpha)',
        'return Band("value", -math.inf, alpha - 1e-6)',
        f"{EVALUATE} -k hand",
    ),
    Fault(
        "band-one-rank-longer",
        "every mask keeps one more pixel",
        "perturbation/fills.py",
        "torch.lt(self.ranks[image], self.stops",
        "torch.le(self.ranks[image], self.stops",
        f"{EVALUATE} -k hand",
    ),
    Fault(
        "ties-backwards",
        "tied pixels are ranked in reverse order",
        "perturbation/bands.py",
        "values, order = heatmaps.flatten(1).sort(dim=1, descending=True, stable=True)",
        "values, order = (one.flip(1) for one in heatmaps.flatten(1).sort(dim=1, stable=True))",
        f"{EVALUATE} -k tied",
    ),
    Fault(
        "half-to-even",
        "half a pixel is rounded to even instead of up",
        "perturbation/bands.py",
        "math.floor(round(share * pixels, 6) + 0.5)",
        "round(round(share * pixels, 6))",
        f"{EVALUATE} -k half",
    ),
    Fault(
        "fid-of-logits",
        "confidences, and so Fid, are logits",
        "perturbation/predictions.py",
        "return logits.softmax(1).gather(1, targets[:, None])[:, 0]",
        "return logits.gather(1, targets[:, None])[:, 0]",
        f"{EVALUATE} -k fidelity",
    ),
    Fault(
        "rank-share-of-the-same-half",
        "msi_rank chooses its share on the images it is reported on",
        "metrics/pooled.py",
        "total, count = self._sums[1 - half], self._counts[1 - half]",
        "total, count = self._sums[half], self._counts[half]",
        "tests/metrics/test_rank_msi.py -k half",
    ),
    Fault(
        "search-takes-the-lowest",
        "the search for alpha_min takes the lowest MSI",
        "metrics/scores.py",
        "self.means.nan_to_num(-torch.inf).argmax()",
        "self.means.nan_to_num(torch.inf).argmin()",
        f"{EVALUATE} -k search",
    ),
    Fault(
        "sampling-biased",
        "masks that are drawn count too little",
        "perturbation/sampling.py",
        "widths[curve][~wide] * line.strata / ends[-1]",
        "widths[curve][~wide] * (line.strata + 1) / ends[-1]",
        "tests/perturbation/test_sampling.py -k drawn",
    ),
    Fault(
        "leak-of-own-class",
        "donors of the leakage are images of the mask's own class too",
        "metrics/leakage.py",
        "np.flatnonzero((pool_targets != target) & (pool_targets >= 0))",
        "np.flatnonzero(pool_targets >= 0)",
        "tests/metrics/test_leakage.py -k donors",
    ),
    Fault(
        "candidates-without-suffix",
        "candidates of another fill have the end of the condition after their value",
        "probes/band.py",
        'return f"{stem}_{self.end}{at}{value}" if self.end else column',
        'return f"{column}_{self.end}" if self.end else column',
        "tests/metrics/test_rank_msi.py -k fill",
    ),
    Fault(
        "regions-without-corners",
        "parts of a region that touch at a corner count as two",
        "probes/parts.py",
        "label(one, np.ones((3, 3)))",
        "label(one)",
        "tests/probes/test_parts.py",
    ),
    Fault(
        "head-as-it-was",
        "the copy with a random head keeps the trained head",
        "probes/head.py",
        "        randomise(copy.bare, cascade(copy, batch.images)[0], self.seed)\n",
        "",
        "tests/sanity/test_sanity.py -k in_python",
    ),
    Fault(
        "ceiling-searched-with-its-own-fill",
        "the search of the ceiling uses the fill that its boxes are scored with",
        "runs/probes_of.py",
        "fills = tuple(one for one in SEARCHED_FILLS if one != fill)",
        "fills = tuple(SEARCHED_FILLS)",
        f"{CEILING} -k searched_boxes",
    ),
    # Fills and the model under masks
    Fault(
        "blur-too-narrow",
        "the fill blur has half its radius",
        "perturbation/fills.py",
        "sigma = min(h, w) / 10",
        "sigma = min(h, w) / 20",
        f"{EVALUATE} -k blur",
    ),
    Fault(
        "fill-not-normalised",
        "the fill is not normalised as the image is",
        "perturbation/predict.py",
        "return self.classifier.normalize(images), self.classifier.normalize(filler)",
        "return self.classifier.normalize(images), filler.to(self.classifier.dtype)",
        f"{EVALUATE} -k fill",
    ),
    Fault(
        "every-fill-is-the-first",
        "further fills are scored with the first one",
        "probes/standard.py",
        "asked = MaskedModel(one, fill, batch_size, faster(one))",
        "asked = MaskedModel(one, fills[0], batch_size, faster(one))",
        f"{CONDITIONS} -k scoring",
    ),
    Fault(
        "twin-for-model",
        "the twin is asked in place of the model",
        "probes/standard.py",
        "asked = MaskedModel(one, fill, batch_size, faster(one))",
        "asked = MaskedModel(twin or model, fill, batch_size, faster(one))",
        f"{CONDITIONS} -k scoring",
    ),
    Fault(
        "whole-image-of-another-model",
        "the answers for whole images of one model are taken for those of the twin",
        "perturbation/masked_model.py",
        '("whole", model),\n        lambda',
        '("whole",),\n        lambda',
        f"{CONDITIONS} -k scoring",
    ),
    Fault(
        "held-out-fill-of-a-fit",
        "the held-out fill may be one that a fitted source has asked",
        "runs/probes_of.py",
        'asked |= {*getattr(source, "fills", ())}',
        "pass",
        f"{FITTED} -k run",
    ),
    Fault(
        "heatmaps-in-half-precision",
        "heatmaps are rounded to float16 before they are ranked",
        "perturbation/predict.py",
        "maps = maps if maps.dtype == torch.float64 else maps.float()",
        "maps = maps.half().float()",
        f"{EVALUATE} -k float32",
    ),
    Fault(
        "training-mode",
        "the model runs in the mode it is found in",
        "classifier/layers.py",
        "            module.training = False\n",
        "            pass\n",
        "tests/perturbation/test_predict.py -k eval",
    ),
    Fault(
        "hook-left-behind",
        "the hook on the feature layer is not removed",
        "explainers/forward_pass.py",
        "stack.enter_context(layers.hooked(classifier.bare, layer, cut))",
        "layers.hooked(classifier.bare, layer, cut)",
        f"{EXPLANATION} -k behind",
    ),
    Fault(
        "grad-left-behind",
        "gradients are written to the weights",
        "explainers/forward_pass.py",
        "(gradient,) = torch.autograd.grad(\n"
        "                scores.sum(), self.leaf, retain_graph=not last, allow_unused=True\n"
        "            )",
        "scores.sum().backward(retain_graph=not last)\n            gradient = self.leaf.grad",
        f"{EXPLANATION} -k behind",
    ),
    # Explanation methods
    Fault(
        "no-relu",
        "negative evidence stays in the map of a CAM",
        "explainers/explanation.py",
        "positive = self.maps.clamp(min=0)",
        "positive = self.maps",
        f"{CAMS} -k grad_cam",
    ),
    Fault(
        "no-min-max",
        "the map of a CAM is not stretched to 0..1 after it is resized",
        "explainers/explanation.py",
        "normalize(resize(self.stretched, size))",
        "resize(self.stretched, size)",
        f"{EXPLANATION} -k stretched",
    ),
    Fault(
        "corners-aligned",
        "maps are resized with their corners aligned",
        "perturbation/heatmaps.py",
        'size=size, mode="bilinear")[:, 0]',
        'size=size, mode="bilinear", align_corners=True)[:, 0]',
        "tests/perturbation/test_heatmaps.py",
    ),
    Fault(
        "layercam-of-all-gradients",
        "Layer-CAM takes negative gradients too",
        "explainers/cams.py",
        "return (gradients.clamp(min=0) * features).sum(1)",
        "return (gradients * features).sum(1)",
        f"{CAMS} -k hand",
    ),
    Fault(
        "sign-of-kpca",
        "the sign of KPCA-CAM's component is flipped",
        "explainers/cams.py",
        "torch.where(farthest < 0, -vectors, vectors)",
        "torch.where(farthest > 0, -vectors, vectors)",
        f"{CAMS} -k component",
    ),
    Fault(
        "rollout-without-residual",
        "rollout leaves out the identity of the residual connection",
        "explainers/attention.py",
        "block = attention + torch.eye(attention.shape[-1], device=attention.device)",
        "block = attention",
        "tests/explainers/test_attention.py -k torchvision",
    ),
    Fault(
        "lax-stretched",
        "heatmaps of LAX are stretched as those of CAMs are",
        "explainers/explanation.py",
        "        final=True,\n        shares=",
        "        final=False,\n        shares=",
        "tests/explainers/test_lax.py -k stretched",
    ),
    Fault(
        "random-without-seed",
        "the control random is the same for every seed",
        "sources/kinds.py",
        "noise(batch.size, self.seed, batch.numbers)",
        "noise(batch.size, 0, batch.numbers)",
        f"{SOURCES} -k random",
    ),
    Fault(
        "fit-one-size-off",
        "a fit takes the size after the best one",
        "sources/fitted.py",
        "chosen = torch.where(decided, best[:, 0], UNDECIDED)",
        "chosen = torch.where(decided, (best[:, 0] + 1).clamp(max=WHOLE - 1), UNDECIDED)",
        f"{FITTED} -k definition",
    ),
    Fault(
        "fit-with-one-fill",
        "a size suffices if the model gives the target with any fill",
        "sources/fitted.py",
        "suffices = (kept_known & kept).all(1)",
        "suffices = (kept_known & kept).any(1)",
        FITTED,
    ),
    # Statistics
    Fault(
        "holm-without-maximum",
        "Holm's correction is not monotone",
        "statistics.py",
        "np.minimum(np.maximum.accumulate(steps), 1)",
        "np.minimum(steps, 1)",
        "tests/test_statistics.py -k holm",
    ),
    Fault(
        "sign-flips-one-sided",
        "the exact sign-flip test counts one side",
        "statistics.py",
        "float((np.abs(_signed_sums(values)) >= far).mean())",
        "float((_signed_sums(values) >= far).mean())",
        "tests/test_statistics.py -k p_values",
    ),
    Fault(
        "interval-of-90-percent",
        "intervals reach as far as those of 90 %",
        "sums.py",
        "1 - level / 2)",
        "1 - level)",
        "tests/test_intervals.py -k student",
    ),
    # Runs
    Fault(
        "resume-skips-a-unit",
        "a resumed run leaves out the first missing unit",
        "runs/spread.py",
        "[number for number in units if number not in done]",
        "[number for number in units if number not in done][bool(done) :]",
        f"{LIFE} -k interrupted",
    ),
    Fault(
        "last-unit-lost",
        "the last unit of a run is not computed",
        "runs/spread.py",
        "pairwise(chain(units, [None]))",
        "pairwise(units)",
        f"{ENGINE} -k evaluate",
    ),
    Fault(
        "sample-in-the-first-rows",
        "what a probe finds of some images is written to the first rows of the unit",
        "runs/unit_rows.py",
        "column = blank.index_copy(0, rows, column)",
        "column = blank.index_copy(0, torch.arange(len(column)), column)",
        f"{CEILING} -k sample",
    ),
    Fault(
        "donors-maps-misplaced",
        "maps that were drawn first are in another order than their images",
        "runs/drawing.py",
        "order = sorted(range(len(batch)), key=[*known, *new].__getitem__)",
        "order = [*range(len(batch))]",
        f"{ENGINE} -k pool",
    ),
    Fault(
        "donors-maps-of-another-source",
        "the maps of the donors have another order of the sources than those that are measured",
        "probes/leak.py",
        "ordered = {name: maps[name] for name in with_a_shape(self.held.maps)}",
        "ordered = dict(reversed(with_a_shape(maps).items()))",
        f"{ENGINE} -k after_a_control",
    ),
    Fault(
        "run-searches-the-lowest",
        "alpha_min of a run is the one with the lowest MSI",
        "runs/search.py",
        "np.nan_to_num(means, nan=-np.inf).argmax()",
        "np.nan_to_num(means, nan=np.inf).argmin()",
        f"{ENGINE} -k ranked_sources",
    ),
    Fault(
        "rows-before-maps",
        "the file that makes a unit done is written before its maps",
        "runs/store.py",
        '''    def write(self, rows: Rows, kind: str = UNIT) -> None:
        """Write a unit's maps, then its rows, which make it done: whole or not at all."""
        self.write_maps(rows, kind)
''',
        """    def write(self, rows: Rows, kind: str = UNIT) -> None:
        self.write_rows(rows, kind)
        self.write_maps(rows, kind)

    def write_rows(self, rows: Rows, kind: str) -> None:
""",
        f"{STORE} -k not_done",
    ),
    Fault(
        "units-of-any-run",
        "a unit of another run is read as one of this run",
        "runs/store.py",
        "if self.run and facts.get(RUN) != self.run:",
        "if self.run and facts.get(RUN) is None:",
        f"{STORE} -k another_run_is",
    ),
    Fault(
        "results-of-other-settings",
        "a finished run of other settings is returned as the results",
        "runs/store.py",
        "return record if run == _digest(_whole_key(key), entries) else None",
        "return record",
        "tests/test_comparison.py -k finished",
    ),
    Fault(
        "half-written-unit",
        "files are written in place, so that a kill leaves half of one",
        "files.py",
        "        yield part\n        part.replace(path)",
        "        yield path",
        "tests/test_files.py -k whole",
    ),
    Fault(
        "key-without-seed",
        "a run resumes with another seed",
        "runs/job.py",
        '*("compile", "quick", "save_heatmaps", "log"),',
        '*("compile", "quick", "save_heatmaps", "log", "seed"),',
        f"{STORE} -k settings",
    ),
    Fault(
        "nan-rows-kept",
        "images that the model gives NaN for keep their rows",
        "runs/reader.py",
        "return batch.rows(good) if good else None",
        "return batch",
        f"{ENGINE} -k nan",
    ),
    Fault(
        "skipped-not-listed",
        "images that cannot be read are left out and not listed",
        "data/loader.py",
        "self.skipped |= {entry.image.name: one for entry, one in found if isinstance(one, str)}",
        "self.skipped |= {}",
        "tests/data/test_loader.py -k reason",
    ),
    Fault(
        "nan-in-json",
        "JSON files hold NaN, which no other reader takes",
        "provenance.py",
        "not np.isfinite(value):\n        return None",
        "not np.isfinite(value):\n        return value",
        "tests/test_provenance.py -k null",
    ),
    # Data
    Fault(
        "class-folders-backwards",
        "class folders are numbered in reverse order",
        "data/loader.py",
        "return {folder: number for number, folder in enumerate(folders)}",
        "return {folder: number for number, folder in enumerate(reversed(folders))}",
        "tests/data/test_images.py -k labels",
    ),
    Fault(
        "exif-ignored",
        "photos are not turned as EXIF says",
        "data/pictures.py",
        "upright = ImageOps.exif_transpose(opened)\n        return seen(",
        "upright = opened\n        return seen(",
        "tests/data/test_digits.py -k modes",
    ),
    Fault(
        "truth-smeared",
        "masks of objects are resized so that they grow",
        "data/truth.py",
        'interpolation="nearest-exact"',
        'interpolation="bicubic"',
        "tests/data/test_truth.py -k pixels",
    ),
    Fault(
        "unsafe-names",
        "the name of a source may lead out of the folder of the run",
        "files.py",
        'if name in ("", ".", "..") or re.search(',
        'if name in ("", ".") and re.search(',
        "tests/data/test_untrusted.py -k place",
    ),
    # Report and page
    Fault(
        "names-not-escaped",
        "names of files are HTML in the report",
        "report/html.py",
        "autoescape=True",
        "autoescape=False",
        "tests/report/test_report.py -k text",
    ),
    Fault(
        "foreign-origin",
        "the page answers forms of other sites",
        "web/app.py",
        'if fetched or (origin is not None and origin.partition("://")[2] != headers.get("host")):',
        "if fetched:",
        "tests/web/test_refusals.py -k sites",
    ),
)


def main() -> None:
    """Plant the faults that are named, or all; exit with 1 if one is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="faults to plant; all by default")
    parser.add_argument("--table", type=Path, help="write the outcomes to this Markdown file")
    given = parser.parse_args()
    faults = faults_named(given.names)
    check(faults, ROOT)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
        outcomes = [planted(fault, tree) for fault in faults]
        check_tests(outcomes, tree)
        print("these tests pass without a fault", flush=True)
    caught = sum(bool(one.caught_by) for one in outcomes)
    print(f"caught {caught} of {len(outcomes)}")
    if given.table:
        given.table.parent.mkdir(exist_ok=True)
        given.table.write_text(table(outcomes), encoding="utf-8")
    sys.exit(caught < len(outcomes))


def faults_named(names: Sequence[str]) -> list[Fault]:
    """The faults with these names, all if there are none."""
    known = {fault.name: fault for fault in FAULTS}
    if len(known) < len(FAULTS):
        sys.exit("two faults have the same name")
    if strange := [name for name in names if name not in known]:
        sys.exit(f"unknown fault {strange[0]!r}; known: {', '.join(known)}")
    return [known[name] for name in names] if names else [*FAULTS]


def check(faults: Sequence[Fault], tree: Path) -> None:
    """Exit if a fault's text is not in its file exactly once."""
    wrong = []
    for fault in faults:
        path = tree / SOURCE / fault.file
        found = path.read_text(encoding="utf-8").count(fault.old) if path.exists() else 0
        if found != 1:
            wrong.append(f"{fault.name}: its text is {found} times in {SOURCE}/{fault.file}")
    if wrong:
        sys.exit("\n".join([*wrong, "respell these faults: the text must be there once"]))


def check_tests(outcomes: Sequence[Outcome], tree: Path) -> None:
    """Exit if a test that failed does not pass without a fault: it could not tell."""
    # Without parameters, which may have spaces.
    failed = {one.caught_by.partition("[")[0]: None for one in outcomes if one.caught_by}
    if not failed:
        return
    code, printed = run_tests(" ".join(failed), tree, len(failed) * SECONDS)
    if code != PASSED:
        sys.exit(f"{printed[-2000:]}\na test does not pass without a fault (exit code {code})")


def planted(fault: Fault, tree: Path) -> Outcome:
    """Plant a fault, run its tests, and take it out again."""
    path = tree / SOURCE / fault.file
    whole = path.read_text(encoding="utf-8")
    begun = time.monotonic()
    path.write_text(whole.replace(fault.old, fault.new), encoding="utf-8")
    try:
        code, printed = run_tests(fault.tests, tree)
    finally:
        path.write_text(whole, encoding="utf-8")
    seconds = time.monotonic() - begun
    if code not in (PASSED, FAILED):
        sys.exit(f"{printed[-2000:]}\n{fault.name}: no tests ran (exit code {code})")
    first = re.search(r"^FAILED (\S+)", printed, re.MULTILINE)
    if code == FAILED and first is None:
        sys.exit(f"{printed[-2000:]}\n{fault.name}: no test is named")
    caught_by = first[1] if first else ""
    print(f"{fault.name}: {caught_by or 'MISSED'} ({seconds:.0f} s)", flush=True)
    return Outcome(fault, caught_by, seconds)


def run_tests(tests: str, tree: Path, seconds: float = SECONDS) -> tuple[int, str]:
    """Run tests of the copy up to the first failure; return the exit code and what they print."""
    options = [
        "-n",
        "0",
        "-m",
        "slow or not slow",
        "-x",
        "-q",
        "--no-header",
        "--tb=short",
        "-p",
        "no:cacheprovider",
    ]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests.split()],
        cwd=tree,
        # Compiled files could be those of the code before: a fault is planted within a second.
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=seconds,
    )
    return found.returncode, found.stdout


def commit() -> str:
    """The last commit that changed the code that faults are planted in."""
    words = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--abbrev=7", "--", SOURCE]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a page of Markdown."""
    caught = sum(bool(one.caught_by) for one in outcomes)
    lines = [
        "# Planted faults",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, code of commit {commit()}: the tests caught {caught} of"
        f" {len(outcomes)} faults. `python tools/plant_faults.py --table research/faults.md` plants"
        " each into a copy of the tree and writes this page.",
        "",
        "| fault | what is wrong | file | first test that fails |",
        "|---|---|---|---|",
    ]
    for one in outcomes:
        fault = one.fault
        test = f"`{one.caught_by.removeprefix('tests/')}`" if one.caught_by else "**none**"
        lines.append(f"| {fault.name} | {fault.about} | `{fault.file}` | {test} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
