"""A sum over many FP16 elements overflows: in a loss function, or as pooling inside a module."""

import torch
from torch import nn

from tests.cases.common import train

TRUTH = {"rule": "forward-overflow-reduction", "phase": "forward"}
VARIANTS = [
    {},
    {"size": 480, "seed": 1, "optimizer": "adam"},
    {"form": "pool"},
    {"form": "pool", "clip": 1.0, "seed": 2},
    {"form": "hub", "size": 300},
]


def truth(form="dice", **_):
    """Return the pooling module where there is one."""
    return {**TRUTH, "where": ["pool"] if form in ("pool", "hub") else []}


class SumPool(nn.Module):
    """Sum over all positions, at once or by adding them up at one node of a graph."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        """Return sums a channel."""
        if self.form == "hub":
            flat = x.flatten(2)
            hub = torch.zeros(flat.shape[2], dtype=torch.long)
            return torch.zeros_like(flat[:, :, :1]).index_add(2, hub, flat).squeeze(2)
        return x.sum((2, 3))


class Net(nn.Module):
    """Convolutions, then pixels or a pooled vector."""

    def __init__(self, form):
        super().__init__()
        self.c1, self.c2, self.form = nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1), form
        if form in ("pool", "hub"):
            self.pool, self.head = SumPool(form), nn.Linear(2, 1)

    def forward(self, x):
        """Return probabilities a pixel, or one number a sample."""
        h = torch.relu(self.c1(x))
        return self.head(self.pool(h + 1.0) * 1e-3) if self.form in ("pool", "hub") else self.c2(h).sigmoid()


def dice(p, t):
    """Return a Dice loss."""
    return 1.0 - (2.0 * (p * t).sum() + 1.0) / (p.sum() + t.sum() + 1.0)


def main(watch, seed=0, size=420, form="dice", **loop):
    """Train on images large enough that a sum over pixels passes 65504."""
    torch.manual_seed(seed)
    model = Net(form)
    x = torch.randn(1, 1, size, size)
    t = (x > -1.0).half()

    def loss_of(step, micro):
        out = model(x)
        if form in ("pool", "hub"):
            return (out.float() - 1.0).pow(2).mean()
        return dice(out, t)

    train(watch, model, loss_of, steps=5, **loop)
