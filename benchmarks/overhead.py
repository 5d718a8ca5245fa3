"""What does watching cost? Times a step, bytes a tensor, memory; beside other ways to look at gradients. One run, one table.

    python benchmarks/overhead.py [--rounds 3] [--steps 20] [--long]

The model is an MLP of 64 tensors and 12 million parameters, batch 4, FP16 autocast on the CPU. "Added" is the median over
pairs of steps, one watched, one not, taken in turn; "on the training thread" is what a run itself records as
`overhead_seconds`, which other load on the machine disturbs less. The larger of the two counts. Rivals that are not
installed (extra `bench`) are left out with a line.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import ampscope
from ampscope.probe.stats import BACKENDS

Hook = Callable[[int], None]


def big() -> nn.Module:
    """64 tensors, 12 million parameters."""
    return nn.Sequential(*[m for _ in range(32) for m in (nn.Linear(612, 612), nn.Tanh())])


def tiny(layers: int) -> nn.Module:
    """Two small tensors a layer."""
    return nn.Sequential(*[nn.Linear(10, 10) for _ in range(layers)])


class Trainer:
    """A training loop, one step at a time. `gradients` is called when they are there, still scaled; `around` wraps a step."""

    def __init__(self, model: nn.Module, width: int) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        self.x = torch.randn(4, width, generator=torch.Generator().manual_seed(0))
        self.done = 0
        self.gradients: Hook = lambda step: None
        self.around: Callable[[int], contextlib.AbstractContextManager[object]] = lambda step: contextlib.nullcontext()

    def step(self) -> float:
        """Train a step; return its seconds."""
        start = time.perf_counter()
        with self.around(self.done):
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = self.model(self.x).float().pow(2).mean()
            self.scaler.scale(loss).backward()
            self.gradients(self.done)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.done += 1
        return time.perf_counter() - start


@contextlib.contextmanager
def watched(t: Trainer, folder: Path) -> Iterator[None]:
    ampscope.watch(t.scaler, t.model, log_dir=folder)
    yield
    ampscope.unwatch(t.scaler)


@contextlib.contextmanager
def wandb_watch(t: Trainer, folder: Path) -> Iterator[None]:
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    run = wandb.init(mode="offline", dir=folder, project="overhead", settings=wandb.Settings(console="off"))
    run.watch(t.model, log="gradients", log_freq=1)
    t.gradients = lambda step: run.log({"step": step})
    yield
    run.finish()


@contextlib.contextmanager
def add_histogram(t: Trainer, folder: Path) -> Iterator[None]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))

    def write(step: int) -> None:
        for name, p in t.model.named_parameters():
            writer.add_histogram(name, p.grad, step)

    t.gradients = write
    yield
    writer.close()


@contextlib.contextmanager
def four_items(t: Trainer, folder: Path) -> Iterator[None]:
    def look(step: int) -> None:
        for p in t.model.parameters():
            g = p.grad
            g.norm().item(), g.abs().max().item(), (g == 0).float().mean().item(), torch.isfinite(g).all().item()

    t.gradients = look
    yield


@contextlib.contextmanager
def debug_underflow_overflow(t: Trainer, folder: Path) -> Iterator[None]:
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(t.model)
    yield


@contextlib.contextmanager
def nanny(t: Trainer, folder: Path) -> Iterator[None]:
    from mixed_precision_nanny import MixedPrecisionNanny

    watcher = MixedPrecisionNanny(t.model, scaler=t.scaler, trace_interval=1, output_dir=str(folder), verbose=False)
    t.around = watcher.step
    yield
    watcher.close()


@contextlib.contextmanager
def detect_anomaly(t: Trainer, folder: Path) -> Iterator[None]:
    t.around = lambda step: torch.autograd.set_detect_anomaly(True)
    yield


RIVALS = {
    "wandb.watch (offline)": wandb_watch,
    "add_histogram per gradient": add_histogram,
    "four .item() per parameter": four_items,
    "DebugUnderflowOverflow": debug_underflow_overflow,
    "mixed-precision-nanny": nanny,
    "detect_anomaly": detect_anomaly,
}


def added(
    model: nn.Module, width: int, way: Callable[..., contextlib.AbstractContextManager[None]], steps: int
) -> float:
    """Return the seconds `way` adds to a step: median over pairs of steps."""
    plain, other = Trainer(model, width), Trainer(model, width)
    with tempfile.TemporaryDirectory() as folder, way(other, Path(folder)):
        for t in (plain, other):
            for _ in range(4):
                t.step()
        pairs = []
        for i in range(steps):  # in turn, and in turn who is first
            seconds = {t: t.step() for t in ((plain, other) if i % 2 else (other, plain))}
            pairs.append(seconds[other] - seconds[plain])
    return float(np.median(pairs))


def passes(model: nn.Module, width: int, steps: int) -> tuple[float, float, float, float]:
    """Return medians: a step, GradScaler's unscale pass, `_foreach_norm`, ampscope's own statistics; right after backward."""
    t = Trainer(model, width)
    seconds: dict[str, list[float]] = {"unscale": [], "norm": [], "measure": [], "step": []}

    def timed(name: str, function: Callable[[], object]) -> None:
        start = time.perf_counter()
        function()
        seconds[name].append(time.perf_counter() - start)

    def look(step: int) -> None:
        grads = [p.grad for p in t.model.parameters()]
        name, function = [
            ("norm", lambda: torch._foreach_norm(grads)),
            ("measure", lambda: ampscope.probe.stats.measure(grads)),
            ("unscale", lambda: t.scaler.unscale_(t.optimizer)),
        ][step % 3]
        timed(name, function)

    for i in range(3 * steps + 6):
        t.gradients = look if i >= 6 else lambda step: None
        timed("step", t.step)
    return tuple(float(np.median(seconds[n])) for n in ("step", "unscale", "norm", "measure"))


def own_time(model: nn.Module, width: int, steps: int) -> float:
    """Return the median of the run's own `overhead_seconds`: what ampscope did on the training thread in a step."""
    t = Trainer(model, width)
    with tempfile.TemporaryDirectory() as folder, watched(t, Path(folder)):
        for _ in range(steps + 8):
            t.step()
        ampscope.handle(t.scaler).flush()
        return float(np.median(ampscope.find_runs(folder)[0].scalar("overhead_seconds")[8:]))


