"""The loss is an FP16 tensor of shape [1] (or one value a sample): loss × scale overflows in FP16."""

import torch

from tests.cases.common import MLP, OPTIMIZERS, half

TRUTH = {"rule": "scaled-loss-overflows-fp16", "phase": "forward", "where": []}
VARIANTS = [{}, {"seed": 1, "optimizer": "adam"}, {"form": "batch"}, {"init": 2.0**12, "size": 10.0}]


def truth(**_):
    """Whether the product counts as forward or as the loop's use is left open."""
    return {**TRUTH, "phase": None}


def main(watch, seed=0, width=16, size=3.0, init=2.0**16, form="one", optimizer="sgd"):
    """Regress with a loss that keeps a dimension."""
    torch.manual_seed(seed)
    model = MLP(8, width, 1)
    opt = OPTIMIZERS[optimizer](model.parameters(), 1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=init)
    watch(scaler, model)
    x, y = torch.randn(32, 8), torch.randn(32, 1) * size
    for _ in range(10):
        opt.zero_grad()
        with half():
            loss = (model(x) - y.half()).pow(2)
            loss = loss.mean(0) if form == "one" else loss.mean(1)
        scaler.scale(loss).backward(torch.ones_like(loss))
        scaler.step(opt)
        scaler.update()
