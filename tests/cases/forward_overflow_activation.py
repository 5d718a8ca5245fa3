"""A layer's output exceeds 65504: weights pretrained in BF16. At every step, or from one step on."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases.common import train

TRUTH = {"rule": "forward-overflow-activation", "phase": "forward"}
VARIANTS = [{}, {"at": 0, "optimizer": "adam", "seed": 1}, {"at": 2, "width": 48, "accumulate": 2}, {"kind": "conv", "at": 1}, {"kind": "conv", "at": 0, "clip": 1.0},
            {"start": 5, "at": 1, "optimizer": "adamw"}, {"start": 2, "frozen_mode": True}]  # fmt: skip


def truth(at=1, kind="linear", **_):
    """Return where the overflow is born."""
    return {**TRUTH, "where": [f"blocks.{at}.wo"]}


class Block(nn.Module):
    """x + wo(relu(wi(norm(x)))), of linear or 1x1 convolution layers."""

    def __init__(self, width, kind):
        super().__init__()
        make = (
            (lambda a, b: nn.Linear(a, b, bias=False))
            if kind == "linear"
            else (lambda a, b: nn.Conv1d(a, b, 1, bias=False))
        )
        self.wi, self.wo = make(width, 2 * width), make(2 * width, width)
        self.norm = nn.LayerNorm(width) if kind == "linear" else nn.GroupNorm(1, width)

    def forward(self, x):
        """Add the branch."""
        return x + self.wo(torch.relu(self.wi(self.norm(x.float()))))


def main(watch, seed=0, width=32, at=1, kind="linear", start=0, frozen_mode=False, **loop):
    """Train three blocks, of which one has weights that need BF16's range."""
    torch.manual_seed(seed)
    model = nn.ModuleDict(
        {"blocks": nn.Sequential(*[Block(width, kind) for _ in range(3)]), "head": nn.Linear(width, 4)}
    )
    model.train(not frozen_mode)  # fine-tuning in evaluation mode, for its dropout and BatchNorm
    x, y = torch.randn(8, width, *([6] if kind == "conv" else [])), torch.randint(0, 4, (8,))

    def loss_of(step, micro):
        if step == start and micro == 0:
            with torch.no_grad():
                model["blocks"][at].wi.weight.mul_(1000.0)
                model["blocks"][at].wo.weight.mul_(1000.0)
        h = model["blocks"](x)
        return F.cross_entropy(model["head"](h.mean(-1) if kind == "conv" else h).float(), y)

    train(watch, model, loss_of, steps=start + 8, **loop)
