"""One GradScaler for two optimizers: one network overflows at every step and drags the scale down for the other."""

import torch
from torch import nn

from tests.cases.common import MLP, OPTIMIZERS, half

TRUTH = {"rule": "one-optimizer-overflows-shared-scale", "where": ["D"], "phase": "forward"}
VARIANTS = [{}, {"seed": 1, "first": "D"}, {"optimizer": "sgd", "dictionary": True}, {"sometimes": True, "width": 48}]


def main(watch, seed=0, width=24, optimizer="adam", first="G", dictionary=False, sometimes=False):
    """Train two networks on losses of their own."""
    torch.manual_seed(seed)
    nets = {"G": MLP(4, width, 8), "D": MLP(8, width, 1)}
    with torch.no_grad():
        nets["D"].fc2.weight.mul_(9000.0)
    model = nets if dictionary else nn.ModuleDict(nets)
    opts = {k: OPTIMIZERS[optimizer](m.parameters(), 1e-4) for k, m in nets.items()}
    scaler = torch.amp.GradScaler("cpu")
    watch(scaler, model)
    for step in range(24):
        for name in (first, "D" if first == "G" else "G"):
            opts[name].zero_grad()
            with half():
                if name == "G":
                    loss = nets["G"](torch.randn(16, 4)).float().pow(2).mean() * 1e-2
                else:
                    s = nets["D"](torch.randn(16, 8))
                    bad = not sometimes or step % 3
                    loss = (
                        torch.tanh(s.float() * 1e-4).mean()
                        + ((s - s.mean()).pow(2).mean() / s.pow(2).mean()).float() * (1.0 if bad else 0.0)
                        if bad
                        else torch.tanh(s.float() * 1e-4).mean()
                    )
            scaler.scale(loss).backward()
            scaler.step(opts[name])
        scaler.update()
