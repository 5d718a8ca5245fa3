"""What the cases share: small networks, and the loop a tutorial shows."""

from __future__ import annotations

import torch
from torch import nn

OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr),
}


def half():
    """Return FP16 autocast."""
    return torch.autocast("cpu", dtype=torch.float16)


class MLP(nn.Module):
    """Linear layers fc1 … fcN with ReLU between."""

    def __init__(self, *widths, act=torch.relu):
        super().__init__()
        self.act, self.depth = act, len(widths) - 1
        for i, (a, b) in enumerate(zip(widths, widths[1:], strict=False), 1):
            self.add_module(f"fc{i}", nn.Linear(a, b))

    def forward(self, x):
        """Return the last layer's output."""
        for i in range(1, self.depth):
            x = self.act(getattr(self, f"fc{i}")(x))
        return getattr(self, f"fc{self.depth}")(x)


def train(
    watch,
    model,
    loss_of,
    *,
    steps=12,
    optimizer="sgd",
    lr=1e-3,
    init_scale=2.0**10,
    accumulate=1,
    clip=0.0,
    after=None,
    **scaler_args,
):
    """Train as tutorials do: `loss_of(step, micro)` under FP16 autocast, `accumulate` micro-batches a step, clipping done right.

    `after(step)` runs at the end of each step.
    """
    opt = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad], lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, **scaler_args)
    watch(scaler, model)
    for step in range(steps):
        opt.zero_grad()
        for micro in range(accumulate):
            with half():
                loss = loss_of(step, micro)
            scaler.scale(loss / accumulate if accumulate > 1 else loss).backward()
        if clip:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(opt)
        scaler.update()
        if after:
            after(step)
    return model
