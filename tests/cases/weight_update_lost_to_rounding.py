"""BF16 (or FP16) weights without an FP32 copy: updates are too small beside them to change them."""

import torch
from torch import nn

TRUTH = {"rule": "weight-update-lost-to-rounding", "phase": "optimizer", "where": []}
VARIANTS = [
    {},
    {"seed": 1, "kind": "adamw"},
    {"dtype": torch.float16, "lr": 1e-5, "kind": "sgd"},
    {"scaler": True, "width": 48},
]


def main(watch, seed=0, width=32, kind="adam", dtype=torch.bfloat16, lr=1e-5, scaler=False):
    """Fine-tune a half-precision model with a small learning rate."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 1)).to(dtype)
    make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    opt = make(model.parameters(), lr=lr, **({} if kind == "sgd" else {"eps": 1e-4}))
    if scaler:
        watch(torch.amp.GradScaler("cpu", enabled=False), model)
    else:
        watch(None, model, optimizer=opt)
    x, y = torch.randn(32, 16, dtype=dtype), torch.randn(32, 1)
    for _ in range(25):
        opt.zero_grad()
        nn.functional.mse_loss(model(x).float(), y).backward()
        opt.step()
