"""The loop leaves an iteration without update(): a guard jumps over it, or it is missing altogether."""

import torch
from torch import nn

from tests.cases.common import MLP, OPTIMIZERS, half

TRUTH = {"rule": "update-not-called-on-skip", "phase": "usage", "where": [], "raises": "has already been called"}
VARIANTS = [
    {},
    {"seed": 1, "optimizer": "adam", "at": 5},
    {"form": "missing"},
    {"form": "once", "at": 4},
    {"zero": False, "at": 2},
]


def main(watch, seed=0, optimizer="adam", form="guard", at=3, zero=True):
    """Train with such a loop."""
    torch.manual_seed(seed)
    model = MLP(8, 16, 1)
    opt = OPTIMIZERS[optimizer](model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    watch(scaler, model)
    for step in range(10):
        x, y = torch.randn(8, 8), torch.randn(8, 1) * (100.0 if step == at else 1.0)
        opt.zero_grad(set_to_none=zero)
        with half():
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if form == "guard":
            scaler.unscale_(opt)
            if nn.utils.clip_grad_norm_(model.parameters(), 10.0) > 50.0:
                continue
        scaler.step(opt)
        if form == "guard" or (form == "once" and step != at):
            scaler.update()