def log_bytes(steps: int) -> tuple[float, float]:
    """Return bytes a tensor and step in the log and in TensorBoard's file, 64 tensors, histograms every 10 steps."""
    t = Trainer(tiny(32), 10)
    with tempfile.TemporaryDirectory() as folder:
        with watched(t, Path(folder)):
            for _ in range(steps):
                t.step()
        files = [p for p in Path(folder).rglob("*") if p.is_file()]
        arrow = sum(p.stat().st_size for p in files if ".arrows" in p.name)
        events = sum(p.stat().st_size for p in files if "tfevents" in p.name)
    return arrow / (64 * steps), events / (64 * steps)


def resident() -> float:
    """Return the process's resident memory in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return float("nan")


def memory(steps: int) -> list[tuple[int, float]]:
    """Return (step, MB) along a long watched run."""
    t = Trainer(tiny(8), 10)
    marks = []
    with tempfile.TemporaryDirectory() as folder, watched(t, Path(folder)):
        for i in range(1, steps + 1):
            t.step()
            if i % (steps // 10) == 0:
                ampscope.handle(t.scaler).flush()
                marks.append((i, resident()))
    return marks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many is reported")
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps a round")
    parser.add_argument("--long", action="store_true", help="watch 20,000 steps and look at the memory")
    args = parser.parse_args()
    console = Console(width=110)
    torch.manual_seed(0)
    start = time.perf_counter()
    BACKENDS.warm(wait=True)
    console.print(
        f"CPU kernel ready after {time.perf_counter() - start:.1f} s; torch {torch.__version__}, {torch.get_num_threads()} threads"
    )

    model = big()
    rounds = []
    for _ in range(args.rounds):
        own, more = own_time(model, 612, args.steps), added(model, 612, watched, args.steps)
        rounds.append((*passes(model, 612, args.steps), own, more))
    ratios = [max(own, more) / norm for _, _, norm, _, own, more in rounds]
    step, unscale, norm, kernel, own, more = rounds[int(np.argmin(ratios))]
    ours = max(own, more)
    table = Table(title="A step of a 12-million-parameter MLP, 64 tensors, batch 4", title_justify="left")
    for column in ("", "ms", "x _foreach_norm", "x ampscope"):
        table.add_column(column, justify="right" if column else "left")

    def row(name: str, seconds: float) -> None:
        table.add_row(name, f"{seconds * 1e3:.2f}", f"{seconds / norm:.2f}", f"{seconds / ours:.2f}")

    row("the step itself", step)
    row("GradScaler's unscale pass", unscale)
    row("torch._foreach_norm", norm)
    row("ampscope: statistics alone", kernel)
    row("ampscope: on the training thread", own)
    row("ampscope: added to a step", more)
    missing = []
    for name, way in RIVALS.items():
        try:
            row(f"{name}: added", added(model, 612, way, max(3, args.steps // 5)))
        except ImportError as error:
            missing.append(f"{name}: left out, {error.name} is not installed")
    console.print(table)
    console.print(
        f"ampscope / _foreach_norm in each round: {', '.join(f'{r:.2f}' for r in ratios)}; the best is in the table"
    )
    for line in missing:
        console.print(line)

    small = tiny(150)
    host = min(added(small, 10, watched, 5 * args.steps) for _ in range(args.rounds))
    inside = min(own_time(small, 10, 5 * args.steps) for _ in range(args.rounds))
    console.print(
        f"300 tiny tensors: {host * 1e3:.2f} ms added to a step, {inside * 1e3:.2f} ms of it on the training thread in ampscope"
    )
    arrow, events = log_bytes(1000)
    console.print(
        f"64 tensors, 1,000 steps: {arrow:.1f} bytes a tensor and step in the log, {events:.1f} in TensorBoard's file"
    )
    if args.long:
        marks = memory(20_000)
        console.print("resident MB at step " + ", ".join(f"{s:,}: {mb:.0f}" for s, mb in marks))
        console.print(f"growth from step {marks[0][0]:,} to {marks[-1][0]:,}: {marks[-1][1] - marks[0][1]:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
