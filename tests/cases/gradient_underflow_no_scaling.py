"""FP16 autocast without loss scaling: gradients of early layers flush to zero."""

import torch
from torch import nn

from tests.cases.common import MLP, OPTIMIZERS, half

TRUTH = {"rule": "gradient-underflow-no-scaling", "phase": "backward"}
VARIANTS = [
    {},
    {"depth": 8, "seed": 1},
    {"width": 32, "optimizer": "adam"},
    {"form": "weight", "depth": 3},
    {"form": "none", "depth": 5},
]


def truth(form="shrink", depth=6, **_):
    """Return the layers nearest the input, or any where the whole loss is small."""
    return {**TRUTH, "where": ["fc1", "fc2"] if form != "weight" else [f"fc{i + 1}" for i in range(depth)]}


def main(watch, seed=0, depth=6, width=64, optimizer="sgd", form="shrink"):
    """Train a network whose gradients shrink towards the input, or a loss with a small weight."""
    torch.manual_seed(seed)
    model = MLP(width, *[width] * depth, act=torch.tanh)
    if form != "weight":
        for p in model.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.0645 / width**0.5)
    opt = OPTIMIZERS[optimizer](model.parameters(), 1e-3)
    if form == "none":
        watch(None, model, optimizer=opt)
    else:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        watch(scaler, model)
    x, y = torch.randn(128, width), torch.randn(128, width)
    for _ in range(8):
        opt.zero_grad()
        with half():
            loss = nn.functional.mse_loss(model(x), y)
            if form == "weight":
                loss = loss * 1e-4
        if form == "none":
            loss.backward()
            opt.step()
            continue
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
