"""How the CPU kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numba.extending

intrinsic: Callable[[Any], Any] = numba.extending.intrinsic


def c_function(signature: Any, function: Any) -> Any:
    """Compile a function that C code may call; keep it on disk where that is possible."""
    try:
        return numba.cfunc(signature, nopython=True, cache=True)(function)
    except RuntimeError:  # numba found no folder for it
        return numba.cfunc(signature, nopython=True)(function)


def jit(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator: compile to run without the interpreter lock, keep the code on disk where that is possible."""

    def decorate(function: Any) -> Any:
        settings = {"nogil": True, "error_model": "numpy", "boundscheck": False, **options}
        try:
            return numba.njit(cache=True, **settings)(function)
        except RuntimeError:  # numba found no such folder
            return numba.njit(**settings)(function)

    return decorate
