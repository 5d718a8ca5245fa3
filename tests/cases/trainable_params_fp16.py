"""Trainable parameters are FP16: the scaler refuses to unscale their gradients."""

import torch
from torch import nn

from tests.cases.common import half

TRUTH = {"rule": "trainable-params-fp16", "phase": "usage", "raises": "Attempting to unscale FP16 gradients"}
VARIANTS = [{}, {"seed": 1, "form": "head", "unscale": True}, {"form": "all"}]


def truth(form="adapter", **_):
    """Return the half-precision modules."""
    return {**TRUTH, "where": {"adapter": ["adapter"], "head": ["head"], "all": ["backbone", "adapter", "head"]}[form]}


class Net(nn.Module):
    """A backbone with an adapter and a head."""

    def __init__(self):
        super().__init__()
        self.backbone, self.adapter, self.head = (
            nn.Linear(16, 16),
            nn.Sequential(nn.Linear(16, 2), nn.Linear(2, 16)),
            nn.Linear(16, 1),
        )

    def forward(self, x):
        """Return one number a sample."""
        return self.head(self.backbone(x) + self.adapter(x))


def main(watch, seed=0, form="adapter", unscale=False):
    """Train what was loaded in half precision."""
    torch.manual_seed(seed)
    model = Net().half()
    if form == "adapter":
        model.backbone.requires_grad_(False)
        model.head.float()
    elif form == "head":
        model.backbone.float()
        model.adapter.requires_grad_(False)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    watch(scaler, model)
    for _ in range(4):
        opt.zero_grad()
        with half():
            loss = nn.functional.mse_loss(model(torch.randn(8, 16)).float(), torch.randn(8, 1))
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
