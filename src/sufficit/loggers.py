"""Numbers of a run where people look at them: TensorBoard, Weights & Biases, MLflow or a CSV file.

These are Lightning's loggers; all but the CSV file are extras.
"""

import os
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sufficit.errors import UserError, unknown
from sufficit.files import make_folder

if TYPE_CHECKING:
    from lightning.fabric.loggers.logger import Logger

PROJECT, FOLDER = "sufficit", "log"
EXTRAS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "csv": None}


def check_log(kind: str | None, out: Path | None) -> None:
    """Raise for a log that can't be written."""
    if kind is None:
        return
    if kind not in EXTRAS:
        raise unknown("log", kind, EXTRAS)
    if out is None:
        raise UserError("a log is written to the folder of results: give --out (out=) one")
    extra = EXTRAS[kind]
    if extra is not None and find_spec(extra) is None:
        raise UserError(f"log {kind!r} needs the extra: pip install '.[{extra}]'")


def logger_named(kind: str, out: Path, settings: Mapping[str, Any]) -> "Logger":
    """A logger that writes below the folder `out`, or to the server that its own variables name.

    WANDB_MODE=offline keeps wandb's files here; MLFLOW_TRACKING_URI names a server of MLflow.
    """
    check_log(kind, out)
    from lightning.pytorch import loggers

    folder = make_folder(out / FOLDER)
    made: Logger
    if kind == "csv":
        made = loggers.CSVLogger(out, FOLDER, "", flush_logs_every_n_steps=1)
    elif kind == "tensorboard":
        made = loggers.TensorBoardLogger(out, FOLDER, "", default_hp_metric=False)
    elif kind == "wandb":
        made = loggers.WandbLogger(out.name, folder, project=PROJECT)
    else:
        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        made = loggers.MLFlowLogger(PROJECT, run_name=out.name, tracking_uri=where)
    made.log_hyperparams({name: str(value) for name, value in settings.items()})
    return made


def log_numbers(logger: "Logger", row: Mapping[str, Any], step: int) -> None:
    """Log the numbers of a row."""
    kinds = (int, float)
    numbers = {k: float(v) for k, v in row.items() if isinstance(v, kinds)}
    with warnings.catch_warnings():  # a resumed run writes its CSV file again, from the start
        warnings.filterwarnings("ignore", "Experiment logs directory")
        logger.log_metrics(numbers, step)


def close_logger(logger: "Logger | None") -> None:
    """Write what is left."""
    if logger is None:
        return
    logger.finalize("success")
    finish = getattr(getattr(logger, "experiment", None), "finish", None)  # wandb's
    if finish is not None:
        finish()
