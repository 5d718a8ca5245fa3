"""What earlier steps tell of a layer's natural zeros: how far it is trusted, and that any row of a log reads the same alone."""

import numpy as np
import pytest
import torch
from torch import nn

import ampscope
from ampscope.record.history import REFERENCES, History
from ampscope.record.step import MEASURED

N = 1000
METRICS = ("underflow_ratio", "underflow_ratio_low", "underflow_ratio_high")


def judge(history, zeros, best, low, high, reference=True, probed=None, infinite=0):
    """Hand one step of one layer of N elements to a history; return (estimate, low, high)."""
    columns = {"zeros": np.array([[zeros * N]]), "state": np.array([[MEASURED]]), "nan": np.array([[0]]),
               "pos_inf": np.array([[infinite]]), "neg_inf": np.array([[0]])}  # fmt: skip
    own = tuple(np.array([[x]], np.float32) for x in (best, low, high))
    counted = None if probed is None else np.array([[probed * N]])
    found = history.judge(own, columns, np.array([N]), np.array([reference]), counted)
    return tuple(float(x[0, 0]) for x in found)


def after(shares, **kwargs):
    """Return a history of steps whose zeros were all natural, without a doubt."""
    history = History()
    for share in shares:
        judge(history, share, 0, 0, 0, **kwargs)
    return history


def test_without_a_history_a_step_speaks_for_itself():
    """The first step, and one after steps that told nothing."""
    assert judge(History(), 0.8, 0.5, 0.1, 0.8) == pytest.approx((0.5, 0.1, 0.8))
    vague = History()
    for _ in range(5):
        judge(vague, 0.8, 0.5, 0.1, 0.8)
    assert judge(vague, 0.8, 0.5, 0.1, 0.8) == pytest.approx((0.5, 0.1, 0.8))


def test_steady_natural_zeros_are_believed_to_stay():
    """30 % were natural at a larger scale: of 80 % zeros, about 50 % were flushed; the bounds stay the step's own."""
    best, low, high = judge(after([0.3] * 8), 0.8, 0.2, 0.1, 0.8)
    assert best == pytest.approx(0.46, abs=0.03)
    assert (low, high) == pytest.approx((0.1, 0.8))


def test_a_share_that_wanders_is_trusted_less():
    """The more it did, the nearer the estimate stays to the step's own."""
    own = 0.2
    moved = [judge(after(s), 0.8, own, 0.1, 0.8)[0] - own for s in ([0.3] * 8, [0.2, 0.4] * 4, [0.0, 0.6] * 4)]
    assert moved[0] > moved[1] > moved[2] > 0


def test_a_step_is_never_informed_by_its_own_probe():
    """A probe of the same step changes nothing of it, and informs the next."""
    with_probe, without = History(), History()
    assert judge(with_probe, 0.8, 0.5, 0, 0.8, probed=0.1) == judge(without, 0.8, 0.5, 0, 0.8)
    assert judge(with_probe, 0.8, 0.5, 0, 0.8)[0] < 0.3
    assert judge(without, 0.8, 0.5, 0, 0.8)[0] == pytest.approx(0.5)


def test_a_contradiction_widens_the_bounds_and_decides_nothing():
    """No natural zeros ever, and now only such: the bounds hold both, the estimate stays the step's own."""
    best, low, high = judge(after([0.0] * 10), 1.0, 0, 0, 0)
    assert low == 0
    assert high > 0.9
    assert best == 0


