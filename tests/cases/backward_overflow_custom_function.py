"""A home-made autograd.Function computes its backward in FP16 and overflows."""

import torch
from torch import nn

from tests.cases.common import train

TRUTH = {"rule": "backward-overflow-custom-function", "phase": "backward", "where": ["norm"]}
VARIANTS = [
    {},
    {"width": 256, "seed": 1, "size": 60.0},
    {"form": "square", "optimizer": "adam"},
    {"accumulate": 2},
    {"clip": 1.0},
]


class FusedNorm(torch.autograd.Function):
    """A normalisation whose backward sums squares in FP16."""

    @staticmethod
    def forward(ctx, x):
        """Normalise rows."""
        c = x - x.mean(-1, keepdim=True)
        rstd = (c.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt().to(x.dtype)
        ctx.save_for_backward(c, rstd)
        return c * rstd

    @staticmethod
    def backward(ctx, g):
        """Project out the direction of the input."""
        c, rstd = ctx.saved_tensors
        proj = (g * c).sum(-1, keepdim=True) / (c * c).sum(-1, keepdim=True)
        return rstd * (g - g.mean(-1, keepdim=True)) - rstd * c * proj


class Cube(torch.autograd.Function):
    """A saturating activation whose backward squares its input in FP16."""

    @staticmethod
    def forward(ctx, x):
        """Return x / (1 + |x|)."""
        ctx.save_for_backward(x)
        return x / (1.0 + x.abs())

    @staticmethod
    def backward(ctx, g):
        """Return g / (1 + |x|)^2, the slow way."""
        (x,) = ctx.saved_tensors
        return g * (x * x * 0.5) / ((x * x * 0.5) * (1.0 + x.abs()) ** 2)


class Norm(nn.Module):
    """The module around it."""

    def __init__(self, form):
        super().__init__()
        self.function = FusedNorm if form == "norm" else Cube

    def forward(self, x):
        """Apply it."""
        return self.function.apply(x)


def main(watch, seed=0, width=512, size=60.0, form="norm", **loop):
    """Train a network with it in the middle."""
    torch.manual_seed(seed)
    model = nn.Sequential()
    for name, m in (("inp", nn.Linear(16, width)), ("norm", Norm(form)), ("out", nn.Linear(width, 1))):
        model.add_module(name, m)
    with torch.no_grad():
        model.inp.weight.mul_(size * 5 if form == "norm" else size * 40)
    x, y = torch.randn(8, 16), torch.randn(8, 1)
    train(watch, model, lambda step, micro: nn.functional.mse_loss(model(x), y), steps=8, init_scale=2.0**13, **loop)
