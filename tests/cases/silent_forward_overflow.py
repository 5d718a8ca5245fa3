"""A square overflows and is divided away: no NaN, the branch behind it is constant zero."""

import torch
from torch import nn

from tests.cases.common import train

TRUTH = {"rule": "silent-forward-overflow", "phase": "forward", "where": ["gate"]}
VARIANTS = [{}, {"seed": 1, "optimizer": "adam"}, {"width": 24, "seed": 2, "accumulate": 2}, {"width": 48, "clip": 1.0}]


class Gate(nn.Module):
    """A branch that is divided by a sum of squares."""

    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)

    def forward(self, x):
        """Return the gated branch."""
        h = self.lin(x)
        h = h * 400.0
        return h / (h * h).sum(-1, keepdim=True)


class Net(nn.Module):
    """A residual network with a gated branch."""

    def __init__(self, d):
        super().__init__()
        self.inp, self.gate, self.out = nn.Linear(8, d), Gate(d), nn.Linear(d, 1)

    def forward(self, x):
        """Add the branch."""
        h = self.inp(x)
        return self.out(h + self.gate(h))


def main(watch, seed=0, width=32, **loop):
    """Train the network: the loss is finite all along."""
    torch.manual_seed(seed)
    model = Net(width)
    with torch.no_grad():
        model.gate.lin.weight.mul_(4.0)
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    train(
        watch, model, lambda step, micro: nn.functional.mse_loss(model(x).float(), y), steps=10, init_scale=64.0, **loop
    )
