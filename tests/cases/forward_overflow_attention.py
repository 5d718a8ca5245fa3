"""Attention logits overflow before the softmax, since the division by sqrt(d) comes after the product."""

import math

import torch
from torch import nn

from tests.cases.common import train

TRUTH = {"rule": "forward-overflow-attention", "phase": "forward"}
VARIANTS = [
    {},
    {"form": "einsum", "seed": 1},
    {"form": "bmm", "mask": True, "optimizer": "adam"},
    {"layers": 2, "bad": 1, "accumulate": 2},
    {"layers": 3, "bad": 0, "mask": True},
]


def truth(layers=1, bad=0, **_):
    """Return the attention module."""
    return {**TRUTH, "where": [f"layers.{bad}"]}


class Attention(nn.Module):
    """One head, logits computed by a formula of choice."""

    def __init__(self, d, form, mask):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d, d) for _ in range(3))
        self.form, self.mask = form, mask

    def forward(self, x):
        """Attend."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.form == "einsum":
            logits = torch.einsum("bid,bjd->bij", q, k)
        elif self.form == "bmm":
            logits = torch.bmm(q, k.transpose(1, 2))
        else:
            logits = q @ k.transpose(-2, -1)
        logits = logits / math.sqrt(q.shape[-1])
        if self.mask:
            n = x.shape[1]
            logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
        return x + logits.softmax(-1) @ v


def main(watch, seed=0, d=32, layers=1, bad=0, form="matmul", mask=False, **loop):
    """Train attention layers, one with large projections."""
    torch.manual_seed(seed)
    model = nn.ModuleDict(
        {
            "inp": nn.Linear(8, d),
            "layers": nn.Sequential(*[Attention(d, form, mask) for _ in range(layers)]),
            "out": nn.Linear(d, 1),
        }
    )
    with torch.no_grad():
        model["layers"][bad].q.weight.mul_(300.0)
        model["layers"][bad].k.weight.mul_(300.0)
    x, y = torch.randn(4, 10, 8), torch.randn(4, 10, 1)
    train(
        watch,
        model,
        lambda step, micro: nn.functional.mse_loss(model["out"](model["layers"](model["inp"](x))), y),
        steps=8,
        **loop,
    )
