"""A GradScaler around BF16 autocast."""

import torch
from torch import nn

from tests.cases.common import MLP, OPTIMIZERS

TRUTH = {"rule": "scaler-useless-with-bf16", "phase": "usage", "where": []}
VARIANTS = [{}, {"seed": 1, "optimizer": "sgd", "default": True}, {"depth": 4, "accumulate": 2}, {"growth": 3}]


def main(watch, seed=0, depth=2, optimizer="adam", default=False, accumulate=1, growth=2000):
    """Train under BF16 autocast, asked for or by CPU's default."""
    torch.manual_seed(seed)
    model = MLP(8, *[16] * (depth - 1), 1)
    opt = OPTIMIZERS[optimizer](model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=growth)
    watch(scaler, model)
    x, y = torch.randn(32, 8), torch.randn(32, 1) * 10
    for _ in range(20):
        opt.zero_grad()
        for _ in range(accumulate):
            with torch.autocast("cpu") if default else torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
