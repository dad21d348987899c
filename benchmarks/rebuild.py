"""Two versions of Sufficit side by side: scoring, explaining, a training step, a comparison.

    mkdir -p build/old && git archive 44fb57b src benchmarks | tar -x -C build/old
    python benchmarks/rebuild.py --old build/old --device cuda --data PHOTOGRAPHS --out FILE.json
    python benchmarks/rebuild.py --old build/old --tiny          # on a CPU

Each version runs in a process of its own, with its own PYTHONPATH; both live as long as this one
and take turns, job by job, so that what disturbs one disturbs the other. The first round warms up.
Ratios are new over old, one per round. A new round starts only while there is time (`--seconds`).
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CAMS = ("gradcam", "gradcam++", "layercam", "kpca-cam", "finer-cam")
PROFILED = " # profiled"  # after the name of a job
PASSES = {"images": 0}  # that models were shown; replays of a recorded step are not counted
Job = Callable[[], object]


# --- the process of one version -------------------------------------------------------------------


def jobs_of(setting: dict[str, Any]) -> dict[str, Job]:
    """The jobs of the version that PYTHONPATH names."""
    import torch
    from torchvision import models

    from sufficit import Classifier, View

    device, side, jobs = setting["device"], setting["side"], {}
    on_gpu = device == "cuda"

    def count(module: object, inputs: tuple[torch.Tensor]) -> None:
        PASSES["images"] += len(inputs[0])

    for name, pixels in (("resnet50", side), ("resnet18", setting["small_side"])):
        torch.manual_seed(0)
        if on_gpu or name == "resnet18":
            model = models.get_model(name, num_classes=100)
        else:
            model = models.resnet18(num_classes=100)  # a CPU only shows that the script runs
        view = View((pixels, pixels), resize=pixels * 256 // 224)
        classifier = Classifier(
            _settled(model, pixels), mean=(0.5,) * 3, std=(0.25,) * 3, view=view
        )
        dtype = torch.bfloat16 if on_gpu else torch.float32
        classifier.to(device, dtype, torch.channels_last if on_gpu else None)
        for parameter in classifier.model.parameters():
            parameter.requires_grad_(False)
        classifier.model.register_forward_pre_hook(count)
        small = name == "resnet18"
        for what, job in _jobs_with(classifier, pixels, small, setting).items():
            jobs[f"{what}, {name} {pixels} px"] = job
    return jobs


def _settled(model: Any, pixels: int) -> Any:
    """Batch statistics of some inputs, without which deep random models shrink them to nothing."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.rand(8, 3, pixels, pixels))
    return model.eval()


def _jobs_with(
    classifier: Any, pixels: int, small: bool, setting: dict[str, Any]
) -> dict[str, Job]:
    import torch

    from evaluate import smooth_maps
    from lax import step_jobs
    from sufficit import evaluate
    from sufficit.explainers import explain_all

    device = torch.device(setting["device"])
    n, many, batch = (setting[key] for key in ("evaluated", "explained", "trained"))
    images, maps = torch.rand(n, 3, pixels, pixels).to(device), smooth_maps(n, pixels).to(device)
    shown = torch.rand(many, 3, pixels, pixels).to(device)
    targets = torch.zeros(many, dtype=torch.long, device=device)
    trained = torch.rand(batch, 3, pixels, pixels).to(device)
    step = step_jobs(classifier, trained, "crisp")["crisp: step"]
    steps = setting["steps"] * (4 if small else 1)

    def explain() -> None:
        for _ in range(setting["explanations"]):
            explain_all(classifier, shown, targets, CAMS)

    def train() -> None:
        with classifier.in_eval_mode():
            for _ in range(steps):
                step()

    return {
        "evaluate": lambda: evaluate(classifier, images, maps, targets[:n], progress=False),
        "explain, five CAMs": explain,
        "LAX training step": train,
        "compare from JPEG": lambda: _compare(classifier, setting),
    }


def _compare(classifier: Any, setting: dict[str, Any], **further: Any) -> Any:
    """The scores of five CAMs with a held-out fill and the leak, from files to files."""
    from sufficit import compare
    from sufficit.runs.config import RunConfig

    # The only options of this run that changed their names.
    if "checks" in RunConfig.__dataclass_fields__:
        asked: dict[str, Any] = {"checks": ("fill", "leak")}
    else:
        asked = {"controls": False, "leak": True, "alpha_curve": False}
    with tempfile.TemporaryDirectory() as place:
        return compare(
            classifier,
            setting["photographs"],
            CAMS,
            out=Path(place) / "run",
            progress=False,
            targets=None,
            calls=26,
            donors=4,
            unit_size=32,
            compile="off",
            **asked,
            **further,
        )


