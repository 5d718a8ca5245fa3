"""How large is a log? Bytes a tensor and step, by model and by what is recorded; every file of the run counts, TensorBoard's left out.

    python benchmarks/log_size.py [--steps 400]

The gradients are those of training: FP16 autocast on the CPU, a batch of its own for each step, a loss scale that grows and backs off.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from underflow_heldout import HELD_OUT
from underflow_models import MODELS

import ampscope

torch.set_num_threads(1)


def deep_mlp():
    """66 tensors."""
    net = nn.Sequential(*[m for _ in range(32) for m in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 10))
    return net, (torch.randn(32, 64), torch.randint(0, 10, (32,))), MODELS["mlp"]()[2]


KINDS = {"deep_mlp": deep_mlp} | {
    name: {**MODELS, **HELD_OUT}[name]
    for name in ("transformer", "vision_transformer", "residual_mlp", "mixture_of_experts")
}
SETTINGS = {
    "as it is": {},
    "probe_every=100": {"probe_every": 100},
    "exponents_every=1": {"exponents_every": 1},
    "every=10": {"every": 10},
}


def size(make, steps: int, **settings) -> tuple[int, float]:
    """Train watched; return (tensors, bytes a tensor and step)."""
    torch.manual_seed(0)
    model, _, loss_fn = make()
    with tempfile.TemporaryDirectory() as logs, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", growth_interval=40)
        ampscope.watch(scaler, model, log_dir=logs, run="r", tensorboard=False, **settings)
        for _ in range(steps):
            batch = make()[1]
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_fn(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        ampscope.unwatch(scaler)
        tensors = len(ampscope.open_run(Path(logs) / "r").layers)
        total = sum(f.stat().st_size for f in (Path(logs) / "r").rglob("*") if f.is_file())
    return tensors, total / tensors / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    print(f"bytes a tensor and step, {args.steps} steps")
    print(f"{'model':22s}{'tensors':>8s}" + "".join(f"{name:>20s}" for name in SETTINGS))
    for name, make in KINDS.items():
        found = [size(make, args.steps, **settings) for settings in SETTINGS.values()]
        print(f"{name:22s}{found[0][0]:8d}" + "".join(f"{b:20.1f}" for _, b in found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
