"""Gradients grow block by block towards the input, until they overflow; outputs stay small."""

import torch
from torch import nn

from tests.cases.common import train

TRUTH = {"rule": "backward-overflow-depth", "phase": "backward"}
VARIANTS = [
    {},
    {"blocks": 10, "slope": 14.0, "seed": 1},
    {"width": 48, "optimizer": "adam", "lr": 0.0},
    {"blocks": 10, "slope": 16.0, "accumulate": 2},
    {"form": "linear", "blocks": 9},
    {"form": "cell", "blocks": 12},
    {"form": "flat", "blocks": 10, "seed": 1},
]


def truth(blocks=8, form="wavy", **_):
    """Return the blocks: which one overflows first depends on the numbers."""
    if form in ("cell", "flat"):
        return {**TRUTH, "where": ["cell"]}
    return {**TRUTH, "where": [f"blocks.{i}" for i in range(blocks)]}


class Wavy(nn.Module):
    """A residual branch of small output and steep slope."""

    def __init__(self, d, slope):
        super().__init__()
        self.fc, self.slope = nn.Linear(d, d, bias=False), slope
        nn.init.eye_(self.fc.weight)

    def forward(self, x):
        """Add the branch."""
        return x + 0.2 * torch.sin(self.slope * self.fc(x))


class Recurrent(nn.Module):
    """One cell, called again and again on its own output."""

    def __init__(self, d, calls, form):
        super().__init__()
        self.inp, self.out, self.calls, self.form = nn.Linear(4, d), nn.Linear(d, 1), calls, form
        if form == "cell":
            self.cell = Steep(d, 0.0)
            nn.init.eye_(self.cell.fc.weight).data.mul_(3.0)
        else:
            self.cell = nn.RNNCell(d, d)
            nn.init.zeros_(self.cell.weight_ih)
            nn.init.eye_(self.cell.weight_hh).data.mul_(4.0)

    def forward(self, x):
        """Return what the last state says."""
        h = self.inp(x) * 0.05
        for _ in range(self.calls):
            h = self.cell(h) * 0.9 if self.form == "cell" else self.cell(h, 0.05 * torch.sin(20.0 * h))
        return self.out(h)


class Steep(nn.Module):
    """A saturating layer with a large weight: bounded output, gradients multiplied."""

    def __init__(self, d, slope):
        super().__init__()
        self.fc = nn.Linear(d, d, bias=False)
        nn.init.orthogonal_(self.fc.weight)
        self.fc.weight.data.mul_(6.0)

    def forward(self, x):
        """Return values in [-1, 1]."""
        return torch.sin(self.fc(x))


def main(watch, seed=0, width=32, blocks=8, slope=20.0, form="wavy", lr=0.0, **loop):
    """Train a stack of such blocks."""
    torch.manual_seed(seed)
    if form in ("cell", "flat"):
        net = Recurrent(width, blocks, form)
        x, y = torch.randn(16, 4), torch.randn(16, 1)
        loss = lambda step, micro: nn.functional.mse_loss(net(x).float(), y)  # noqa: E731
        train(watch, net, loss, steps=24, init_scale=2.0**16, lr=lr, **loop)
        return
    make = Wavy if form == "wavy" else Steep
    model = nn.ModuleDict(
        {
            "inp": nn.Linear(4, width),
            "blocks": nn.Sequential(*[make(width, slope) for _ in range(blocks)]),
            "head": nn.Linear(width, 1),
        }
    )
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    loss = lambda step, micro: nn.functional.mse_loss(model["head"](model["blocks"](model["inp"](x))), y)  # noqa: E731
    train(watch, model, loss, steps=24, init_scale=2.0**16, lr=lr, **loop)
