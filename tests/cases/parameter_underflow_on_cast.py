"""Weights are so small that autocast's cast to FP16 makes them zero; a factor behind the layer hides it in FP32."""

import torch
from torch import nn

from tests.cases.common import MLP, train

TRUTH = {"rule": "parameter-underflow-on-cast", "phase": "forward"}
VARIANTS = [
    {},
    {"at": 1, "seed": 1, "optimizer": "adam", "lr": 1e-10},
    {"at": 3, "depth": 3, "std": 3e-8},
    {"accumulate": 2, "clip": 1.0},
]


def truth(at=2, **_):
    """Return the layer."""
    return {**TRUTH, "where": [f"fc{at}"]}


class Net(nn.Module):
    """Linear layers, one with tiny weights and a large factor behind it."""

    def __init__(self, depth, at, std):
        super().__init__()
        self.body = MLP(16, *[16] * depth)
        for name, m in self.body.named_children():
            self.add_module(name, m)
        self.depth, self.at = depth, at
        nn.init.normal_(getattr(self, f"fc{at}").weight, std=std)
        del self.body

    def forward(self, x):
        """Return the last layer's output."""
        for i in range(1, self.depth + 1):
            x = getattr(self, f"fc{i}")(x)
            x = x.float() * 1e7 if i == self.at else torch.relu(x)
        return x


def main(watch, seed=0, depth=3, at=2, std=1e-8, lr=1e-12, **loop):
    """Train with a learning rate that leaves the weights tiny."""
    torch.manual_seed(seed)
    model = Net(depth, at, std)
    x, y = torch.randn(32, 16), torch.randn(32, 16)
    train(
        watch,
        model,
        lambda step, micro: (model(x).float() * 1e-7 - y).pow(2).mean(),
        steps=8,
        lr=lr,
        init_scale=2.0**10,
        **loop,
    )
