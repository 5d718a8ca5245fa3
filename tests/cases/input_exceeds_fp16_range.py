"""Raw inputs (counts, timestamps) are finite, but inf once autocast casts them to FP16."""

import torch
from torch import nn

from tests.cases.common import MLP, train

TRUTH = {"rule": "input-exceeds-fp16-range", "phase": None, "where": []}
VARIANTS = [{}, {"sometimes": True, "seed": 1}, {"optimizer": "adam", "conv": True}, {"depth": 4, "accumulate": 2}]


def main(watch, seed=0, depth=2, sometimes=False, conv=False, **loop):
    """Train on one column of large numbers."""
    torch.manual_seed(seed)
    if conv:
        model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1))
    else:
        model = MLP(10, *[20] * (depth - 1), 1)

    def loss_of(step, micro):
        x, y = torch.randn(8, 10), torch.randn(8, 1)
        if not sometimes or step % 3 == 2:
            x[:, 2] = 1.7e5 + 1e3 * x[:, 2]
        return nn.functional.mse_loss(model(x[:, None] if conv else x).float(), y)

    train(watch, model, loss_of, steps=10, init_scale=64.0, **loop)