def serve(setting: dict[str, Any]) -> None:
    """Run the jobs whose names come in; answer each with its seconds."""
    answers = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr  # whatever the jobs print is no answer

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    import torch

    import sufficit

    sys.path.append(str(Path(__file__).parent))  # the other version may have no such module
    from profiling import compared

    on_gpu = setting["device"] == "cuda"
    jobs = jobs_of(setting)
    answer({"package": sufficit.__file__, "jobs": [*jobs]})
    for line in sys.stdin:
        if on_gpu:
            torch.cuda.synchronize()
        PASSES["images"] = 0
        asked, profiled, _ = line.strip().partition(PROFILED)
        started = time.perf_counter()
        try:
            if profiled:
                answer({"profile": compared(jobs[asked])})
                continue
            jobs[asked]()
            if on_gpu:
                torch.cuda.synchronize()
        except Exception as error:  # the other jobs are worth having
            answer({"error": f"{type(error).__name__}: {error}"[:500]})
            continue
        answer({"seconds": time.perf_counter() - started, "passes": PASSES["images"]})
        if on_gpu:
            torch.cuda.empty_cache()  # the other version needs the memory next


def ray_check(setting: dict[str, Any]) -> dict[str, Any]:
    """Compare with two Ray workers on one GPU, and whether the means are those without Ray."""
    if importlib.util.find_spec("ray") is None:
        return {"skipped": "Ray is not installed"}
    import torch
    from torchvision import models

    from sufficit import Classifier, View
    from sufficit.runs.config import Workers

    side, on_gpu = setting["small_side"], setting["device"] == "cuda"
    torch.manual_seed(0)
    model = _settled(models.resnet18(num_classes=100), side)
    view = View((side, side), resize=side * 256 // 224)
    classifier = Classifier(model, mean=(0.5,) * 3, std=(0.25,) * 3, view=view)
    classifier.to(setting["device"])
    found = {}
    for word, workers in (("one process", None), ("two workers", Workers(2, gpus=0.5 * on_gpu))):
        started = time.perf_counter()
        result = _compare(classifier, setting, workers=workers)
        found[word] = {
            "seconds": time.perf_counter() - started,
            "msi": result.table()["msi"].to_dict(),
        }
    one, two = (found[word]["msi"] for word in ("one process", "two workers"))
    found["largest difference"] = max(abs(one[name] - two[name]) for name in one)
    return found


# --- the process that asks ------------------------------------------------------------------------


class Version:
    """A process that runs the jobs of one version."""

    def __init__(self, tree: Path, setting: dict[str, Any]) -> None:
        self.tree = tree
        words = [sys.executable, "-P", __file__, "--serve", json.dumps(setting)]
        self.process = subprocess.Popen(
            words, env=_environment(tree), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.tree} ended: its error is above")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, job: str) -> dict[str, Any]:
        """Run one job; its seconds, or its error."""
        assert self.process.stdin is not None
        self.process.stdin.write(job + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def _environment(tree: Path) -> dict[str, str]:
    own = [str(tree / "src"), str(tree / "benchmarks")]
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # after them, as for metadata
    return os.environ | {"PYTHONPATH": os.pathsep.join([*own, *filter(None, known)])}


def ratios_of(
    times: dict[str, dict[str, list[float]]], passes: dict[str, dict[str, int]]
) -> dict[str, dict[str, Any]]:
    """Per job: seconds of both, and new over old, one ratio per round with median and range.

    `per_pass` is the ratio of seconds per image that went through the model.
    """
    found = {}
    for job, seconds in times.items():
        pairs = list(zip(seconds["new"], seconds["old"], strict=True))
        if not pairs:
            continue
        ratios = [new / old for new, old in pairs]
        found[job] = {
            "new_over_old": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
            "per_pass": statistics.median(ratios) * passes[job]["old"] / passes[job]["new"],
            "rounds": len(pairs),
            "seconds": seconds,
        }
    return found


def measure(asked: argparse.Namespace, setting: dict[str, Any]) -> None:
    """Let both versions take turns; print and write after every round."""
    started = time.perf_counter()
    versions = {
        "old": Version(asked.old.resolve(), setting),
        "new": Version(asked.new.resolve(), setting),
    }
    jobs = [job for job in _ready(versions) if asked.only in job]
    print(f"both are ready after {time.perf_counter() - started:.0f} s", flush=True)
    times: dict[str, dict[str, list[float]]] = {job: {"old": [], "new": []} for job in jobs}
    passes: dict[str, dict[str, int]] = {}
    errors: dict[str, str] = {}
    results: dict[str, Any] = {"setting": setting, "errors": errors, "passes": passes}
    longest = 0.0
    for turn in range(asked.rounds + 1):
        begun = time.perf_counter()
        if turn and begun - started + longest > asked.seconds:
            print(f"no time for round {turn}", flush=True)
            break
        order = ["old", "new"] if turn % 2 else ["new", "old"]
        for job in [job for job in jobs if job not in errors]:
            found = {name: versions[name].run(job) for name in order}
            failed = [f"{name}: {one['error']}" for name, one in found.items() if "error" in one]
            if failed:
                errors[job] = "; ".join(failed)
                print(f"{job}: {errors[job]}", flush=True)
            elif not turn:  # the warm-up counts passes, which are always the same
                passes[job] = {name: found[name]["passes"] for name in ("old", "new")}
                print(f"{job}: images through the model {passes[job]}", flush=True)
            else:
                new, old = (found[name]["seconds"] for name in ("new", "old"))
                times[job]["new"].append(new)
                times[job]["old"].append(old)
                print(f"round {turn}, {job}: {new:.3f} / {old:.3f} = {new / old:.3f}", flush=True)
        spent = time.perf_counter() - begun
        longest = max(longest, spent if turn else 0.0)
        print(f"round {turn} took {spent:.0f} s", flush=True)
        results["jobs"] = ratios_of(times, passes)
        write(asked.out, results)
    print_table(results["jobs"])
    if asked.profile:
        results["profiles"] = profiles_of(versions, [job for job in jobs if job not in errors])
    for version in versions.values():
        version.close()
    if not asked.no_ray:
        results["two Ray workers"] = with_ray(setting)
        print("two Ray workers:", results["two Ray workers"], flush=True)
    results["spent"] = time.perf_counter() - started
    write(asked.out, results | _surroundings(setting["device"]))


def profiles_of(versions: dict[str, Version], jobs: list[str]) -> dict[str, Any]:
    """Where the time of each job goes in both versions."""
    from profiling import print_compared

    found: dict[str, Any] = {}
    for job in jobs:
        profiles = {name: versions[name].run(job + PROFILED) for name in ("old", "new")}
        found[job] = {name: one.get("profile", one) for name, one in profiles.items()}
        print(f"\n{job}", flush=True)
        if not any("error" in one for one in profiles.values()):
            print_compared(found[job])
    return found


def _ready(versions: dict[str, Version]) -> list[str]:
    """The jobs, once both versions are loaded from where they should be."""
    jobs: list[str] = []
    for version in versions.values():
        greeting = version.read()
        jobs, package = greeting["jobs"], greeting["package"]
        if not Path(package).is_relative_to(version.tree):
            raise SystemExit(f"{version.tree} was wanted, {package} was imported")
    return jobs


def with_ray(setting: dict[str, Any]) -> dict[str, Any]:
    """What the check with two Ray workers finds, in a process of its own."""
    words = [sys.executable, "-P", __file__, "--ray", json.dumps(setting)]
    done = subprocess.run(
        words, env=_environment(ROOT), capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": done.stderr[-1000:]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _surroundings(device: str) -> dict[str, Any]:
    import torch

    from sufficit.provenance import surroundings

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return surroundings(torch.device(device), dtype)


def write(out: Path | None, results: dict[str, Any]) -> None:
    """Write what is known so far."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=2) + "\n")


def print_table(jobs: dict[str, dict[str, Any]]) -> None:
    """Print the ratios as Markdown."""
    print("\n| job | new / old | range | per pass | rounds | new, s | old, s |")
    print("|---|---:|---|---:|---:|---:|---:|")
    for job, one in jobs.items():
        new, old = (statistics.median(one["seconds"][name]) for name in ("new", "old"))
        print(
            f"| {job} | **{one['new_over_old']:.3f}** | {one['lowest']:.3f} to"
            f" {one['highest']:.3f} | {one['per_pass']:.3f} | {one['rounds']} | {new:.3f} |"
            f" {old:.3f} |"
        )
    print(flush=True)


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--old", type=Path, help="folder with src/ and benchmarks/ of the old one")
    words.add_argument("--new", type=Path, default=ROOT, help="the same of the new one")
    words.add_argument(
        "--data", type=Path, help="folder of .jpg, or of .tar with them; made up where left out"
    )
    words.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--seconds", type=float, default=170, help="no round starts that ends later")
    words.add_argument("--files", type=int, default=384, help="JPEG files to compare")
    words.add_argument("--only", default="", help="jobs whose names hold this text")
    words.add_argument("--profile", action="store_true", help="profile the jobs after the rounds")
    words.add_argument("--no-ray", action="store_true")
    words.add_argument("--tiny", action="store_true", help="only shows that the script runs")
    words.add_argument("--out", type=Path)
    words.add_argument("--serve", help=argparse.SUPPRESS)
    words.add_argument("--ray", help=argparse.SUPPRESS)
    asked = words.parse_args()
    if asked.serve:
        serve(json.loads(asked.serve))
        return
    if asked.ray:
        print(json.dumps(ray_check(json.loads(asked.ray))))
        return
    if asked.old is None or not (asked.old / "src" / "sufficit").is_dir():
        raise SystemExit("--old must be a folder with src/sufficit and benchmarks of the old one")
    from jpegs import write_jpegs

    setting: dict[str, Any] = {"device": asked.device}
    if asked.tiny:
        setting |= {"side": 64, "small_side": 32, "evaluated": 2, "explained": 4, "trained": 4}
        setting |= {"steps": 1, "explanations": 1}
        asked.files = min(asked.files, 8)
    else:
        setting |= {"side": 224, "small_side": 64, "evaluated": 64, "explained": 512}
        setting |= {"trained": 128, "steps": 8, "explanations": 3}
    with tempfile.TemporaryDirectory() as place:
        setting["photographs"] = place
        write_jpegs(asked.data, Path(place), asked.files)
        measure(asked, setting)


if __name__ == "__main__":
    main()
