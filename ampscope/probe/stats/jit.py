"""How the CPU kernels are compiled."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numba.extending

intrinsic: Callable[[Any], Any] = numba.extending.intrinsic


def _stamp() -> int:
    """Return what tells this state of the kernels from another: a sum over the texts beside this file."""
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))


STAMP = _stamp()


def jit(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator: compile to run without the interpreter lock, keep the code on disk where that is possible."""

    def decorate(function: Any) -> Any:
        settings = {"nogil": True, "error_model": "numpy", "boundscheck": False, **options}
        try:
            made = numba.njit(cache=True, **settings)(function)
        except RuntimeError:  # numba found no such folder
            return numba.njit(**settings)(function)
        # numba compares the function's own file only; what it calls in other files is compiled into it
        kept: Any = getattr(getattr(made, "_cache", None), "_cache_file", None)
        if hasattr(kept, "_source_stamp"):
            kept._source_stamp = STAMP
        return made

    return decorate


def c_function(signature: Any, function: Any) -> Any:
    """Compile a function that C code may call; keep it on disk under a key that holds the values of its closure."""
    try:
        return numba.cfunc(signature, nopython=True, cache=True)(function)
    except RuntimeError:  # numba found no folder for it
        return numba.cfunc(signature, nopython=True)(function)
