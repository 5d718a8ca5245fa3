"""Gradients of every kind, and what their statistics are by slow, obvious float64 arithmetic, for all backends' tests."""

from __future__ import annotations

import numpy as np
import torch

INTEGERS = ("zeros", "nan", "pos_inf", "neg_inf", "low_bits", "zero_rows", "zero_cols", "exponents", "exact")


def cases() -> dict[str, torch.Tensor]:
    """Return the tensors by name."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=torch.float32, scale=1.0):
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype)

    def bits(n, dtype, view):
        high = 2**15 if view is torch.int16 else 2**31 if view is torch.int32 else 2**63 - 1
        return torch.randint(-high, high, (n,), generator=g, dtype=torch.int64).to(view).view(dtype)

    holes = normal(70, 90)
    holes[::3] = 0
    holes[:, ::5] = 0
    broken = holes.clone()
    broken[7, 11], broken[8, 12], broken[6, 13], broken[9, 16] = np.inf, -np.inf, np.nan, -np.nan
    late = torch.zeros(300, 40)
    late[299, 3] = 1.0
    almost = torch.ones(40, 300)
    almost[17, :299] = 0
    one_row, one_column = torch.ones(30, 40), torch.ones(40, 30)
    one_row[11], one_column[:, 7] = 0, -0.0
    long = torch.zeros(4, 70_001)
    long[1], long[2, 69_999:] = 1.0, -1.0
    long[1, ::3] = 0
    narrow = torch.relu(normal(30_000, 3, scale=1.0))
    narrow[:, 1] = 0
    grid = normal(5000, scale=2.0**-22, dtype=torch.float16).float()
    specials = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-126, 2.0**-127, 2.0**-149, 2.0**127, 3.4028234663852886e38])
    beyond = [1e300, -1e-300, 5e-324, 1e-40, 2.0**200, 2.0**-140, 2.0**-127, 2.0**-126, 2.0**128, 0.0, 1.0]
    rows = torch.tensor([[1, 4, 1, 7, 4]])
    sparse = torch.sparse_coo_tensor(rows, normal(5, 6), (10, 6), check_invariants=True)
    pairs = torch.view_as_complex(normal(5, 6, 2))
    places = torch.tensor([[0, 2, 2], [1, 0, 0]])
    two = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0, -2.0]), (3, 3), check_invariants=True)
    return {
        "one element": torch.tensor([3.0]),
        "no dimension": torch.tensor(-0.75),
        "empty": torch.zeros(0),
        "empty matrix": torch.zeros(3, 0),
        "zeros": torch.zeros(130, 70),
        "negative zeros": -torch.zeros(200),
        "specials": specials,
        "specials, long": specials.repeat(1000),
        "random": normal(100, 333),
        "vector longer than a chunk": normal(70001, scale=1e-5),
        "random bits": bits(20000, torch.float32, torch.int32),
        "random bits, few": bits(61, torch.float32, torch.int32),
        "FP16 grid, subnormal": grid,
        "FP32 subnormal": normal(5000, scale=1e-41),
        "huge": normal(9000, scale=1e37),
        "tiny": normal(9000, scale=1e-30),
        "all NaN": torch.full((4097,), float("nan")),
        "all -inf": torch.full((9000,), float("-inf")),
        "zero rows and columns": holes,
        "zero rows and columns, inf and NaN": broken,
        "one late element": late,
        "a nearly empty row": almost,
        "one zero row": one_row,
        "one zero column": one_column,
        "one zero column, FP64": one_column.double(),
        "rows longer than a chunk": long,
        "rows longer than a chunk, FP64": long.double(),
        "three columns": narrow,
        "one column": narrow[:, :1].contiguous(),
        "relu": torch.relu(normal(300, 300)),
        "transposed": normal(60, 40).t(),
        "strided": normal(100, 60)[::2, ::3],
        "offset": normal(1001)[1:],
        "misaligned rows": normal(50, 65)[:, 1:],
        "convolution": normal(16, 8, 3, 3),
        "channels last": normal(16, 8, 3, 3).to(memory_format=torch.channels_last),
        "channels last 3d": normal(4, 8, 3, 3, 3).to(memory_format=torch.channels_last_3d),
        "permuted": normal(4, 5, 6, 7).permute(2, 0, 3, 1),
        "expanded": normal(1, 5).expand(7, 5),
        "expanded scalar": torch.tensor(2.0).expand(3, 4),
        "FP16": normal(90, 80, dtype=torch.float16),
        "FP16 bits": bits(10000, torch.float16, torch.int16),
        "BF16": normal(90, 80, dtype=torch.bfloat16),
        "BF16 bits": bits(10000, torch.bfloat16, torch.int16),
        "FP64": normal(90, 80, dtype=torch.float64),
        "FP64 bits": bits(5000, torch.float64, torch.int64),
        "FP64 beyond FP32": torch.tensor(beyond, dtype=torch.float64),
        "FP64 zero rows": holes.double(),
        "FP8": normal(300).to(torch.float8_e4m3fn),
        "FP8 E5M2": normal(300, scale=1e4).to(torch.float8_e5m2),
        "complex": torch.view_as_complex(normal(50, 30, 2)),
        "complex, conjugated": torch.view_as_complex(broken.reshape(70, 45, 2)).conj(),
        "complex, negative view": torch.view_as_complex(broken.reshape(70, 45, 2)).conj().imag,
        "complex128": torch.view_as_complex(normal(20, 2, dtype=torch.float64)),
        "sparse, uncoalesced": sparse,
        "sparse, empty": torch.sparse_coo_tensor(rows[:, :0], torch.zeros(0, 4), (9, 4), check_invariants=True),
        "sparse, complex": torch.sparse_coo_tensor(rows, pairs, (10, 6), check_invariants=True),
        "sparse in two dimensions": two,
    }


def few_tasks() -> dict[str, torch.Tensor]:
    """Return those that an interpreter gets through in a moment."""
    return {name: t for name, t in cases().items() if t.numel() < 100_000 and (t.dim() < 2 or t.shape[0] < 1000)}


def reference(grad: torch.Tensor) -> dict[str, object]:
    """Return the statistics of a gradient, element by element in float64."""
    lines = grad.dim() >= 2 and grad.numel() > 0
    if grad.is_sparse:
        lines = lines and grad.sparse_dim() == 1
        grad = grad.to_dense()
    real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    wide = real.dtype is torch.float64
    values = real.resolve_neg().double().contiguous().numpy()
    flat = values.reshape(-1)
    finite = flat[np.isfinite(flat)]
    nonzero = finite[finite != 0]
    fraction, exponent = np.frexp(np.abs(nonzero))
    biased = np.clip(exponent - 1 + 127, 0, 254)
    inside = (exponent - 1 + 127 >= 1) & (exponent - 1 + 127 <= 254)
    matrix = values.reshape(values.shape[0], -1) == 0 if lines else None
    return {
        "zeros": int((flat == 0).sum()),
        "nan": int(np.isnan(flat).sum()),
        "pos_inf": int((flat == np.inf).sum()),
        "neg_inf": int((flat == -np.inf).sum()),
        "low_bits": _mantissas(finite, wide),
        "zero_rows": -1 if matrix is None else int(matrix.all(axis=1).sum()),
        "zero_cols": -1 if matrix is None else int(matrix.all(axis=0).sum()),
        "exponents": np.bincount(biased, minlength=256),
        "exact": np.bincount(biased[(fraction == 0.5) & inside], minlength=256),
        "max_abs": np.abs(finite).max() if len(finite) else np.nan,
        "sum_squares": float(np.sum(finite.astype(np.longdouble) ** 2)),
    }


def _mantissas(finite: np.ndarray, wide: bool) -> int:
    """Return the OR of the 23 mantissa bits; FP64's further bits count as the last."""
    total = 0
    for x in finite.tolist():
        if wide:
            fraction = int(np.float64(x).view(np.uint64)) & 0xF_FFFF_FFFF_FFFF
            total |= fraction >> 29 | int(fraction & 0x1FFF_FFFF != 0)
        else:
            total |= int(np.float32(x).view(np.uint32)) & 0x7F_FFFF
    return total


def assert_equal(stats, i: int, expected: dict[str, object], name: str) -> None:
    """Compare row `i` of statistics with the reference: integers exactly, norms to 1e-6, maxima exactly."""
    for field in INTEGERS:
        np.testing.assert_array_equal(getattr(stats, field)[i], expected[field], err_msg=f"{name}: {field}")
    np.testing.assert_array_equal(stats.max_abs[i], expected["max_abs"], err_msg=f"{name}: max_abs")
    norm, wanted = np.sqrt(stats.sum_squares[i]), np.sqrt(expected["sum_squares"])
    np.testing.assert_allclose(norm, wanted, rtol=1e-6, err_msg=f"{name}: norm")
