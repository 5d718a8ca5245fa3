"""The loss is scaled, but the optimizer is stepped directly, on gradients still multiplied by the scale."""

import torch
from torch import nn

from tests.cases.common import MLP, OPTIMIZERS, half

TRUTH = {"rule": "optimizer-step-without-unscale", "phase": "usage", "where": []}
VARIANTS = [
    {},
    {"optimizer": "adam", "seed": 1},
    {"form": "second"},
    {"accumulate": 2, "optimizer": "momentum"},
    {"update": True},
]


def truth(update=False, **_):
    """Return the error that `update()` raises where no optimizer was stepped by the scaler."""
    return {**TRUTH, "raises": "No inf checks were recorded prior to update"} if update else TRUTH


def main(watch, seed=0, optimizer="sgd", form="one", accumulate=1, update=False):
    """Train with a forgotten scaler.step, of the only optimizer or of the second one."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"body": MLP(8, 16, 4), "head": nn.Linear(4, 1)})
    opt = OPTIMIZERS[optimizer](model["body"].parameters() if form == "second" else model.parameters(), 1e-7)
    other = torch.optim.SGD(model["head"].parameters(), 1e-7) if form == "second" else None
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watch(scaler, model)
    for _ in range(10):
        opt.zero_grad()
        for _ in range(accumulate):
            with half():
                loss = nn.functional.mse_loss(model["head"](model["body"](torch.randn(16, 8))), torch.randn(16, 1))
            scaler.scale(loss).backward()
        if other is None:
            opt.step()
            if update:
                scaler.update()
        else:
            scaler.step(opt)
            other.step()
            other.zero_grad()
            scaler.update()
