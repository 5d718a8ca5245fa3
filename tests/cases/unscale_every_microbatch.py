"""unscale_ inside the accumulation loop."""

import torch
from torch import nn

from tests.cases.common import MLP, OPTIMIZERS, half

TRUTH = {
    "rule": "unscale-every-microbatch",
    "phase": "usage",
    "where": [],
    "raises": "unscale_() has already been called",
}
VARIANTS = [
    {},
    {"seed": 1, "optimizer": "adam", "accumulate": 4},
    {"late": 4},
    {"quiet": True},
    {"update": True, "accumulate": 4},
]


def truth(quiet=False, update=False, **_):
    """Without a second call, or with an update() after each, nothing raises."""
    return {**TRUTH, "raises": None} if quiet or update else TRUTH


def main(watch, seed=0, optimizer="sgd", accumulate=2, late=0, quiet=False, update=False):
    """Accumulate and clip every micro-batch (or unscale only after the first)."""
    torch.manual_seed(seed)
    model = MLP(8, 16, 1)
    opt = OPTIMIZERS[optimizer](model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    watch(scaler, model)
    opt.zero_grad()
    for i in range(24):
        window = 1 if i < late else accumulate
        with half():
            loss = nn.functional.mse_loss(model(torch.randn(8, 8)), torch.randn(8, 1)) / window
        scaler.scale(loss).backward()
        last = i < late or (i - late) % accumulate == accumulate - 1
        if not quiet or (i - late) % accumulate == 0:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        if last:
            scaler.step(opt)
        if last or update:
            scaler.update()
        if last:
            opt.zero_grad()
