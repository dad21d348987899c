"""What to do where a batch was too large for the memory there is."""

import warnings

import torch

from sufficit.errors import UserError


def halved(failed: int, stacklevel: int) -> int:
    """Half of a batch that was too large; it is said, and told as an error where that was one."""
    if failed == 1:
        raise UserError(
            "out of memory at batch size 1: use smaller images, a lower precision or another device"
        )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    warnings.warn(
        f"out of memory: going on with batches of {failed // 2}",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )
    return failed // 2
