"""A gradient penalty of scaled gradients: it is wrong by the loss scale."""

import torch
from torch import nn

from tests.cases.common import MLP, OPTIMIZERS, half

TRUTH = {"rule": "penalty-on-scaled-grads", "phase": "usage", "where": []}
VARIANTS = [{}, {"form": "input", "seed": 1}, {"optimizer": "adam", "init": 2.0**4}, {"form": "backward"}]


def main(watch, seed=0, optimizer="sgd", form="params", init=2.0**6):
    """Train with a penalty on parameters' or the input's gradient."""
    torch.manual_seed(seed)
    model = MLP(8, 16, 1, act=torch.tanh)
    opt = OPTIMIZERS[optimizer](model.parameters(), 1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=init)
    watch(scaler, model)
    for _ in range(10):
        opt.zero_grad()
        x, y = torch.randn(16, 8, requires_grad=form == "input"), torch.randn(16, 1)
        with half():
            out = model(x)
            loss = nn.functional.mse_loss(out.float(), y)
        if form == "backward":
            scaler.scale(loss).backward(create_graph=True)
            grads = [p.grad for p in model.parameters()]
        else:
            grads = torch.autograd.grad(
                scaler.scale(loss), [x] if form == "input" else list(model.parameters()), create_graph=True
            )
        with half():
            norm = sum(g.float().pow(2).sum() for g in grads).sqrt()
            total = loss + 1e-3 * ((norm - 1.0) ** 2 if form == "input" else norm)
        scaler.scale(total).backward()
        scaler.step(opt)
        scaler.update()
        for p in model.parameters():
            p.grad = None
