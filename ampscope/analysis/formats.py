"""The number formats gradients are cast to, as the limits that decide an element's fate.

Sources: IEEE 754-2008 (binary16, round to nearest, ties to even); Micikevicius et al., "FP8 Formats for Deep Learning"
    (2022) for E4M3 and E5M2; BF16 is FP32 cut to 8 bits of significand. tests/test_formats.py holds each number against
    torch's casts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ampscope.errors import AmpscopeError


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format under round-to-nearest-even.

    Every limit is a magnitude |x|. The three at the low end are powers of two, so an exponent histogram decides them
    exactly.
    """

    name: str
    """Short name, as `what_if(format=...)` takes it."""
    dtype: str
    """torch's name of it."""
    bits: int
    """Bits of the significand, the hidden one included."""
    min_exponent: int
    """log2 of the smallest normal."""
    max: float
    """Largest finite value."""
    overflow: float
    """Where rounding leaves the range: half a unit above `max`."""
    overflow_ties: bool
    """Whether |x| == `overflow` leaves it too (a tie goes to the even neighbour; E4M3 has none above, and stays at
    `max`).
    """

    @property
    def min_normal(self) -> float:
        """Smallest normal value: below it bits are lost."""
        return float(2.0**self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        """Smallest value above zero."""
        return float(2.0 ** (self.min_exponent - self.bits + 1))

    @property
    def flush_exponent(self) -> int:
        """log2 of `flush_limit`."""
        return self.min_exponent - self.bits

    @property
    def flush_limit(self) -> float:
        """Half the smallest subnormal: 0 < |x| <= `flush_limit` becomes zero (a tie goes to zero, which is even)."""
        return float(2.0**self.flush_exponent)

    def flushes(self, x: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether non-zero elements become zero; same shape as `x`."""
        a = np.abs(np.asarray(x, np.float64))
        return np.asarray((a > 0) & (a <= self.flush_limit))

    def overflows(self, x: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether elements leave the range (inf among them; NaN not); same shape as `x`."""
        a = np.abs(np.asarray(x, np.float64))
        return np.asarray(a >= self.overflow if self.overflow_ties else a > self.overflow)


FP16 = Format("fp16", "float16", 11, -14, 65504.0, 65520.0, True)
BF16 = Format("bf16", "bfloat16", 8, -126, float((2 - 2.0**-7) * 2.0**127), float((2 - 2.0**-8) * 2.0**127), True)
FP8_E4M3 = Format("fp8_e4m3", "float8_e4m3fn", 4, -6, 448.0, 464.0, False)
"""No inf: torch's cast saturates at 448, inf included; beyond 464 that is counted as overflow."""
FP8_E5M2 = Format("fp8_e5m2", "float8_e5m2", 3, -14, 57344.0, 61440.0, True)

FORMATS = {f.name: f for f in (FP16, BF16, FP8_E4M3, FP8_E5M2)}
"""Canonical name → format."""

_ALIASES = {f.dtype: f for f in FORMATS.values()} | {
    "half": FP16,
    "float8_e4m3": FP8_E4M3,
    "e4m3": FP8_E4M3,
    "e5m2": FP8_E5M2,
}


def find(name: object) -> Format:
    """Return a format.

    Args:
        name: "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", torch's name of one, its torch dtype, or a `Format`.

    Raises:
        AmpscopeError: it is none of these.
    """
    if isinstance(name, Format):
        return name
    key = str(name).lower().removeprefix("torch.").replace("-", "_")
    found = FORMATS.get(key) or _ALIASES.get(key)
    if found is None:
        raise AmpscopeError(f"no format {str(name)!r}; there are {', '.join(FORMATS)}")
    return found
