"""The memory that the C library keeps for reuse: bounded, and given back at rest."""

import ctypes
import os
import platform

ARENAS = 2
_M_ARENA_MAX = -8  # as glibc's malloc.h has it


def share_arenas() -> bool:
    """Let all threads take memory from a few arenas; whether the C library is one that has them.

    By default glibc has eight a core, and each keeps what requests of other sizes left in it.
    """
    if not _is_glibc() or "MALLOC_ARENA_MAX" in os.environ:
        return False  # whoever started the process may have chosen
    return bool(ctypes.CDLL(None).mallopt(_M_ARENA_MAX, ARENAS))


def give_back() -> bool:
    """Return memory that is free to the system, in some milliseconds; whether there was any."""
    return _is_glibc() and bool(ctypes.CDLL(None).malloc_trim(0))


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
