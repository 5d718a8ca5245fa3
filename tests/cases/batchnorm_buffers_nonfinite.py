"""One outlier batch overflows before a BatchNorm: the step is skipped, the running statistics are poisoned for good."""

import torch
from torch import nn

from tests.cases.common import half, train

TRUTH = {"rule": "batchnorm-buffers-nonfinite", "phase": "forward", "where": ["bn", "conv"]}
VARIANTS = [
    {},
    {"at": 2, "seed": 1, "optimizer": "adam"},
    {"evaluate": False, "at": 6},
    {"channels": 8, "accumulate": 2},
]


class Net(nn.Module):
    """Convolution, BatchNorm, head."""

    def __init__(self, channels):
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(1, channels, 3), nn.BatchNorm2d(channels), nn.Linear(channels, 1)

    def forward(self, x):
        """Return one number a sample."""
        return self.head(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


def main(watch, seed=0, channels=4, at=4, evaluate=True, **loop):
    """Train with one outlier batch, evaluating after each step."""
    torch.manual_seed(seed)
    model = Net(channels)

    def loss_of(step, micro):
        x, y = torch.randn(8, 1, 8, 8), torch.randn(8, 1)
        if step == at and micro == 0:
            x[0, 0, :3, :3] = 60000.0 * model.conv.weight[0, 0].detach().sign()
        return nn.functional.mse_loss(model(x), y)

    def validate(step):
        if evaluate:
            model.eval()
            with torch.no_grad(), half():
                model(torch.randn(4, 1, 8, 8))
            model.train()

    train(watch, model, loss_of, steps=10, init_scale=64.0, after=validate, **loop)
