"""A padded sample masks a whole softmax row: NaN, in FP32 too."""

import torch
from torch import nn

from tests.cases.common import train

TRUTH = {"rule": "forward-nan-softmax-all-masked", "phase": "forward"}
VARIANTS = [
    {},
    {"always": True, "seed": 1},
    {"layers": 2, "bad": 1, "optimizer": "adam"},
    {"form": "add", "accumulate": 2},
    {"form": "add", "hide": True, "layers": 2, "bad": 1},
    {"form": "lowest", "seed": 2},
    {"form": "cast", "always": True},
    {"form": "times", "seed": 3},
    {"form": "actions", "optimizer": "adam"},
]


def truth(layers=1, bad=0, form="fill", **_):
    """Return the attention module; none for the log-softmax of a loss."""
    if form == "actions":
        return {**TRUTH, "where": []}
    return {**TRUTH, "where": [f"layers.{bad}"]}


class Attention(nn.Module):
    """One head with a padding mask of choice."""

    def __init__(self, d, masked, form):
        super().__init__()
        self.qkv, self.masked, self.form = nn.Linear(d, 3 * d), masked, form

    def forward(self, x, padding):
        """Attend to what is not padding."""
        q, k, v = self.qkv(x).chunk(3, -1)
        logits = q @ k.transpose(-2, -1) / 4.0
        mask = (padding if self.masked else torch.zeros_like(padding))[:, None, :]
        if self.form == "add":
            logits = logits + torch.zeros(mask.shape, dtype=logits.dtype).masked_fill(mask, float("-inf"))
        elif self.form == "cast":  # a FP32 mask of -1e9, cast to the dtype of the logits
            logits = logits + (mask.float() * -1e9).to(logits.dtype)
        elif self.form == "lowest":  # two masks of the lowest finite value: their sum is -inf in FP16
            lowest = torch.zeros(mask.shape, dtype=torch.float16).masked_fill(mask, torch.finfo(torch.float16).min)
            logits = logits + (lowest + lowest)
        elif self.form == "times":  # further down than FP16 goes
            logits = logits + mask.to(logits.dtype) * torch.finfo(torch.float16).min * 4
        else:
            logits = logits.masked_fill(mask, float("-inf"))
        return x + logits.softmax(-1) @ v


def main(watch, seed=0, d=16, layers=1, bad=0, form="fill", always=False, hide=False, **loop):
    """Train on padded batches; in some of them one sample is padding only."""
    torch.manual_seed(seed)
    blocks = nn.ModuleList([Attention(d, i == bad, form) for i in range(layers)])
    model = nn.ModuleDict({"layers": blocks, "out": nn.Linear(3 * d if form == "actions" else d, 1)})

    def loss_of(step, micro):
        x, y = torch.randn(4, 6, d), torch.randn(4, 6, 1)
        padding = torch.zeros(4, 6, dtype=torch.bool)
        padding[1, 4:] = True
        if always or step in (3, 5, 6):
            padding[2] = True
        if (
            form == "actions"
        ):  # a policy: states without an action that is allowed; the gradient is masked, the loss is not
            allowed = ~padding.any(1)[:, None].expand(4, d)
            logits = model["out"](torch.relu(blocks[0].qkv(x[:, 0])))
            logp = logits.expand(4, d).masked_fill(~allowed, float("-inf")).log_softmax(-1)
            return -logp[:, 0].float().mean()
        for layer in blocks:
            x = layer(x, padding)
        out = model["out"](x)
        if hide:  # padding does not count: the loss stays finite, the gradient does not
            out = out.float().masked_fill(padding[..., None], 0.0)
        return nn.functional.mse_loss(out, y)

    train(watch, model, loss_of, steps=9, init_scale=256.0, **loop)
