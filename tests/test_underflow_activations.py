"""Activation statistics: what is recorded, that training is unchanged, where they stay off."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ampscope
from ampscope.probe.stats import BACKENDS

# numba's first compilation, in a thread of its own, restores the warning filters it found: pytest.warns would lose its own.
BACKENDS.warm(wait=True)


class Net(nn.Module):
    """Two linear layers with an in-place ReLU between, the first under checkpointing if asked."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.a, self.act, self.b, self.checkpointed = (
            nn.Linear(8, 16),
            nn.ReLU(inplace=True),
            nn.Linear(16, 1),
            checkpointed,
        )

    def forward(self, x):
        """Predict."""
        inner = lambda t: self.act(self.a(t))  # noqa: E731
        return self.b(checkpoint(inner, x, use_reentrant=False) if self.checkpointed else inner(x))


def train(folder, *, steps=12, watch=True, checkpointed=False, seen=None, compiled=False, **kwargs):
    """Train, watched with activation statistics; `seen` collects (output of a, gradient of a's output) by hand."""
    torch.manual_seed(0)
    model = Net(checkpointed)
    net = torch.compile(model, backend="eager") if compiled else model
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    if watch:
        ampscope.watch(
            scaler,
            net if compiled else model,
            log_dir=folder,
            run="r",
            tensorboard=False,
            activations=True,
            exponents_every=4,
            **kwargs,
        )
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = net(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    if watch:
        ampscope.unwatch(scaler)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_outputs_and_their_gradients_are_recorded_on_sampled_steps(tmp_path, checkpointed):
    """Every leaf module has output and gradient statistics at steps 0, 4, 8; counts are those of the tensors."""
    train(tmp_path, checkpointed=checkpointed)
    run = ampscope.open_run(tmp_path / "r").activations
    assert run.steps.tolist() == [0, 4, 8]
    assert [x.name for x in run.layers] == ["a:output", "a:grad", "act:output", "act:grad", "b:output", "b:grad"]
    assert [x.numel for x in run.layers] == [64, 64, 64, 64, 4, 4]
    assert {x.dtype for x in run.layers} == {"float16"}
    assert not np.isnan(run.metric("grad_max")).any()
    zeros = dict(zip([x.name for x in run.layers], run.metric("zero_ratio")[0], strict=True))
    assert 0.2 < zeros["act:output"] < 0.8  # a ReLU's zeros
    names = [x.name for x in run.layers]
    largest = run.metric("grad_max")[0]
    assert largest[names.index("act:output")] > 0.3  # an output carries no loss scale
    top = np.flatnonzero(run.exponents("b:grad")[1][0]).max() - 127
    assert 2.0**top / 64 <= largest[names.index("b:grad")] <= 2.0 ** (top + 1) / 64  # its gradient does
    steps, counts = run.exponents("b:grad")
    assert steps.tolist() == [0, 4, 8]
    assert counts.sum(1).max() <= 4


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_is_unchanged(tmp_path, checkpointed):
    """Parameters are equal bit for bit, in-place activations and checkpointing included."""
    want = train(tmp_path, watch=False, checkpointed=checkpointed)
    got = train(tmp_path, checkpointed=checkpointed)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_parameters_are_no_activations(tmp_path):
    """`run.layers` stays what it is."""
    train(tmp_path)
    run = ampscope.open_run(tmp_path / "r")
    assert [x.name for x in run.layers] == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert run.steps.tolist() == list(range(12))


def test_off_and_said_under_compile(tmp_path):
    """A compiled model: one warning, training goes on and is recorded."""
    torch._dynamo.reset()
    with pytest.warns(RuntimeWarning, match="activation statistics are off"):
        train(tmp_path, compiled=True)
    run = ampscope.open_run(tmp_path / "r")
    assert run.activations is None
    assert len(run.steps) == 12
