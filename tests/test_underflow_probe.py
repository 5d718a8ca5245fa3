"""The underflow probe: exact, harmless, off where it cannot run."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampscope
from ampscope.run.find import find_runs
from tests.loops import LOOPS
from tests.test_watch_loops import Watching, unwatched

PROBED = [
    "plain", "unscale_and_clip", "accumulation", "gan_one_update", "gan_two_updates", "fused_adam", "sparse_embedding", "tied_weights",
    "frozen_then_unfrozen", "several_losses", "dropout_and_batchnorm", "disabled_scaler", "users_subclass", "float64_parameters",
]  # fmt: skip


@pytest.mark.parametrize("name", PROBED)
def test_training_is_unchanged_while_probed(name, tmp_path, recwarn):
    """Parameters, buffers and random state: bit for bit those of the unwatched run, and the probe ran."""
    want = LOOPS[name](unwatched, 12)
    watching = Watching(tmp_path, probe_every=3)
    got = LOOPS[name](watching, 12)
    watching.close()
    for a, b in zip(want, got, strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
    assert not [w for w in recwarn if "ampscope" in str(w.message)]
    for run in find_runs(tmp_path):
        measured = run.metric("underflow_ratio_measured")
        assert np.isfinite(measured).any()
        assert not np.isfinite(measured[1]).any()  # between probes there is nothing


def small(seed=0, scale=1.0, weight=1e-4, body=None, **kwargs):
    """Train one step of a small net in FP16 at a scale; return (run folder's run, model, flushed share by FP32)."""
    torch.manual_seed(seed)
    model = body or nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    x = torch.randn(8, 16)
    return model, opt, scaler, lambda: model(x).float().pow(2).mean() * weight


def test_it_counts_what_fp32_says_is_lost(tmp_path):
    """Flushed elements equal those that are non-zero in FP32 (weights rounded to FP16) and zero in the FP16 run."""
    model, opt, scaler, loss_fn = small(weight=1e-5)
    ampscope.watch(scaler, model, log_dir=tmp_path, run="r", probe_every=1, tensorboard=False)
    kept = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.half())
    truth = torch.autograd.grad(loss_fn(), list(model.parameters()))
    with torch.no_grad():
        for p, value in zip(model.parameters(), kept, strict=True):
            p.copy_(value)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_fn()
    scaler.scale(loss).backward()
    want = [float(((p.grad == 0) & (t != 0)).float().mean()) for p, t in zip(model.parameters(), truth, strict=True)]
    scaler.step(opt)
    scaler.update()
    ampscope.unwatch(scaler)
    got = ampscope.open_run(tmp_path / "r").metric("underflow_ratio_measured")[0]
    assert max(want) > 0.1
    np.testing.assert_allclose(got, want, atol=1e-6)


class Checkpointed(nn.Module):
    """A BatchNorm inside a checkpointed block."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2))
        self.head, self.reentrant = nn.Linear(16, 4), reentrant

    def forward(self, x):
        """Predict."""
        x = x.requires_grad_() if self.reentrant else x
        return self.head(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def steps(model, opt, scaler, loss_fn, n=6):
    """Train; return parameters and buffers."""
    for _ in range(n):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_fn()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    return [t.detach().clone() for t in [*model.parameters(), *model.buffers()]]


def test_checkpointing_keeps_running_statistics(tmp_path):
    """Non-reentrant: the recomputation of the probe changes no buffer and no random number."""
    want = steps(*small(body=_seeded(Checkpointed, False)))
    parts = small(body=_seeded(Checkpointed, False))
    ampscope.watch(parts[2], parts[0], log_dir=tmp_path, run="r", probe_every=2, tensorboard=False)
    got = steps(*parts)
    ampscope.unwatch(parts[2])
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert np.isfinite(ampscope.open_run(tmp_path / "r").metric("underflow_ratio_measured")).any()


def _seeded(cls, *args):
    torch.manual_seed(3)
    return cls(*args)


class Twice(torch.autograd.Function):
    """A custom function whose backward changes what it saved."""

    @staticmethod
    def forward(ctx, x):
        """Save a tensor."""
        ctx.saved = torch.full_like(x, 2.0)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        """Use it up."""
        out = grad * ctx.saved
        ctx.saved.mul_(0.5)
        return out


class Custom(nn.Module):
    """Uses the custom function."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 1)

    def forward(self, x):
        """Predict."""
        return self.b(Twice.apply(self.a(x)))


