"""Gradients are clipped while still multiplied by the loss scale."""

import torch
from torch import nn

from tests.cases.common import MLP, OPTIMIZERS, half

TRUTH = {"rule": "clip-before-unscale", "phase": "usage", "where": []}
VARIANTS = [
    {},
    {"form": "value", "seed": 1},
    {"optimizer": "adam", "accumulate": 2, "limit": 0.5},
    {"depth": 4, "limit": 5.0, "batches": True},
    {"form": "manual", "optimizer": "adam"},
    {"form": "data", "optimizer": "adam", "limit": 0.1},
]


def main(watch, seed=0, depth=2, optimizer="sgd", form="norm", accumulate=1, limit=1.0, batches=False):
    """Train with clipping in the wrong place."""
    torch.manual_seed(seed)
    model = MLP(8, *[32] * (depth - 1), 1)
    opt = OPTIMIZERS[optimizer](model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    watch(scaler, model)
    data = torch.randn(64, 8)
    for _ in range(30):
        opt.zero_grad()
        for _ in range(accumulate):
            x = torch.randn(64, 8) if batches else data
            with half():
                loss = nn.functional.mse_loss(model(x), x[:, :1] * 2 - x[:, 1:2]) / accumulate
            scaler.scale(loss).backward()
        if form == "value":
            nn.utils.clip_grad_value_(model.parameters(), limit)
        elif form == "data":  # leaves no trace in the version counters
            for p in model.parameters():
                p.grad.data.clamp_(-limit, limit)
        elif form == "manual":
            norm = torch.sqrt(sum(p.grad.pow(2).sum() for p in model.parameters()))
            for p in model.parameters():
                p.grad.mul_(limit / norm.clamp(min=limit))
        else:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        scaler.step(opt)
        scaler.update()
