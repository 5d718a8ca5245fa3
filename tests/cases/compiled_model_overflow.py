"""A forward overflow inside torch.compile."""

import torch
from torch import nn

from tests.cases.common import OPTIMIZERS, half

TRUTH = {"rule": "forward-overflow-activation", "phase": "forward", "where": []}
VARIANTS = [{}, {"seed": 1, "wrapped": True}]


def main(watch, seed=0, wrapped=False):
    """Train a compiled model; the plain or the compiled module is watched."""
    torch.manual_seed(seed)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 1))
    with torch.no_grad():
        model[2].weight.mul_(1e6)
    net = torch.compile(model, backend="eager")
    opt = OPTIMIZERS["adam"](model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    watch(scaler, net if wrapped else model)
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    for _ in range(5):
        opt.zero_grad()
        with half():
            loss = nn.functional.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
