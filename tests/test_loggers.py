"""Numbers of training and of runs in the logs that people look at."""

import csv
import time
from pathlib import Path

import pytest
import torch

from digit_images import write_digits
from small_models import random_images, small
from small_runs import FLAGS, STEPS, write_photos
from sufficit import UserError, compare
from sufficit.loggers import EXTRAS, check_log


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.filterwarnings("ignore::UserWarning")  # so few photos say nothing, and it says so
def test_a_comparison_is_logged_to_csv(sufficit, tmp_path: Path) -> None:
    photos = write_photos(tmp_path, 6)
    given = ("--model", f"python:{tmp_path / 'model.py'}:make", "--data", str(photos))
    out = tmp_path / "run"
    settings = tmp_path / "log.toml"
    settings.write_text('log = "csv"\n')
    given = (*given, "--methods", "gradcam", "--config", settings)
    run = sufficit("compare", *given, *FLAGS, "--out", out)
    assert run.code == 0, run.err
    (row,) = rows(out / "log" / "metrics.csv")
    from sufficit import RunResults

    results = RunResults.read(out)
    assert float(row["gradcam/msi"]) == pytest.approx(results.summaries["gradcam"]["msi"].mean)
    assert float(row["random/msi"]) == pytest.approx(results.summaries["random"]["msi"].mean)
    assert row["step"] == "6"


def trained(sufficit, place: Path, log: str, epochs: int) -> Path:
    given = ("--model", f"python:{place / 'model.py'}:make", "--data", place / "photos")
    out = place / f"lax-{log}"
    quick = ("--epochs", str(epochs), "--batch-size", "4", "--device", "cpu")
    run = sufficit("train-lax", *given, *quick, "--log", log, "--out", out)
    assert run.code == 0, run.err
    return out


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("log", ["csv", "tensorboard"])
def test_every_epoch_of_training_is_logged(sufficit, tmp_path: Path, log: str) -> None:
    write_photos(tmp_path, 12)
    out = trained(sufficit, tmp_path, log, 2)
    wanted = rows(out / "history.csv")
    assert len(wanted) == 2
    if log == "csv":
        found = [float(row["loss"]) for row in rows(out / "log" / "metrics.csv")]
        msi = [float(row["msi"]) for row in rows(out / "log" / "metrics.csv")]
    else:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(out / "log"))
        events.Reload()
        found = [event.value for event in events.Scalars("loss")]
        msi = [event.value for event in events.Scalars("msi")]
        assert [event.step for event in events.Scalars("loss")] == [1, 2]
    assert found == pytest.approx([float(row["loss"]) for row in wanted], rel=1e-6)
    assert msi == pytest.approx([float(row["msi"]) for row in wanted], rel=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_training_of_a_twin_is_logged(sufficit, tmp_path: Path) -> None:
    given = ("--model", "sufficit:digits", "--data", write_digits(tmp_path / "digits", 16))
    out = tmp_path / "twin"
    quick = ("--epochs", "1", "--batch-size", "8", "--device", "cpu")
    run = sufficit("train-twin", *given, *quick, "--log", "csv", "--out", out)
    assert run.code == 0, run.err
    (row,) = rows(out / "log" / "metrics.csv")
    assert float(row["loss"]) > 0


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")  # wandb's own
def test_wandb_logs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    compare(
        small(), random_images(3), ["center"], torch.tensor([0, 1, 2]), out=tmp_path / "run",
        log="wandb", checks="none", progress=False, **STEPS,
    )  # fmt: skip
    (record,) = (tmp_path / "run" / "log").glob("wandb/offline-run-*/run-*.wandb")
    end = time.monotonic() + 30  # its own process writes the file, and may still do so
    while b"center/msi" not in record.read_bytes() and time.monotonic() < end:
        time.sleep(0.2)
    assert b"center/msi" in record.read_bytes()


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_logs_to_a_file(tmp_path: Path) -> None:
    import mlflow

    results = compare(
        small(), random_images(3), ["center"], torch.tensor([0, 1, 2]), out=tmp_path / "run",
        log="mlflow", checks="none", progress=False, **STEPS,
    )  # fmt: skip
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'run' / 'log' / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'sufficit'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.metrics["center/msi"] == pytest.approx(
        results.summaries["center"]["msi"].mean
    )


def test_logs_that_cannot_be_written_are_refused_before_the_run(
    sufficit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sufficit.loggers.find_spec", lambda name: None)
    for kind in ("tensorboard", "wandb", "mlflow"):
        with pytest.raises(
            UserError, match=rf"log '{kind}' needs the extra: pip install '.\[{kind}"
        ):
            check_log(kind, tmp_path)
    check_log("csv", tmp_path)
    with pytest.raises(UserError, match="a log is written to the folder of results"):
        compare(small(), random_images(2), ["center"], log="csv", **STEPS)
    with pytest.raises(UserError, match="log must be tensorboard or wandb"):
        compare(small(), random_images(2), ["center"], log="tensorbord", out=tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert EXTRAS.keys() == {"csv", "tensorboard", "wandb", "mlflow"}
