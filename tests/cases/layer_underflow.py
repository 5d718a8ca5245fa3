"""At a sensible scale one branch still loses its gradients: another part of the loss keeps the scale where it is."""

import torch
from torch import nn

from tests.cases.common import train

TRUTH = {"rule": "layer-underflow", "phase": "backward", "where": ["aux"]}
VARIANTS = [{}, {"seed": 1, "optimizer": "adam"}, {"width": 48, "tiny": 6e-9}, {"accumulate": 2}]


class Net(nn.Module):
    """A main path and an auxiliary one that hardly counts."""

    def __init__(self, width, tiny):
        super().__init__()
        self.main, self.aux, self.head, self.tiny = (
            nn.Linear(8, width),
            nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width)),
            nn.Linear(width, 1),
            tiny,
        )

    def forward(self, x):
        """Return the main output and the auxiliary one."""
        return self.head(torch.relu(self.main(x))), self.aux(x)


def main(watch, seed=0, width=32, tiny=8e-9, **loop):
    """Train with a large main loss and a tiny auxiliary one."""
    torch.manual_seed(seed)
    model = Net(width, tiny)
    x, y = torch.randn(32, 8), torch.randn(32, 1) * 30.0

    def loss_of(step, micro):
        out, aux = model(x)
        return (out.float() - y).pow(2).mean() + (aux.float() - 1.0).pow(2).mean() * tiny

    train(watch, model, loss_of, steps=24, **{"init_scale": 2.0**16, "lr": 1e-6, **loop})
