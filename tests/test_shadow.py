"""What overflowed is followed in FP32 to see whether hiding it lost anything."""

from __future__ import annotations

import pytest
import torch

import ampscope
from ampscope.probe import shadow
from ampscope.probe.shadow import Shadow

ATEN = torch.ops.aten


def overflow(scale=2.0):
    """Return (an FP16 tensor that holds inf, what FP32 has there)."""
    wide = torch.tensor([1.0, -3.0, 4e4]) * scale
    return wide.half(), wide


@pytest.mark.parametrize(
    ("op", "args", "right"),
    [
        (ATEN.tanh.default, (), True),
        (ATEN.sigmoid.default, (), True),
        (ATEN.clamp.default, (-5.0, 5.0), True),
        (ATEN.neg.default, (), None),
        (ATEN.reciprocal.default, (), True),
    ],
)
def test_a_finite_result_is_compared_with_that_of_fp32(op, args, right):
    """tanh, sigmoid and clamp give what FP32 gives; neg is not finite yet; 1/inf is as good as 1/80000 beside 1/2."""
    narrow, wide = overflow()
    carried = Shadow()
    carried.begin([narrow], [wide])
    out = op(narrow, *args)
    assert carried.follow(op, (narrow, *args), {}, None, [out], bool(torch.isfinite(out).all())) is right


def test_what_was_divided_away_is_missed():
    """A row divided by an overflow is zero in FP16 and is not in FP32."""
    narrow, wide = torch.tensor([7e4, 8e4]).half(), torch.tensor([7e4, 8e4])
    x = torch.tensor([6e4, 6e4]).half()
    carried = Shadow()
    carried.begin([narrow], [wide])
    assert carried.follow(ATEN.div.Tensor, (x, narrow), {}, None, [x / narrow], True) is False


def test_an_in_place_operation_is_followed_from_its_old_value():
    """What the operation overwrote is taken from before."""
    narrow, wide = overflow()
    carried = Shadow()
    carried.begin([narrow], [wide])
    kept = [narrow.clone()]
    narrow.tanh_()
    assert carried.follow(ATEN.tanh_.default, (narrow,), {}, kept, [narrow], True) is True


def test_memory_is_bounded(monkeypatch):
    """Beyond the limit nothing is carried, so that nothing is known."""
    monkeypatch.setattr(shadow, "MOST", 2)
    narrow, wide = overflow()
    carried = Shadow()
    carried.begin([narrow], [wide])
    assert not carried


def test_a_trace_keeps_quiet_of_what_fp32_squashes_alike():
    """tanh of an overflow is no finding, dividing by one is."""
    told = []
    for squash in (torch.tanh, lambda h: 1.0 / h):
        lin = torch.nn.Linear(4, 4)
        with ampscope.trace(lin, quiet=True) as found:
            with torch.autocast("cpu", dtype=torch.float16):
                h = lin(torch.ones(2, 4)) * 0 + 6e4
                out = squash(h * h.detach())
            out.float().sum().backward()
        told.append([e for e in found.events if e.kind == "nonfinite"])
    assert told[0] == []
    assert told[1] != []
