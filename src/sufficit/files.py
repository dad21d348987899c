"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sufficit.errors import UserError

CHECKPOINT = "checkpoint.pt"
"""Where a training run keeps how far it is; whoever finds it may go on with the run."""


def check_output(folder: Path, sources: Sequence[Path] = (), *, overwrite: bool = True) -> None:
    """Raise, before any work is done, where results could not be written or would do harm."""
    if (folder / "run.json").exists() and not overwrite:
        raise UserError(f"{folder} holds an earlier run: choose another --out, or --overwrite it")
    for source in sources:
        if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
            raise UserError(f"--out {folder} lies inside {source}: results would be read as images")
    try:
        made = [part for part in (folder, *folder.parents) if not part.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for part in made:
            part.rmdir()
        if not os.access(folder if folder.exists() else made[-1].parent, os.W_OK):
            raise PermissionError(13, "no right to write there")
    except OSError as error:
        raise UserError(f"{folder} can't be a folder of results: {error.strerror}") from error


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary path beside the wanted one, renamed to it when the block ends well."""
    part = path.with_name(f".{path.stem}.part-{os.getpid()}{path.suffix}")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
