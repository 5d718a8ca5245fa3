"""The learning-rate schedule runs on although many steps are skipped."""

import torch

from tests.cases.common import MLP, OPTIMIZERS, half

TRUTH = {"rule": "scheduler-advanced-on-skipped-step", "phase": "usage", "where": []}
VARIANTS = [
    {},
    {"kind": "cosine", "seed": 1, "optimizer": "adam"},
    {"kind": "linear", "spikes": 3},
    {"kind": "lambda", "size": 500.0},
]


def main(watch, seed=0, kind="onecycle", size=300.0, spikes=0, optimizer="sgd"):
    """Train with a per-step schedule from a scale that takes long to settle, or with outliers now and then."""
    torch.manual_seed(seed)
    model = MLP(8, 16, 1)
    opt = OPTIMIZERS[optimizer](model.parameters(), 1e-4)
    steps = 40
    schedule = {
        "onecycle": lambda: torch.optim.lr_scheduler.OneCycleLR(opt, 1e-4, total_steps=steps + 1),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps),
        "linear": lambda: torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=steps),
        "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 0.95**k),
    }[kind]()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16 if not spikes else 64.0)
    watch(scaler, model)
    for step in range(steps):
        x, y = torch.randn(16, 8), torch.randn(16, 1) * (size if not spikes else 1.0)
        if spikes and step % 10 == 9:
            y = y * 2e4
        opt.zero_grad()
        with half():
            loss = (model(x).float() - y).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        schedule.step()
