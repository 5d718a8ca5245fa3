"""A normalisation with a tiny eps over constant (padded) rows multiplies gradients by 1/sqrt(eps)."""

import torch
from torch import nn

from tests.cases.common import train

TRUTH = {"rule": "backward-overflow-norm-eps", "phase": "backward", "where": ["ln"]}
VARIANTS = [
    {},
    {"always": True, "seed": 1},
    {"kind": "group", "optimizer": "adam"},
    {"width": 32, "eps": 1e-13, "accumulate": 2},
    {"clip": 1.0},
    {"kind": "rms"},
    {"kind": "rms", "always": True, "optimizer": "adam"},
    {"kind": "std", "eps": 1e-6, "seed": 1},
]


class ByHand(nn.Module):
    """A normalisation as people write it, in FP32."""

    def __init__(self, kind, eps):
        super().__init__()
        self.kind, self.eps = kind, eps

    def forward(self, x):
        """Return the normalised rows."""
        h = x.float()
        if self.kind == "rms":
            return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        spread = h.std(-1, keepdim=True)
        return ((h - h.mean(-1, keepdim=True)) / (spread + self.eps)).to(x.dtype)


class Net(nn.Module):
    """Projection, normalisation, output."""

    def __init__(self, d, eps, kind):
        super().__init__()
        self.proj, self.out = nn.Linear(8, d, bias=False), nn.Linear(d, 1)
        if kind in ("rms", "std"):
            self.ln = ByHand(kind, eps)
        else:
            self.ln = nn.LayerNorm(d, eps=eps) if kind == "layer" else nn.GroupNorm(1, d, eps=eps)

    def forward(self, x):
        """Return one number a frame."""
        return self.out(torch.tanh(self.ln(self.proj(x))))


def main(watch, seed=0, width=16, eps=1e-12, kind="layer", always=False, **loop):
    """Train on frames; in some batches a few are padding."""
    torch.manual_seed(seed)
    model = Net(width, eps, kind)

    def loss_of(step, micro):
        x, y = torch.randn(24, 8), torch.randn(24, 1)
        if always or step in (2, 3, 6):
            x[18:] = 0.0
        return nn.functional.mse_loss(model(x), y)

    train(watch, model, loss_of, steps=10, init_scale=512.0, **loop)
