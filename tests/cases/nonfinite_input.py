"""The data holds NaN or inf: a corrupted sample, or a target of a loss."""

import torch
from torch import nn

from tests.cases.common import MLP, train

TRUTH = {"rule": "nonfinite-input", "phase": "data", "where": []}
VARIANTS = [
    {},
    {"value": float("inf"), "seed": 1},
    {"optimizer": "adam", "every": 2},
    {"depth": 4, "accumulate": 2, "every": 3},
    {"clip": 1.0, "conv": True},
    {"target": True, "seed": 2},
    {"value": float("-inf"), "seed": 3},
    {"value": float("-inf"), "conv": True, "optimizer": "adam"},
    {"target": True, "value": float("-inf")},
    {"target": True, "value": float("inf"), "accumulate": 2, "every": 3},
]


def main(watch, seed=0, depth=2, value=float("nan"), every=4, conv=False, target=False, **loop):
    """Train over a data set with one bad sample."""
    torch.manual_seed(seed)
    if conv:
        model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1))
    else:
        model = MLP(10, *[20] * (depth - 1), 1)
    data, wanted = torch.randn(64, 10), torch.randn(64, 1)
    if target:
        wanted[(every - 1) * 8 + 5] = value
    else:
        data[(every - 1) * 8 + 5, 4] = value

    def loss_of(step, micro):
        rows = slice(step % every * 8, step % every * 8 + 8)
        x = data[rows]
        return nn.functional.mse_loss(model(x[:, None] if conv else x), wanted[rows])

    train(watch, model, loss_of, steps=16, init_scale=16.0, **loop)
