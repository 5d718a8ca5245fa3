"""The training of `ampscope demo`: a small network on scikit-learn's digits, with FP16 autocast and a GradScaler, watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ampscope.errors import AmpscopeError
from ampscope.probe.watch import handle, watch

BATCH = 64
TEST = 397
"""Images kept for the test, of 1,797."""
GROWTH_INTERVAL = 300
"""Shorter than torch's 2000, so that a short training shows the scale grow."""
BAD_AT = 0.6
"""Where in the training the bad batch comes."""
BAD_FACTOR = 255.0
"""What the bad batch is multiplied by: pixels of 0..255, where the model knows 0..1."""
TEST_EVERY = 50


@dataclass(frozen=True)
class Progress:
    """Where the training is."""

    step: int
    steps: int
    loss: float
    scale: float
    accuracy: float
    """On the test images, 0..1; NaN before the first test."""
    skipped: bool


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    run_dir: Path
    accuracy: float
    bad_step: int
    device: str


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return training and test images, float32 [n, 64] in 0..1, each with labels.

    Raises:
        AmpscopeError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise AmpscopeError("the demo trains on scikit-learn's digits: pip install scikit-learn") from None
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    x = torch.tensor(pixels[order] / 16.0, dtype=torch.float32)
    y = torch.tensor(labels[order], dtype=torch.int64)
    return x[TEST:], y[TEST:], x[:TEST], y[:TEST]


def train(log_dir: str, steps: int, told: Callable[[Progress], None]) -> Outcome:
    """Train, watched.

    Args:
        log_dir: folder of runs.
        steps: how many; about 1,500 reach 97 % on the test images.
        told: called after each step.

    Raises:
        AmpscopeError: scikit-learn is not installed, or nothing can be written to `log_dir`.
    """
    images, labels, test_images, test_labels = digits()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread, and its spinning costs much
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device, growth_interval=GROWTH_INTERVAL)
    bad_step = int(steps * BAD_AT)
    accuracy = float("nan")
    with watch(scaler, model, log_dir=log_dir, probe_every=100):
        handled = handle(scaler)
        if handled.run_dir is None:
            raise AmpscopeError(f"nothing can be written to {log_dir!r}: pass another --log-dir")
        for step, (x, y) in enumerate(batches(images.to(device), labels.to(device), steps)):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.float16):
                scores = model(x * BAD_FACTOR if step == bad_step else x)
            loss = F.cross_entropy(scores.float(), y)
            scale = scaler.get_scale()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            scaler.step(optimizer)
            scaler.update()
            if step % TEST_EVERY == TEST_EVERY - 1 or step == steps - 1:
                accuracy = test(model, test_images.to(device), test_labels.to(device))
                handled.log(test_accuracy=accuracy)
            told(Progress(step, steps, float(loss.detach()), scale, accuracy, scaler.get_scale() < scale))
        run_dir = handled.run_dir
    return Outcome(run_dir, accuracy, bad_step, device)


def batches(images: torch.Tensor, labels: torch.Tensor, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random batches, the same at each call."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        pick = torch.randint(0, len(images), (BATCH,), generator=draw).to(images.device)
        yield images[pick], labels[pick]


def test(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images the model names right."""
    with torch.no_grad():
        named: Any = model(images).argmax(1)
    return float((named == labels).float().mean())
