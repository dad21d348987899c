"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sufficit.errors import UserError


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
