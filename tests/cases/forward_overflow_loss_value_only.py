"""The loss is inf, its gradients are finite: squares overflow, their derivatives do not."""

import torch

from tests.cases.common import MLP, train

TRUTH = {"rule": "forward-overflow-loss-value-only", "phase": "forward", "where": []}
VARIANTS = [{}, {"seed": 1, "optimizer": "adam", "form": "sum"}, {"width": 8, "accumulate": 2}, {"sometimes": True}]


def main(watch, seed=0, width=16, form="mean", sometimes=False, **loop):
    """Regress targets whose squared error passes 65504."""
    torch.manual_seed(seed)
    model = MLP(8, width, 1)
    x, y = torch.randn(32, 8), torch.randn(32, 1) * 300.0

    def loss_of(step, micro):
        error = model(x) - (y * (0.1 if sometimes and step % 3 else 1.0)).half()
        return error.pow(2).mean() if form == "mean" else error.square().sum() / 32.0

    train(watch, model, loss_of, steps=9, init_scale=16.0, **loop)
