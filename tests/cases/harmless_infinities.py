"""Infinities and NaN that belong there: whatever FP32 would give, FP16 gives too. Nothing may be said of any of them."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases.common import train

TRUTH = {"control": True}
VARIANTS = [
    {"form": form, **loop}
    for form, loop in (
        ("gelu", {}),
        ("gelu", {"optimizer": "adam", "seed": 1}),
        ("clamp", {}),
        ("range", {}),
        ("router", {"accumulate": 2}),
        ("mask", {}),
        ("unused", {}),
        ("sqrt", {}),
        ("empty", {"seed": 2}),
        ("labels", {}),
        ("angle", {}),
        ("metric", {"clip": 1.0}),
    )
]


class Act(nn.Module):
    """One of several activations that meet inf."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        """Return values that FP32 gives as well."""
        if self.form == "gelu":  # the cube overflows, tanh(inf) = 1
            return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
        if self.form == "clamp":  # beyond the bound anyway
            return (x * 3000.0).clamp(-100.0, 100.0) / 100.0
        if self.form == "range":  # inf as the start of a minimum
            low = torch.full(x.shape[:1], float("inf"), dtype=x.dtype)
            for j in range(x.shape[1]):
                low = torch.minimum(low, x[:, j])
            return x - low[:, None]
        if self.form == "router":  # all but the two largest are masked before the softmax
            least = x.topk(2, -1).values[:, -1:]
            return x * x.masked_fill(x < least, float("-inf")).softmax(-1)
        if self.form == "mask":  # -1e9 is -inf in FP16, every row keeps some
            bias = torch.zeros(x.shape).masked_fill(x.detach() < -0.5, -1e9)
            return x * (x + bias.to(x.dtype)).softmax(-1)
        if self.form == "unused":  # 1 / 0 in the branch that is left out
            size = (x.detach() > 10).float().sum(-1, keepdim=True)
            return x + torch.where(size > 0, 1.0 / size, torch.zeros_like(size)).to(x.dtype)
        if self.form == "sqrt":  # an infinite derivative at 0 that relu masks
            return torch.sqrt(torch.relu(x))
        return torch.relu(x)


def main(watch, seed=0, form="gelu", **loop):
    """Train a classifier, or regress what the form asks for."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), Act(form), nn.Linear(32, 2))
    x, y = torch.randn(32, 8), torch.randn(32, 2)
    if form in ("gelu", "clamp"):
        x[0] = 120.0
    if form == "empty":
        x[3] = 0.0
    if form == "labels":
        y[torch.rand(32, 2) < 0.2] = float("nan")

    def loss_of(step, micro):
        out = model(x).float()
        if form == "labels":  # missing labels are indexed away
            known = ~torch.isnan(y)
            return F.mse_loss(out[known], y[known])
        if form == "angle":
            return (torch.atan2(out[:, 1], out[:, 0]) - y[:, 0]).abs().mean()
        if form == "metric":
            with torch.no_grad():
                (out.half() * 500).pow(2).sum()
        return F.smooth_l1_loss(out, y)

    train(watch, model, loss_of, steps=12, init_scale=256.0, **loop)
