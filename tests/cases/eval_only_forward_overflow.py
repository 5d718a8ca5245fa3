"""Finite in training, overflow in evaluation: the running variance is almost zero, batch statistics are not."""

import torch
from torch import nn

from tests.cases.common import train

TRUTH = {"rule": "eval-only-forward-overflow", "phase": "forward", "where": []}
VARIANTS = [
    {},
    {"seed": 1, "optimizer": "adam"},
    {"form": "ensemble"},
    {"form": "ensemble", "every": 3},
    {"amid": True, "every": 2},
]


class Net(nn.Module):
    """Evaluates with running statistics, or with the sum of many passes."""

    def __init__(self, form):
        super().__init__()
        self.fc1, self.bn, self.fc2, self.form = (
            nn.Linear(8, 16),
            nn.BatchNorm1d(16, momentum=0.0, eps=1e-8),
            nn.Linear(16, 1),
            form,
        )

    def forward(self, x):
        """Return one number a sample."""
        h = self.fc1(x)
        if self.form == "bn":
            h = self.bn(h)
        elif not self.training:
            h = h * 2.0**14  # meant as an average over passes, the division comes last
            h = h * 2.0**4
        return self.fc2(torch.relu(h))


def main(watch, seed=0, form="bn", every=1, amid=False, **loop):
    """Train and evaluate after each epoch."""
    torch.manual_seed(seed)
    model = Net(form)
    model.bn.running_var.fill_(1e-14)
    model.bn.running_mean.fill_(-20.0)
    x, y = torch.randn(16, 8), torch.randn(16, 1)

    def evaluate(step):
        if step % every == every - 1:
            model.eval()
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
                model(x)
            model.train()

    def loss_of(step, micro):
        loss = nn.functional.mse_loss(model(x).float(), y)
        if amid:
            evaluate(step)
        return loss

    scale = 2.0**24 if amid else 64.0  # skips arm the tracer
    train(watch, model, loss_of, steps=16, init_scale=scale, after=None if amid else evaluate, **loop)
