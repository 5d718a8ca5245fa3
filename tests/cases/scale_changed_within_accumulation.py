"""update() between micro-batches: gradients of two scales are added up."""

import torch
from torch import nn

from tests.cases.common import MLP, OPTIMIZERS, half

TRUTH = {"rule": "scale-changed-within-accumulation", "phase": "usage", "where": []}
VARIANTS = [{}, {"form": "raises", "seed": 1}, {"form": "two", "optimizer": "adam"}, {"form": "unscale"}]


def truth(form="hand", **_):
    """update() without a step raises unless a new scale is given."""
    return {**TRUTH, "raises": "No inf checks were recorded prior to update" if form == "raises" else None}


def main(watch, seed=0, optimizer="sgd", form="hand", accumulate=4):
    """Accumulate with an update() after each micro-batch."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"a": MLP(8, 16, 1), "b": MLP(8, 16, 1)})
    oa, ob = (OPTIMIZERS[optimizer](model[k].parameters(), 1e-4) for k in "ab")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    watch(scaler, model)
    for i in range(24):
        with half():
            x, y = torch.randn(16, 8), torch.randn(16, 1)
            loss = nn.functional.mse_loss(model["a"](x), y) + (
                nn.functional.mse_loss(model["b"](x), y) if form == "two" else 0.0
            )
        scaler.scale(loss / accumulate).backward()
        last = i % accumulate == accumulate - 1
        if form == "two":
            scaler.step(oa)
            oa.zero_grad()
            if last:
                scaler.step(ob)
                ob.zero_grad()
            scaler.update()
            continue
        if form == "unscale" and not last:
            scaler.unscale_(oa)
        if last:
            scaler.step(oa)
            oa.zero_grad()
        if form == "hand" and not last:
            scaler.update(256.0 * 2 ** (i % accumulate + 1))
        else:
            scaler.update()
