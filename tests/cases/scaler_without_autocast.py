"""A GradScaler around FP32 training."""

import torch
from torch import nn

from tests.cases.common import MLP, OPTIMIZERS

TRUTH = {"rule": "scaler-without-autocast", "phase": "usage", "where": []}
VARIANTS = [{}, {"seed": 1, "optimizer": "adam"}, {"form": "disabled", "depth": 4}, {"clip": 1.0}]


def main(watch, seed=0, depth=2, optimizer="sgd", form="none", clip=0.0):
    """Train without autocast, or with it disabled."""
    torch.manual_seed(seed)
    model = MLP(8, *[16] * (depth - 1), 1)
    opt = OPTIMIZERS[optimizer](model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu")
    watch(scaler, model)
    x, y = torch.randn(32, 8), torch.randn(32, 1)
    for _ in range(12):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=False):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(opt)
        scaler.update()
