"""An epsilon that FP16 rounds to zero meets a zero denominator."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases.common import MLP, train

TRUTH = {"rule": "eps-underflow-division", "phase": "forward", "where": []}
VARIANTS = [
    {},
    {"form": "std", "seed": 1},
    {"form": "sum", "optimizer": "adam"},
    {"form": "module", "accumulate": 2},
    {"form": "log"},
    {"form": "probability", "always": True},
    {"form": "rsqrt", "always": True},
    {"form": "root"},
]


def truth(form="normalize", **_):
    """Return the module that divides, where there is one."""
    return {**TRUTH, "where": ["norm"] if form == "module" else []}


class UnitNorm(nn.Module):
    """Rows of length one."""

    def forward(self, x):
        """Divide by the length."""
        return x / (x.norm(dim=-1, keepdim=True) + 1e-8)


def main(watch, seed=0, form="normalize", always=False, **loop):
    """Train an embedding; now and then a sample is blank."""
    torch.manual_seed(seed)
    model = MLP(16, 24, 8)
    for fc in (model.fc1, model.fc2):
        fc.register_parameter("bias", None)
    if form == "module":
        model.norm = UnitNorm()

    def loss_of(step, micro):
        x, y = torch.randn(8, 16), torch.randn(8, 8)
        if always or step in (3, 5, 8):
            x[3] = 0.0
        h = model(x)
        if form == "normalize":
            h = F.normalize(h, dim=-1)
        elif form == "std":
            h = (h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-8)
        elif form == "sum":
            h = h / (h.abs().sum(-1, keepdim=True) + 1e-9)
        elif form == "root":  # squares of 1e-5 are zero in FP16
            h = h + (h == 0).to(h.dtype) * 1e-5
            h = h / torch.sqrt((h * h).sum(-1, keepdim=True) + 1e-12)
        elif form == "rsqrt":
            h = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-8)
        elif form == "probability":  # entropy: 0 · log(0 + eps)
            p = torch.softmax(h * 400, -1)
            h = h - (p * torch.log(p + 1e-8)).sum(-1, keepdim=True)
        elif form == "log":
            h = h * (1.0 / torch.log1p(h.abs().sum(-1, keepdim=True)).clamp(min=1e-10))
        else:
            h = model.norm(h)
        return (h.float() - y).pow(2).mean()

    train(watch, model, loss_of, steps=12, init_scale=64.0, **loop)