def test_no_history_makes_bounds_narrower():
    """Whatever was seen before."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        history = after(rng.random(rng.integers(0, 20)) * rng.random())
        zeros = rng.random()
        low, best, high = np.sort(rng.random(3) * zeros)
        got = judge(history, zeros, best, low, high)
        assert got[1] <= low + 1e-6
        assert got[2] >= high - 1e-6
        assert got[1] - 1e-6 <= got[0] <= got[2] + 1e-6
        assert got[2] <= zeros + 1e-6


def test_what_is_not_sound_tells_nothing():
    """Steps with an inf, and rows that are no references."""
    own = pytest.approx((0.5, 0.1, 0.8))
    assert judge(after([0.3] * 8, infinite=1), 0.8, 0.5, 0.1, 0.8) == own
    assert judge(after([0.3] * 8, reference=False), 0.8, 0.5, 0.1, 0.8) == own


def test_only_the_last_references_count():
    """What lies further back is forgotten."""
    history = after([0.3] * 8 + [0.6] * REFERENCES)
    assert judge(history, 0.8, 0.1, 0, 0.8) == judge(after([0.6] * REFERENCES), 0.8, 0.1, 0, 0.8)


# Of a recorded run


def train(folder, steps=80, refresh=(), **kwargs):
    """Train with dead units and scales that change, so that natural and flushed zeros mix; return (run, followed run)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 3))
    with torch.no_grad():
        model[0].bias[:8] = -20.0
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=7)
    handle = ampscope.handle(ampscope.watch(scaler, model, log_dir=folder, run="r", tensorboard=False, **kwargs))
    followed = None
    for step in range(steps):
        opt.zero_grad()
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().pow(2).mean() * (1e-3 if step % 3 else 2e-9)
        if step == 40:
            loss = loss * 1e12  # skipped
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step in refresh:
            handle.flush()
            followed = followed or ampscope.open_run(folder / "r")
            followed.refresh()
            followed.several(METRICS, rows=slice(max(0, len(followed.steps) - 3), None))
    ampscope.unwatch(scaler)
    return ampscope.open_run(folder / "r"), followed


KINDS = [{}, {"probe_every": 7}, {"every": 3, "exponents_every": 4, "probe_every": 7}, {"exponents_every": 1}]


@pytest.mark.parametrize("kwargs", KINDS, ids=lambda k: ",".join(k) or "plain")
def test_any_rows_read_alone_as_with_all_others(tmp_path, kwargs):
    """Single rows, slices and scattered rows: bit for bit the same."""
    run, _ = train(tmp_path, **kwargs)
    whole = run.several(METRICS)
    rng = np.random.default_rng(1)
    picks = [np.array([i]) for i in (0, 1, 17, 41, 79)] + [
        np.sort(rng.choice(80, 12, replace=False)),
        np.arange(30, 70),
    ]
    for rows in picks:
        for name, values in run.several(METRICS, rows=rows).items():
            np.testing.assert_array_equal(values, whole[name][rows])


@pytest.mark.parametrize("kwargs", KINDS, ids=lambda k: ",".join(k) or "plain")
def test_a_run_that_is_followed_reads_as_one_opened_at_the_end(tmp_path, kwargs):
    """Refreshed on the way, asked on the way."""
    run, followed = train(tmp_path, refresh=(3, 20, 21, 55), **kwargs)
    followed.refresh()
    for name, values in followed.several(METRICS).items():
        np.testing.assert_array_equal(values, run.metric(name))


@pytest.mark.parametrize("kwargs", KINDS, ids=lambda k: ",".join(k) or "plain")
def test_recorded_and_derived_numbers_agree(tmp_path, kwargs):
    """The share over all layers that was written while training is the one that layers' estimates add up to."""
    run, _ = train(tmp_path, **kwargs)
    estimate, numel = run.metric("underflow_ratio"), np.array([x.numel for x in run.layers])
    known = np.isfinite(estimate).all(1)
    want = (estimate[known] * numel).sum(1) / numel.sum()
    np.testing.assert_allclose(run.scalar("underflow_ratio")[known], want, atol=1e-6)
    assert want.max() > 0.05


def test_the_history_matters_here(tmp_path):
    """The training above is one where it does: estimates differ from those of steps by themselves."""
    run, _ = train(tmp_path, exponents_every=1)
    alone = np.concatenate([_alone(run, i) for i in range(80)])
    assert np.nanmax(np.abs(run.metric("underflow_ratio") - alone)) > 0.01


def _alone(run, row):
    from ampscope.record import underflow
    from ampscope.run.metrics import UNDERFLOW_COLUMNS

    context = underflow.Context.of(run.layers, run.backward_order)
    scale, loss, micro = (run.scalar(n)[row] for n in ("loss_scale", "loss", "micro_steps"))
    return underflow.estimate(run.columns(UNDERFLOW_COLUMNS, rows=[row]), context, scale, loss, micro)[0]
