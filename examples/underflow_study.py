"""Does loss scaling matter? A small network whose gradients are tiny, trained in FP16 with loss scale 1 and with a GradScaler.

    python examples/underflow_study.py [--steps 300] [--out underflow_study.html]

Prints the accuracy of both (and of FP32) beside the measured underflow of each layer, and writes the same as a figure.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import ampscope

LOSS_WEIGHT = 6e-6
"""The loss is one of many in a sum, say; its gradients lie near FP16's smallest number."""


def digits():
    """Return training and test images [n, 64] in 0..1 and labels, as tensors."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    images, labels = torch.tensor(x[order] / 16.0, dtype=torch.float32), torch.tensor(y[order])
    return images[:1400], labels[:1400], images[1400:], labels[1400:]


def network():
    """Return a deep, narrow network: gradients shrink on the way to the first layers."""
    torch.manual_seed(0)
    widths = [64, 64, 64, 64, 64]
    layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def train(name, init_scale, steps, log_dir):
    """Train; return test accuracy and the run. `init_scale` None means FP32 without a scaler."""
    images, labels, test_images, test_labels = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 / LOSS_WEIGHT, momentum=0.5)
    half = init_scale is not None
    # growth_interval beyond the run's length keeps the scale where it starts.
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=init_scale or 1.0, enabled=half, growth_interval=50 if init_scale != 1.0 else 10**9
    )
    ampscope.watch(scaler, model, log_dir=log_dir, run=name, probe_every=10 if half else 0)
    batches = torch.Generator().manual_seed(0)
    for _ in range(steps):
        pick = torch.randint(0, len(images), (64,), generator=batches)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            scores = model(images[pick])
        loss = nn.functional.cross_entropy(scores.float(), labels[pick]) * LOSS_WEIGHT
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    ampscope.unwatch(scaler)
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    return accuracy, ampscope.open_run(Path(log_dir) / name)


def underflow(run):
    """Return {layer: mean measured share flushed to zero} of the weight matrices."""
    measured = run.metric("underflow_ratio_measured")
    rows = np.isfinite(measured).any(1)
    return {x.name: float(np.nanmean(measured[rows, i])) for i, x in enumerate(run.layers) if len(x.shape) == 2}


def figure(results):
    """Return a Plotly figure of accuracy and underflow by layer."""
    from plotly.subplots import make_subplots

    fig = make_subplots(
        1, 2, column_widths=[0.35, 0.65], subplot_titles=("How accurate?", "How much of each gradient is lost?")
    )
    fig.add_bar(
        x=[name for name, _, _ in results],
        y=[accuracy * 100 for _, accuracy, _ in results],
        marker_color="#0072B2",
        showlegend=False,
        row=1,
        col=1,
    )
    for (name, _, shares), colour in zip(results, ("#000000", "#D55E00", "#009E73"), strict=True):
        if shares:
            fig.add_bar(
                x=list(shares), y=[s * 100 for s in shares.values()], name=name, marker_color=colour, row=1, col=2
            )
    fig.update_yaxes(title_text="test accuracy, %", range=[0, 100], row=1, col=1)
    fig.update_yaxes(title_text="flushed to zero, % (probe)", row=1, col=2)
    fig.update_layout(title="FP16 training of a small network, with and without loss scaling", template="plotly_white")
    return fig


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("underflow_study.html"))
    parser.add_argument("--log-dir", default=None, help="keep the runs here (default: a temporary folder)")
    args = parser.parse_args(argv)
    log_dir = args.log_dir or tempfile.mkdtemp(prefix="underflow-study-")
    results = []
    for name, scale in (("fp32", None), ("fp16-scale-1", 1.0), ("fp16-gradscaler", 2.0**16)):
        accuracy, run = train(name, scale, args.steps, log_dir)
        shares = underflow(run) if scale is not None else {}
        results.append((name, accuracy, shares))
    layers = list(results[1][2])
    print(f"{'run':18s}{'accuracy':>9s}   flushed to zero, measured: " + "  ".join(layers))
    for name, accuracy, shares in results:
        print(
            f"{name:18s}{accuracy:9.1%}   {'':27s} "
            + "  ".join(f"{shares[n]:{len(n)}.0%}" if shares else " " * len(n) for n in layers)
        )
    figure(results).write_html(
        args.out, include_plotlyjs=True, config={"showSendToCloud": False, "plotlyServerURL": "", "displaylogo": False}
    )
    print(f"figure: {args.out}\nruns:   {log_dir}   (ampscope check {log_dir} --all)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
