"""How right is the underflow ratio? Probe, free estimate with bounds, and definitions used elsewhere, against an FP32 backward.

Truth: the same batch, FP32, weights rounded to FP16; an element is flushed where FP32 has it non-zero and the FP16 run exactly zero.

    python benchmarks/underflow_accuracy.py [--held-out] [--quick] [--models mlp,cnn] [--seeds 3]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from underflow_heldout import HELD_OUT
from underflow_models import MODELS

import ampscope

torch.set_num_threads(
    1
)  # FP16 kernels on several threads are not bit-reproducible, and the probe compares two backwards

WEIGHTS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
SCALES = (1.0, 2.0**5, 2.0**10, 2.0**16)
SEED = 1
"""Set before each forward pass, so that FP32 and FP16 drop the same units."""


def fp32_gradients(model, batch, loss_fn, weight):
    """Return the FP32 gradients with weights rounded to FP16; the model is left as it was."""
    kept = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.half().float())
    model.zero_grad()
    torch.manual_seed(SEED)
    (loss_fn(model, batch) * weight).backward()
    out = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(kept[n])
        for n, b in model.named_buffers():
            b.copy_(buffers[n])
    model.zero_grad()
    return out


def measure(name, seed, weights=WEIGHTS, scales=SCALES, probe=True):
    """Yield a row of numbers a layer and step: truth, probe, estimate, low, high, zeros, and others' definitions (shares of elements)."""
    torch.manual_seed(seed)
    model, batch, loss_fn = {**MODELS, **HELD_OUT}[name]()
    steps = [(w, s) for s in scales for w in weights]
    truths, others = [], []
    with tempfile.TemporaryDirectory() as logs, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], growth_interval=10**9)
        ampscope.watch(
            scaler, model, log_dir=logs, run="r", probe_every=1 if probe else 0, tensorboard=False, exponents_every=1
        )
        for weight, scale in steps:
            truth = fp32_gradients(model, batch, loss_fn, weight)
            optimizer.zero_grad()
            torch.manual_seed(SEED)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_fn(model, batch) * weight
            scaler.scale(loss)
            scaler._scale.fill_(scale)
            scaled = scaler.scale(loss)
            scaled.backward()
            row, other = {}, {}
            for n, p in model.named_parameters():
                if p.grad is None:
                    continue
                g, t = p.grad, truth[n]
                row[n] = float(((g == 0) & (t != 0)).float().mean()) if torch.isfinite(g).all() else float("nan")
                a = g.abs()
                other[n] = (
                    float(((a > 0) & (a < 2.0**-24)).float().mean()), float(((a > 0) & (a < 2.0**-14)).sum() / max(int((a > 0).sum()), 1)),
                    float(((g != 0) & (g.half() == 0)).float().mean()),
                )  # fmt: skip
            truths.append(row)
            others.append(other)
            scaler.step(optimizer)
            scaler.update()
            scaler._scale.fill_(scale)
        ampscope.unwatch(scaler)
        run = ampscope.open_run(Path(logs) / "r")
        names = [layer.name for layer in run.layers]
        metric = {
            m: run.metric(m)
            for m in (
                "underflow_ratio",
                "underflow_ratio_low",
                "underflow_ratio_high",
                "underflow_ratio_measured",
                "zero_ratio",
            )
        }
        for t, (row, other) in enumerate(zip(truths, others, strict=True)):
            for n, truth_share in row.items():
                i = names.index(n)
                if truth_share == truth_share:
                    yield {
                        "model": name, "layer": n, "step": t, "weight": steps[t][0], "scale": steps[t][1], "truth": truth_share,
                        "probe": float(metric["underflow_ratio_measured"][t, i]), "free": float(metric["underflow_ratio"][t, i]),
                        "low": float(metric["underflow_ratio_low"][t, i]), "high": float(metric["underflow_ratio_high"][t, i]),
                        "zeros": float(metric["zero_ratio"][t, i]), "below_2^-24": other[n][0], "subnormal/non-zero": other[n][1], "TransformerEngine": other[n][2],
                    }  # fmt: skip


def table(rows):
    """Return {definition: (mean error, worst error)} in percentage points, and coverage and width of the bounds."""
    truth = np.array([r["truth"] for r in rows])
    out = {}
    for column in ("probe", "free", "zeros", "below_2^-24", "subnormal/non-zero", "TransformerEngine"):
        values = np.array([r[column] for r in rows])
        error = np.abs(values - truth)[np.isfinite(values)] * 100
        out[column] = (float(error.mean()), float(error.max())) if len(error) else (float("nan"), float("nan"))
    low, high = (np.array([r[c] for r in rows]) for c in ("low", "high"))
    slack = 1e-6
    inside = (truth >= low - slack) & (truth <= high + slack)
    zeros = np.array([r["zeros"] for r in rows])
    return out, float(inside.mean()), float((high - low).mean() / max(zeros.mean(), 1e-12))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--held-out", action="store_true", help="models that nothing was fitted on")
    parser.add_argument("--models", default="", help="only these, of either set")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    names = args.models.split(",") if args.models else list(HELD_OUT if args.held_out else MODELS)
    weights, scales = (WEIGHTS[::2], SCALES[::3]) if args.quick else (WEIGHTS, SCALES)
    everything, start = [], time.perf_counter()
    print(f"{'model':22s} {'rows':>6s} {'probe mean/worst':>17s} {'free mean/worst':>16s} {'inside':>7s} {'width':>6s}")
    for name in names:
        rows = [r for seed in range(args.seeds) for r in measure(name, seed, weights, scales)]
        everything += rows
        out, inside, width = table(rows)
        print(
            f"{name:22s} {len(rows):6d} {out['probe'][0]:8.3f}/{out['probe'][1]:6.2f} {out['free'][0]:9.2f}/{out['free'][1]:6.1f} {inside:7.1%} {width:6.2f}",
            flush=True,
        )
    out, inside, width = table(everything)
    print(
        f"\n{len(everything)} layer-steps, {len(names)} models, {args.seeds} seeds, {time.perf_counter() - start:.0f} s. Error against truth, percentage points:"
    )
    print(f"{'definition':28s} {'mean':>8s} {'worst':>8s}")
    labels = {"probe": "ampscope, probe", "free": "ampscope, free estimate", "zeros": "share of zeros", "below_2^-24": "0 < |g| < 2^-24",
              "subnormal/non-zero": "non-zero below 2^-14", "TransformerEngine": "TransformerEngine's"}  # fmt: skip
    for column, label in labels.items():
        print(f"{label:28s} {out[column][0]:8.3f} {out[column][1]:8.2f}")
    print(f"truth inside the bounds: {inside:.2%}; width of the bounds / share of zeros: {width:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
