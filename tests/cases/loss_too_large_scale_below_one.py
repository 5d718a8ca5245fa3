"""The loss is a sum over many tokens, times a weight: only a loss scale below 1 fits FP16."""

import torch
from torch import nn

from tests.cases.common import MLP, train

TRUTH = {"rule": "loss-too-large-scale-below-one", "phase": "backward"}
VARIANTS = [
    {},
    {"seed": 1, "weight": 3e4, "optimizer": "adam", "lr": 1e-9},
    {"depth": 3, "tokens": 2048, "weight": 4e3},
    {"init": 2.0**10, "accumulate": 2},
    {"form": "mse", "clip": 1.0},
]


def truth(depth=2, **_):
    """Return the layer where the loss's gradient arrives."""
    return {**TRUTH, "where": [f"fc{depth}"]}


def main(watch, seed=0, depth=2, tokens=4096, weight=2e3, init=2.0**16, form="ce", lr=1e-9, **loop):
    """Train a classifier or a regression on a summed loss."""
    torch.manual_seed(seed)
    model = MLP(16, *[32] * (depth - 1), 10)
    x, y = torch.randn(tokens, 16), torch.randint(0, 10, (tokens,))
    target = torch.randn(tokens, 10)

    def loss_of(step, micro):
        out = model(x).float()
        if form == "mse":
            return weight * nn.functional.mse_loss(out, target, reduction="sum")
        return weight * nn.functional.cross_entropy(out, y, reduction="sum")

    train(watch, model, loss_of, steps=34, init_scale=init, lr=lr, **loop)
