"""What does a traced step cost? The same small step unwatched, watched, and watched with the tracer armed; medians and ratios.

python benchmarks/armed_step.py [--steps 40]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time

import numpy as np
import torch
from torch import nn

import ampscope
from ampscope.probe.stats import BACKENDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    BACKENDS.warm(wait=True)
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(30) for m in (nn.Linear(256, 256), nn.Tanh())], nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(64, 256)
    medians = {}
    with tempfile.TemporaryDirectory() as logs:
        for name in ("unwatched", "watched", "armed"):
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            if name != "unwatched":
                ampscope.watch(scaler, model, log_dir=logs, run=name)
            times = []
            for _ in range(args.steps):
                if name == "armed":
                    tracer = next(
                        o for o in ampscope.handle(scaler).recorder.observers if type(o).__name__ == "ArmedTracer"
                    )
                    tracer._armed = 1
                    tracer._arm_hooks()
                start = time.perf_counter()
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(x).float().pow(2).mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                times.append(time.perf_counter() - start)
            if name != "unwatched":
                ampscope.unwatch(scaler)
            medians[name] = float(np.median(times[3:]))
    for name, seconds in medians.items():
        print(f"{name:10s} {seconds * 1e3:8.2f} ms a step   {seconds / medians['unwatched']:.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
