"""So many skips that 1/scale is inf in FP32: the next good step destroys the weights."""

import torch
from torch import nn

from tests.cases.common import MLP, train

TRUTH = {
    "rule": "scale-below-fp32-normal-weights-lost",
    "phase": "optimizer",
    "where": [],
    "also": ["loss-too-large-scale-below-one"],
}
VARIANTS = [
    {},
    {"seed": 1, "optimizer": "adam"},
    {"init": 2.0**16, "bad": 150, "steps": 153},
    {"init": 2.0**-122, "bad": 30, "steps": 30},
]


def main(watch, seed=0, init=2.0**-118, bad=12, steps=15, **loop):
    """Train on bad batches, then on good ones."""
    torch.manual_seed(seed)
    model = MLP(8, 16, 1)

    def loss_of(step, micro):
        x, y = torch.randn(16, 8), torch.randn(16, 1)
        if step < bad:
            x[0, 0] = float("nan")
        return nn.functional.mse_loss(model(x), y)

    train(watch, model, loss_of, steps=steps, init_scale=init, **loop)
