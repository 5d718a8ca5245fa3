"""A resumed run: model and optimizer are restored, the scaler is not."""

import torch

from tests.cases.common import MLP, OPTIMIZERS, half

TRUTH = {"rule": "scaler-state-not-restored", "phase": "usage", "where": []}
VARIANTS = [
    {},
    {"seed": 1, "optimizer": "momentum", "at": 12},
    {"optimizer": "adamw", "settled": 16.0},
    {"fresh": True},
]


def main(watch, seed=0, optimizer="adam", at=6, settled=64.0, fresh=False):
    """Train, restart, train on (`fresh`: the first part was not watched)."""
    torch.manual_seed(seed)
    model = MLP(8, 16, 1)
    opt = OPTIMIZERS[optimizer](model.parameters(), 1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=settled)
    if not fresh:
        watch(scaler, model)
    for step in range(at + 20):
        if step == at:
            state = (model.state_dict(), opt.state_dict())
            model = MLP(8, 16, 1)
            model.load_state_dict(state[0])
            opt = OPTIMIZERS[optimizer](model.parameters(), 1e-6)
            opt.load_state_dict(state[1])
            scaler = torch.amp.GradScaler("cpu")
            watch(scaler, model)
        opt.zero_grad()
        x, y = torch.randn(32, 8), torch.randn(32, 1) * 500.0
        with half():
            loss = (model(x).float() - y).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
