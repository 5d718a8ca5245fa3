"""Gradients are cleared only after a real step: one overflow stays for ever."""

import torch
from torch import nn

from tests.cases.common import MLP, OPTIMIZERS, half

TRUTH = {"rule": "stale-nonfinite-grads", "phase": "usage", "where": []}
VARIANTS = [
    {},
    {"seed": 1, "optimizer": "adam", "at": 4},
    {"depth": 4, "accumulate": 2},
    {"form": "scale", "clip": True},
]


def main(watch, seed=0, depth=2, optimizer="sgd", at=2, accumulate=1, form="hook", clip=False):
    """Train with a conditional zero_grad."""
    torch.manual_seed(seed)
    model = MLP(8, *[16] * (depth - 1), 1)
    opt = OPTIMIZERS[optimizer](model.parameters(), 1e-3)
    stepped = []
    opt.register_step_post_hook(lambda *a: stepped.append(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watch(scaler, model)
    for step in range(at + 10):
        before, scale = len(stepped), scaler.get_scale()
        for _ in range(accumulate):
            with half():
                loss = nn.functional.mse_loss(
                    model(torch.randn(16, 8)).float(), torch.randn(16, 1) * (5e4 if step == at else 1.0)
                )
            scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        if len(stepped) > before if form == "hook" else scaler.get_scale() >= scale:
            opt.zero_grad()