@pytest.mark.parametrize(
    ("make", "why"),
    [(lambda: _seeded(Checkpointed, True), "reentrant"), (lambda: _seeded(Custom), "custom function Twice")],
)
def test_it_stays_off_where_it_would_do_harm(tmp_path, make, why):
    """One warning, one note, training as unwatched."""
    want = steps(*small(body=make()))
    parts = small(body=make())
    ampscope.watch(parts[2], parts[0], log_dir=tmp_path, run="r", probe_every=1, tensorboard=False)
    with pytest.warns(RuntimeWarning, match="underflow probe is off") as caught:
        got = steps(*parts)
    ampscope.unwatch(parts[2])
    assert len([w for w in caught if "probe" in str(w.message)]) == 1
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    run = ampscope.open_run(tmp_path / "r")
    assert [e for e in run.events if e.data.get("topic") == "probe" and why in e.data["why"]]
    assert not np.isfinite(run.metric("underflow_ratio_measured")).any()


class Turned(nn.Module):
    """A complex parameter behind an FP16 layer."""

    def __init__(self):
        super().__init__()
        self.a, self.turn = nn.Linear(16, 8), nn.Parameter(torch.complex(torch.randn(8), torch.randn(8)))

    def forward(self, x):
        """Return absolute values."""
        return (self.a(x).float() * self.turn).abs()


def test_complex_gradients_count_as_two_reals(tmp_path):
    """What is computed in FP32 is measured, and lost nothing; training is unchanged."""

    def made():
        model, opt, _, loss_fn = small(body=_seeded(Turned))
        return model, opt, torch.amp.GradScaler("cpu", enabled=False), loss_fn  # enabled, it knows no complex gradients

    want, parts = steps(*made(), n=2), made()
    ampscope.watch(parts[2], parts[0], log_dir=tmp_path, run="r", probe_every=1, tensorboard=False)
    got = steps(*parts, n=2)
    ampscope.unwatch(parts[2])
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    run = ampscope.open_run(tmp_path / "r")
    assert {x.name: x.numel for x in run.layers}["turn"] == 16
    assert run.metric("underflow_ratio_measured")[0, [x.name for x in run.layers].index("turn")] == 0


def test_hooks_of_the_user_fire_once_more(tmp_path):
    """On tensors of the graph, at probed steps only, once a scale tried; hooks on parameters' gradients do not."""
    model, opt, scaler, _ = small()
    calls = {"tensor": 0, "accumulated": 0}

    def count(name):
        calls[name] += 1

    model[0].weight.register_post_accumulate_grad_hook(lambda p: count("accumulated"))
    ampscope.watch(scaler, model, log_dir=tmp_path, run="r", probe_every=2, tensorboard=False)
    seen = []
    for _ in range(4):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = model[1](model[0](torch.randn(8, 16)))
            hidden.register_hook(lambda g: count("tensor"))
            loss = model[2](hidden).float().pow(2).mean() * 1e-4
        scaler.scale(loss).backward()
        seen.append(dict(calls))
        calls = dict.fromkeys(calls, 0)
        scaler.step(opt)
        scaler.update()
    ampscope.unwatch(scaler)
    assert [s["accumulated"] for s in seen] == [1, 1, 1, 1]
    assert [s["tensor"] for s in seen][1::2] == [1, 1]
    assert min([s["tensor"] for s in seen][::2]) >= 2


def test_without_a_scaler_it_says_so(tmp_path):
    """`scaler=None` has no scale() to run in."""
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(RuntimeWarning, match="there is no scaler"):
        handle = ampscope.watch(None, model, optimizer=opt, log_dir=tmp_path, run="r", probe_every=1)
    handle.close()
