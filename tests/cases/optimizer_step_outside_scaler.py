"""optimizer.step() is called beside scaler.step(), or in its place after unscale_()."""

import torch
from torch import nn

from tests.cases.common import MLP, OPTIMIZERS, half

TRUTH = {"rule": "optimizer-step-outside-scaler", "phase": "usage", "where": []}
VARIANTS = [{}, {"form": "before", "seed": 1, "optimizer": "adam"}, {"form": "unscaled"}, {"accumulate": 2}]


def main(watch, seed=0, optimizer="sgd", form="after", accumulate=1):
    """Train with one step too many."""
    torch.manual_seed(seed)
    model = MLP(8, 16, 1)
    opt = OPTIMIZERS[optimizer](model.parameters(), 1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    watch(scaler, model)
    for _ in range(10):
        opt.zero_grad()
        for _ in range(accumulate):
            with half():
                loss = nn.functional.mse_loss(model(torch.randn(16, 8)), torch.randn(16, 1))
            scaler.scale(loss).backward()
        if form == "before":
            opt.step()
        if form == "unscaled":
            scaler.unscale_(opt)
            opt.step()
        else:
            scaler.step(opt)
        if form == "after":
            opt.step()
        scaler.update()
