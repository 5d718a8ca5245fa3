"""CONTROL: the first steps overflow at the initial scale, then everything trains."""

import torch

from tests.cases.common import MLP, train

TRUTH = {"rule": "warmup-calibration", "control": True}
VARIANTS = [
    {},
    {"size": 100.0, "seed": 1, "optimizer": "adam"},
    {"width": 64, "size": 20.0, "accumulate": 2},
    {"depth": 5, "size": 5.0, "clip": 1.0},
]


def main(watch, seed=0, width=32, depth=2, size=2.0, **loop):
    """Train a regression whose targets are large for the initial scale."""
    torch.manual_seed(seed)
    model = MLP(16, *[width] * (depth - 1), 1)
    x = torch.randn(64, 16)
    y = x.sum(1, keepdim=True) * size
    train(
        watch,
        model,
        lambda step, micro: (model(x).float() - y).pow(2).mean(),
        steps=30,
        init_scale=2.0**16,
        lr=1e-5,
        **loop,
    )
