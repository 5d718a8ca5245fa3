"""One parameter's own derivative is NaN (sqrt or norm of zeros); clipping by global norm spreads it over all."""

import torch
from torch import nn

from tests.cases.common import train

TRUTH = {"rule": "single-layer-nan", "phase": "backward", "where": ["temper"], "also": ["backward-nan-finite-forward"]}
VARIANTS = [
    {},
    {"start": 4, "seed": 1},
    {"optimizer": "adam", "clip": 0.0},
    {"depth": 4, "form": "pow"},
    {"depth": 1, "form": "pow"},
]


class Temper(nn.Module):
    """Scales by the square root of a learned vector."""

    def __init__(self, d, form):
        super().__init__()
        self.weight, self.form = nn.Parameter(torch.ones(d)), form

    def forward(self, x):
        """Return the scaled input."""
        root = self.weight.sqrt() if self.form == "sqrt" else self.weight.abs().pow(0.5)
        return x * root


def main(watch, seed=0, width=16, depth=2, start=0, form="sqrt", clip=1.0, **loop):
    """Train a network with it in the middle; one entry of the vector is zero from `start` on."""
    torch.manual_seed(seed)
    parts = [(f"fc{i}", nn.Linear(width, width)) for i in range(depth)]
    model = nn.Sequential()
    for name, m in [
        *parts[: depth // 2],
        ("temper", Temper(width, form)),
        *parts[depth // 2 :],
        ("head", nn.Linear(width, 1)),
    ]:
        model.add_module(name, m)
    x, y = torch.randn(16, width), torch.randn(16, 1)

    def loss_of(step, micro):
        if step >= start:
            with torch.no_grad():
                model.temper.weight[3] = 0.0
        return nn.functional.mse_loss(model(x), y)

    train(watch, model, loss_of, steps=start + 8, init_scale=64.0, clip=clip, **loop)
