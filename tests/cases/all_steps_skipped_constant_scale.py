"""Every step is skipped while the scale is held up by a floor (or cannot fall): the curve looks healthy."""

import torch
from torch import nn

from tests.cases.common import OPTIMIZERS, half

TRUTH = {"rule": "all-steps-skipped-constant-scale", "also": ["forward-overflow-activation"]}
VARIANTS = [
    {},
    {"seed": 1, "optimizer": "adam", "floor": 1024.0, "start": 5},
    {"form": "backoff"},
    {"form": "backward", "floor": 64.0},
    {"form": "overflow", "start": 0},
]


def truth(form="log", **_):
    """Return the module that makes the value."""
    return {**TRUTH, "phase": "backward" if form == "backward" else "forward", "where": ["gate"]}


class Gate(nn.Module):
    """Leaves its domain when `shift` grows."""

    def __init__(self, form):
        super().__init__()
        self.lin, self.form = nn.Linear(8, 8), form

    def forward(self, x, bad):
        """Return log, or sqrt at 0, or a huge product."""
        h = self.lin(x)
        if self.form == "backward":
            return torch.sqrt(torch.relu(h) * (0.0 if bad else 1.0) + (0.0 if bad else 0.1))
        if self.form == "overflow":
            return h * (60000.0 if bad else 1.0) * (60.0 if bad else 1.0)
        return torch.log(h.pow(2) + (-3.0 if bad else 0.5))


def main(watch, seed=0, form="log", floor=128.0, start=3, optimizer="sgd"):
    """Train with the popular workaround of a minimum scale."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"gate": Gate(form), "out": nn.Linear(8, 1)})
    opt = OPTIMIZERS[optimizer](model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=floor, backoff_factor=0.9999999 if form == "backoff" else 0.5)
    watch(scaler, model)
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    for step in range(start + 14):
        opt.zero_grad()
        with half():
            loss = nn.functional.mse_loss(model["out"](model["gate"](x, step >= start)).float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if scaler.get_scale() < floor and form != "backoff":
            scaler.update(floor)
