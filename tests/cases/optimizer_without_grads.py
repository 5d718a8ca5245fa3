"""An optimizer is stepped although backward never reached its parameters."""

import torch
from torch import nn

from tests.cases.common import MLP, half

TRUTH = {"rule": "optimizer-without-grads", "phase": "usage", "where": ["G", "frozen", "fc1"]}
VARIANTS = [{}, {"form": "detached", "seed": 1}, {"form": "frozen"}, {"form": "disabled"}]


def truth(form="other", **_):
    """With an enabled scaler the step raises."""
    return {**TRUTH, "raises": None if form == "disabled" else "No inf checks were recorded"}


def main(watch, seed=0, form="other"):
    """Train D, but step G's optimizer as well."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"G": MLP(8, 16, 8), "D": MLP(8, 16, 1)})
    if form == "frozen":
        model["G"].requires_grad_(False)
    og, od = torch.optim.Adam(model["G"].parameters(), 1e-3), torch.optim.Adam(model["D"].parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=form != "disabled")
    watch(scaler, model)
    for _ in range(8):
        og.zero_grad()
        od.zero_grad()
        x = torch.randn(8, 8)
        with half():
            h = model["G"](x).detach() if form in ("detached", "disabled") else model["G"](x) if form == "frozen" else x
            loss = nn.functional.mse_loss(model["D"](h), torch.randn(8, 1))
        scaler.scale(loss).backward()
        scaler.step(od)
        scaler.step(og)
        scaler.update()
