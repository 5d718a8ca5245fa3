"""No loss scaling, and a loss so small that the layers nearest the input get exact zeros only: they are named too, not called dead."""

import torch
from torch import nn

from tests.cases.common import OPTIMIZERS, half

TRUTH = {"rule": "gradient-underflow-no-scaling", "phase": "backward", "where": ["conv1"]}
VARIANTS = [{}, {"seed": 1, "optimizer": "sgd"}, {"channels": 12, "weight": 7e-4}]


class Student(nn.Module):
    """Two convolutions and a classifier."""

    def __init__(self, channels):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.fc = nn.Linear(channels, 10)

    def forward(self, x):
        """Return logits."""
        return self.fc(torch.relu(self.conv2(torch.relu(self.conv1(x)))).mean((2, 3)))


def main(watch, seed=0, channels=8, weight=1e-3, optimizer="adamw"):
    """Distil from random soft labels with a small weight."""
    torch.manual_seed(seed)
    model = Student(channels)
    opt = OPTIMIZERS[optimizer](model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    watch(scaler, model)
    for _ in range(15):
        opt.zero_grad()
        with half():
            out = model(torch.randn(16, 1, 16, 16))
        soft = torch.randn(16, 10).softmax(-1)
        loss = weight * nn.functional.kl_div(out.float().log_softmax(-1), soft, reduction="batchmean")
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
