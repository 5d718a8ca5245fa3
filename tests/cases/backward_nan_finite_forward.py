"""The loss is finite, a derivative is not: sqrt or pow at 0, log1p at -1, BCE on saturated probabilities."""

import torch
import torch.nn.functional as F

from tests.cases.common import MLP, train

TRUTH = {"rule": "backward-nan-finite-forward", "phase": "backward", "where": []}
VARIANTS = [{}, {"form": "pow", "seed": 1, "clip": 1.0}, {"form": "log1p", "optimizer": "adam"}, {"form": "bce"}, {"form": "distance", "accumulate": 2}, {"form": "acos", "depth": 4},
            {"form": "where", "always": True}, {"form": "signed", "seed": 2}, {"form": "atanh", "optimizer": "adam"}]  # fmt: skip


def main(watch, seed=0, depth=2, form="sqrt", always=False, **loop):
    """Train; in some batches one element sits where the derivative is infinite."""
    torch.manual_seed(seed)
    model = MLP(10, *[24] * (depth - 1), 6)

    def loss_of(step, micro):
        x = torch.randn(16, 10)
        hit = always or step in (3, 5, 6, 9)
        h = model(x)
        keep = torch.ones(16, 6, dtype=h.dtype)
        if hit:
            keep[5, 2] = 0.0
        if form == "sqrt":
            return torch.sqrt((h * h).sum(-1) * keep[:, 2]).float().mean()
        if form == "pow":
            return (h.abs() * keep).pow(0.5).float().mean()
        if form == "log1p":
            p = (h + (1.0 - keep) * 20.0).sigmoid()
            return (torch.log1p(-p * (1.0 - 1e-6)).sum(-1).exp() - 0.5).float().pow(2).mean()
        if form == "bce":
            p = (h + (1.0 - keep) * 30.0).sigmoid()
            return F.binary_cross_entropy(p, torch.zeros_like(p))
        if form == "distance":
            a = h[:, None, :3] * keep[:, None, :3]
            return torch.sqrt(((a - a.transpose(0, 1)) ** 2).sum(-1)).float().mean()
        if form == "signed":  # sign(x) * sqrt(|x|) over zero padding
            z = h * keep
            return (torch.sign(z) * torch.sqrt(torch.abs(z))).float().mean()
        if form == "atanh":  # 1 - 1e-5 is 1 in FP16; the clamp hides it in forward alone
            r = torch.where(keep > 0, torch.tanh(h) * 0.9, torch.tanh(h * 0.0 + 20.0)) * (1 - 1e-5)
            return torch.atanh(r).clamp(-8.0, 8.0).float().mean()
        if form == "acos":
            c = torch.where(keep > 0, torch.tanh(h) * 0.9, torch.tanh(h) * 0.0 + 1.0 + h * 0.0)
            return torch.acos(c).float().mean()
        z = h * keep
        return torch.where(z == 0, torch.zeros_like(z), z.float().abs().sqrt().to(z.dtype)).float().mean()

    train(watch, model, loss_of, steps=12, init_scale=64.0, **loop)
