"""Zero gradients by nature: dead ReLU units. No loss scale changes that."""

import torch
from torch import nn

from tests.cases.common import MLP, train

TRUTH = {"rule": "dead-units-zero-grad", "phase": "none"}
VARIANTS = [
    {},
    {"depth": 4, "at": 2, "seed": 1},
    {"width": 64, "optimizer": "adam"},
    {"init_scale": 2.0**16, "accumulate": 2},
]


def truth(at=1, **_):
    """Return the dead layer (and those before it, which it cuts off)."""
    return {**TRUTH, "where": [f"fc{i}" for i in range(1, at + 1)]}


def main(watch, seed=0, depth=2, at=1, width=32, **loop):
    """Train a network with one layer whose bias killed every unit."""
    torch.manual_seed(seed)
    model = MLP(8, *[width] * (depth - 1), 1)
    with torch.no_grad():
        getattr(model, f"fc{at}").bias.fill_(-60.0)
    x, y = torch.randn(32, 8), torch.randn(32, 1) + 1.0
    train(watch, model, lambda step, micro: nn.functional.mse_loss(model(x), y), steps=10, **loop)
