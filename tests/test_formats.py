"""Every limit of every format, held against torch's own casts."""

import numpy as np
import pytest
import torch

from ampscope import AmpscopeError
from ampscope.analysis.formats import BF16, FORMATS, FP8_E4M3, FP16, find

FINFO = {name: torch.finfo(getattr(torch, f.dtype)) for name, f in FORMATS.items()}


@pytest.fixture(params=FORMATS)
def format(request):
    """Return each format in turn."""
    return FORMATS[request.param]


def cast(format, x):
    """Return torch's cast of float32 values to the format, as float64."""
    x = torch.as_tensor(np.asarray(x, np.float64)).float()
    return x.to(getattr(torch, format.dtype)).double().numpy()


def around(limit):
    """Return FP32 values at, just below and just above a limit, both signs."""
    x = np.float32(limit)
    near = np.array([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))], np.float64)
    return np.concatenate([near, -near])


def everywhere():
    """Return FP32 values over its whole range, random and exact powers, and values near every format's grid."""
    rng = np.random.default_rng(0)
    k = np.arange(-149, 128)
    parts = [2.0**k, 1.5 * 2.0**k, rng.uniform(1, 2, 60000) * 2.0 ** rng.integers(-149, 128, 60000)]
    parts += [
        around(v) for f in FORMATS.values() for v in (f.max, f.overflow, f.min_normal, f.min_subnormal, f.flush_limit)
    ]
    x = np.concatenate([*parts, [0.0, -0.0]]).astype(np.float32).astype(np.float64)
    return x[np.isfinite(x)]


def test_limits_are_those_torch_reports(format):
    """Largest and smallest normal value agree with torch.finfo, bits with its eps."""
    info = FINFO[format.name]
    assert format.max == info.max
    assert format.min_normal == info.smallest_normal
    assert 2.0 ** (1 - format.bits) == info.eps


def test_the_smallest_subnormal_is_kept_and_half_of_it_flushes(format):
    """|x| at half the smallest subnormal is zero after the cast, the next FP32 above it is the smallest subnormal."""
    at, above = np.float32(format.flush_limit), np.nextafter(np.float32(format.flush_limit), np.float32(1))
    got = cast(format, [format.min_subnormal, at, above, -at, -above])
    assert got.tolist() == [format.min_subnormal, 0, format.min_subnormal, 0, -format.min_subnormal]
    assert format.flushes([format.min_subnormal, at, above, -at, -above, 0.0]).tolist() == [
        False,
        True,
        False,
        True,
        False,
        False,
    ]


def test_fp16_flushes_at_exactly_2_to_the_minus_25():
    """The number the whole project turns on."""
    assert FP16.flush_limit == 2.0**-25
    assert FP16.min_subnormal == 2.0**-24
    assert torch.tensor(2.0**-25).half().item() == 0


def test_flushes_says_what_the_cast_does(format):
    """Over FP32's whole range, non-zero elements that the cast makes zero are those `flushes` names, one for one."""
    x = everywhere()
    np.testing.assert_array_equal(format.flushes(x), (x != 0) & (cast(format, x) == 0))


def test_overflows_says_what_the_cast_does(format):
    """Over FP32's whole range the cast gives inf (E4M3: moves a value by over half a unit) where `overflows` says so."""
    x = everywhere()
    got = cast(format, x)
    moved = np.isnan(got) | (np.abs(np.abs(got) - np.abs(x)) > 16)  # E4M3 has no inf: saturated, or NaN
    np.testing.assert_array_equal(format.overflows(x), moved if format is FP8_E4M3 else np.isinf(got))


def test_inf_overflows_and_nan_does_not(format):
    """Inf is beyond every range; NaN is another thing."""
    assert format.overflows([np.inf, -np.inf, np.nan]).tolist() == [True, True, False]


@pytest.mark.parametrize("scale", [2.0**-8, 1.0, 2.0**5])
def test_a_value_rounded_to_fp16_first_may_meet_another_fate(format, scale):
    """What counts is the value that is cast: of FP16-born gradients the rounded one."""
    x = np.random.default_rng(1).uniform(1, 2, 20000) * 2.0 ** np.random.default_rng(2).integers(-30, 18, 20000)
    born = cast(FP16, x) * scale
    finite = np.isfinite(born)
    got = cast(format, born)
    np.testing.assert_array_equal(format.flushes(born), (born != 0) & (got == 0))
    if format is not FP8_E4M3:
        np.testing.assert_array_equal(format.overflows(born)[finite], np.isinf(got)[finite])


def test_rounding_twice_differs_from_once():
    """A value just above the FP8 limit is first rounded down to it by FP16, and then flushed: double rounding is real."""
    x = FP8_E4M3.flush_limit * (1 + 2.0**-12)
    assert not FP8_E4M3.flushes(x)
    assert cast(FP8_E4M3, x) > 0
    assert FP8_E4M3.flushes(cast(FP16, x))
    assert cast(FP8_E4M3, cast(FP16, x)) == 0


def test_formats_are_found_by_any_usual_name():
    """Short names, torch's names, dtypes, and a format itself."""
    for name in ("fp16", "FP16", "half", "float16", "torch.float16", torch.float16, FP16):
        assert find(name) is FP16
    assert find(torch.bfloat16) is BF16
    assert find("e4m3") is find("float8_e4m3fn") is find("fp8-e4m3") is FP8_E4M3
    with pytest.raises(AmpscopeError, match="no format 'fp12'; there are fp16, bf16, fp8_e4m3, fp8_e5m2"):
        find("fp12")
