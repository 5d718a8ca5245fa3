"""The free underflow estimate: what each kind of zero is taken for, on gradients made for the purpose."""

import numpy as np
import pytest
import torch
from torch import nn

from ampscope.probe.describe import tables
from ampscope.probe.stats import measure
from ampscope.record import derive
from ampscope.record.step import Layer
from ampscope.record.underflow import COLUMNS, Context, estimate

NAMES = ("head.weight", "b.weight", "a.weight")
LAYERS = [Layer(n, (64, 64), 4096, "float32") for n in NAMES]
CONTEXT = Context.of(LAYERS, NAMES)


def columns(*grads):
    """Return the log's columns of some gradients, in layer order."""
    return derive.compact(measure(list(grads)).resolve(), 1.0)


def random(size, seed=0):
    """Return a normal gradient [64, 64] of this standard deviation, as FP32."""
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)) * size


def flushed(exact):
    """Return a gradient as FP16 leaves it, and the share of its elements that became zero."""
    half = exact.half().float()
    return half, float(((half == 0) & (exact != 0)).float().mean())


@pytest.mark.parametrize("power", [-26, -25, -24, -23, -21, -18, -14])
def test_rounded_gradients_are_estimated_from_what_is_left(power):
    """Scattered zeros: the truth lies inside the bounds, the estimate within two points (four where nearly all is lost)."""
    grads, truth = zip(*(flushed(random(2.0**power, seed)) for seed in range(3)), strict=True)
    best, low, high = estimate(columns(*grads), CONTEXT)
    assert np.abs(best - truth).max() < (0.04 if power < -25 else 0.02)
    assert (low <= truth).all()
    assert (truth <= high).all()


def test_dead_units_are_natural():
    """Empty rows and the reader's empty columns, far above the grid: nothing was flushed."""
    head, b, a = (random(1e-2, seed).half().float() for seed in range(3))
    head[:, :20] = 0
    b[:20] = 0
    best, _, high = estimate(columns(head, b, a), CONTEXT)
    assert best.max() == 0
    assert high.max() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_did_not_pass_through_fp16_was_not_flushed_by_it(dtype):
    """Tiny FP32 and BF16 gradients with zeros of their own: 0, and the bounds say so."""
    grads = [random(1e-9, seed).to(dtype).float() for seed in range(3)]
    for grad in grads:
        grad[:, ::3] = 0
    best, _, high = estimate(columns(*grads), CONTEXT)
    assert best.max() == 0
    assert high.max() <= 3.01 / 4096


def test_an_empty_gradient_between_living_ones_is_natural():
    """The flow went by another way (an expert that was not chosen)."""
    best, _, high = estimate(
        columns(random(1e-2).half().float(), torch.zeros(64, 64), random(1e-2, 1).half().float()), CONTEXT
    )
    assert best[1] == 0
    assert high[1] < 0.01


def test_what_lies_behind_a_gradient_near_the_grid_is_flushed():
    """The flow died on its way, and everything behind is empty."""
    best, low, high = estimate(
        columns(random(2.0**-23).half().float(), torch.zeros(64, 64), torch.zeros(64, 64)), CONTEXT
    )
    assert best[1:].min() > 0.9
    assert low[1:].min() > 0.5
    assert high[1:].min() == 1


def test_where_nothing_is_left_only_the_loss_tells():
    """All gradients empty: flushed at an ordinary scale; natural where the loss is 0."""
    empty = columns(*[torch.zeros(64, 64)] * 3)
    assert estimate(empty, CONTEXT, 1.0, 0.5)[0].min() > 0.5
    assert estimate(empty, CONTEXT, 1.0, 0.0)[0].max() == 0


def test_sums_of_equal_micro_batches_are_judged_by_their_own_grid():
    """Two micro-batches alike: steps of 2^-23, so that nothing stands on 2^-24."""
    halves, truth = zip(*(flushed(random(2.0**-23, seed)) for seed in range(3)), strict=True)
    best, low, high = estimate(columns(*(2 * h for h in halves)), CONTEXT, micro_steps=2)
    assert np.abs(best - truth).max() < 0.02
    assert ((low <= truth) & (truth <= high)).all()


def test_a_table_of_steps_is_judged_step_by_step():
    """[T, L] gives what each row gives alone, however many are worked on at once; not sampled is 0."""
    steps = [columns(*(flushed(random(2.0**-p, seed))[0] for seed in range(3))) for p in (26, 24, 20, 10)]
    table = {k: np.stack([s[k] for s in steps]) for k in COLUMNS}
    table = {k: np.tile(v, (3000, 1)) for k, v in table.items()}
    table["state"][5] = 0
    found = estimate(table, CONTEXT)
    for i in range(4):
        for whole, alone in zip(found, estimate(steps[i], CONTEXT), strict=True):
            np.testing.assert_array_equal(whole[i::4][2:], np.broadcast_to(alone, (2998, 3)))
    assert found[2][5].max() == 0


def test_no_layers():
    """A log without layers has an empty estimate."""
    none = {k: np.zeros((4, 0), np.int32) for k in COLUMNS}
    assert estimate(none, Context.of(()))[0].shape == (4, 0)


def test_a_tied_table_is_a_matrix():
    """An embedding that the output layer shares has a gradient in every row."""
    model = nn.ModuleDict({"a": nn.Embedding(9, 4), "b": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
    model["head"].weight = model["a"].weight
    assert tables({"": model}) == ["b.weight"]
