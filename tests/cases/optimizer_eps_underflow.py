"""Parameters and Adam's state are FP16: eps=1e-8 is zero there and the update divides by zero."""

import torch
from torch import nn

TRUTH = {"rule": "optimizer-eps-underflow", "phase": "optimizer", "where": []}
VARIANTS = [
    {},
    {"seed": 1, "kind": "adamw", "static": True},
    {"kind": "rmsprop", "width": 32},
    {"kind": "adam", "plain": True},
    {"kind": "own", "seed": 1},
]


class Slim(torch.optim.Optimizer):
    """Adam for any weights with moments in half precision; the epsilon is an attribute of its own, added in float16 or in float32."""

    def __init__(self, params, lr, eps, wide=False):
        super().__init__(params, {"lr": lr})
        self.epsilon, self.wide = eps, wide

    @torch.no_grad()
    def step(self, closure=None):
        """Update the weights."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                for name in ("m", "v"):
                    state.setdefault(name, torch.zeros_like(p, dtype=torch.half))
                grad = p.grad.half()
                state["m"].lerp_(grad, 0.1)
                state["v"].lerp_(grad * grad, 0.001)
                m, v = (state[k].float() if self.wide else state[k] for k in ("m", "v"))
                p.sub_((group["lr"] * m / (v.sqrt() + self.epsilon)).to(p.dtype))


def main(watch, seed=0, width=16, kind="adam", static=False, plain=False):
    """Train a half-precision model with a static scale divided out by hand."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1)).half()
    make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop, "own": Slim}[kind]
    opt = make(model.parameters(), lr=1e-3, eps=1e-8)
    if plain:
        watch(None, model, optimizer=opt)
    else:
        watch(torch.amp.GradScaler("cpu", enabled=False), model)
    x, y = torch.randn(16, 8).half(), torch.randn(16, 1)
    for _ in range(8):
        opt.zero_grad()
        loss = nn.functional.mse_loss(model(x).float(), y) * 1e-3
        (loss * (128.0 if static else 1.0)).backward()
        if static:
            for p in model.parameters():
                p.grad.div_(128.0)
        opt.step()
