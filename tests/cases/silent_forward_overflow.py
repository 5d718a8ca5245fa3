"""A square overflows and is divided away: no NaN, the branch behind it is constant zero."""

import torch
from torch import nn

from tests.cases.common import train

TRUTH = {"rule": "silent-forward-overflow", "phase": "forward", "where": ["gate"]}
VARIANTS = [{}, {"seed": 1, "optimizer": "adam"}, {"form": "exp", "accumulate": 2}, {"width": 48, "clip": 1.0}]


class Gate(nn.Module):
    """A branch that is divided by a sum of squares, or by one plus an exponential."""

    def __init__(self, d, form):
        super().__init__()
        self.lin, self.form = nn.Linear(d, d), form

    def forward(self, x):
        """Return the gated branch."""
        h = self.lin(x)
        if self.form == "exp":
            return h / (
                1.0 + (h.abs() * 60.0).half().exp() if h.dtype is not torch.float16 else 1.0 + torch.exp(h.abs() * 60.0)
            )
        h = h * 400.0
        return h / (h * h).sum(-1, keepdim=True)


class Net(nn.Module):
    """A residual network with a gated branch."""

    def __init__(self, d, form):
        super().__init__()
        self.inp, self.gate, self.out = nn.Linear(8, d), Gate(d, form), nn.Linear(d, 1)

    def forward(self, x):
        """Add the branch."""
        h = self.inp(x)
        return self.out(h + self.gate(h))


def main(watch, seed=0, width=32, form="square", **loop):
    """Train the network: the loss is finite all along."""
    torch.manual_seed(seed)
    model = Net(width, form)
    with torch.no_grad():
        model.gate.lin.weight.mul_(4.0)
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    train(
        watch, model, lambda step, micro: nn.functional.mse_loss(model(x).float(), y), steps=10, init_scale=64.0, **loop
    )
