"""The loss scale is far below what fits, grows too slowly, and gradients flush."""

import torch

from tests.cases.common import MLP, train

TRUTH = {"rule": "scale-stuck-low-underflow", "phase": "backward", "where": []}
VARIANTS = [
    {},
    {"seed": 1, "optimizer": "adam", "depth": 4},
    {"init_scale": 8.0, "weight": 1e-6},
    {"accumulate": 2, "clip": 1.0},
]


def main(watch, seed=0, depth=3, width=32, weight=1e-5, **loop):
    """Train a loss with a small weight from a low initial scale."""
    torch.manual_seed(seed)
    model = MLP(16, *[width] * (depth - 1), 4)
    x, y = torch.randn(32, 16), torch.randn(32, 4)
    train(
        watch,
        model,
        lambda step, micro: (model(x).float() - y).pow(2).mean() * weight,
        steps=20,
        **{"init_scale": 1.0, **loop},
    )
