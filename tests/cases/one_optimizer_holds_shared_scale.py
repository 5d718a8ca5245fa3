"""Actor and critic share a GradScaler: the critic's large loss fixes the scale, at which the actor's gradients flush. Nothing is skipped later."""

import torch
from torch import nn

from tests.cases.common import MLP, OPTIMIZERS, half

TRUTH = {"rule": "one-optimizer-overflows-shared-scale", "where": ["critic"], "phase": "backward"}
VARIANTS = [{}, {"seed": 1, "optimizer": "sgd"}, {"width": 48, "returns": 4e3, "first": "critic"}]


def main(watch, seed=0, width=64, optimizer="adam", returns=3e3, first="actor"):
    """Train two networks on losses that differ in size by many orders of magnitude."""
    torch.manual_seed(seed)
    nets = nn.ModuleDict({"actor": MLP(6, width, 4, act=torch.tanh), "critic": MLP(6, width, 1, act=torch.tanh)})
    opts = {
        "actor": OPTIMIZERS[optimizer](nets["actor"].parameters(), 1e-4),
        "critic": OPTIMIZERS[optimizer](nets["critic"].parameters(), 1e-7),
    }
    scaler = torch.amp.GradScaler("cpu")
    watch(scaler, nets)
    for _ in range(36):
        state, advantage = torch.randn(64, 6), 1e-6 * torch.randn(64)
        with half():
            logits, value = nets["actor"](state), nets["critic"](state)
        chosen = logits.float().log_softmax(-1)[torch.arange(64), torch.randint(0, 4, (64,))]
        loss = {
            "actor": -(chosen * advantage).mean(),
            "critic": (value.float() - returns - returns / 3 * torch.randn(64, 1)).pow(2).mean(),
        }
        for name in (first, *[n for n in nets if n != first]):
            opts[name].zero_grad()
            scaler.scale(loss[name]).backward()
        for opt in opts.values():
            scaler.step(opt)
        scaler.update()
