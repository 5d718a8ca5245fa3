"""The loss has no gradient for a long time (an empty mask), so nothing overflows and the scale grows without limit."""

import torch

from tests.cases.common import MLP, train

TRUTH = {"rule": "scale-runaway-zero-grads", "phase": "none", "where": []}
VARIANTS = [
    {},
    {"seed": 1, "optimizer": "adam", "back": True},
    {"depth": 4, "growth_interval": 2},
    {"accumulate": 2, "form": "detached"},
]


def main(watch, seed=0, depth=2, back=False, form="mask", growth_interval=1, **loop):
    """Train on batches whose mask is empty."""
    torch.manual_seed(seed)
    model = MLP(8, *[16] * (depth - 1), 4)
    x, y = torch.randn(16, 8), torch.randn(16, 4)

    def loss_of(step, micro):
        mask = torch.ones(16, 1) if back and step >= 54 else torch.zeros(16, 1)
        error = (model(x).float() - y) ** 2
        if form == "detached":
            return error.detach().mean() + model(x).sum().float() * 0.0
        return (error * mask).sum() / mask.sum().clamp(min=1.0)

    train(watch, model, loss_of, steps=60, init_scale=2.0**16, growth_interval=growth_interval, **loop)
