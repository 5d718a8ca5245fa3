"""`ampscope demo`: a real training with AMP, here and now, watched; then the dashboard."""

from __future__ import annotations

import math
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ampscope.cli.console import console, shown

if TYPE_CHECKING:
    from ampscope.cli.demo_training import Outcome
    from ampscope.cli.demo_training import Progress as State


@click.command("demo")
@click.option("--steps", default=1500, show_default=True, type=click.IntRange(min=10), help="Training steps.")
@click.option("--log-dir", default="logs", show_default=True, help="Folder of runs to write to.")
@click.option("--port", default=8060, show_default=True, help="Port of the dashboard, or the next free one.")
@click.option("--no-dashboard", is_flag=True, help="Do not start the dashboard afterwards.")
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
@click.pass_context
def command(ctx: click.Context, steps: int, log_dir: str, port: int, no_dashboard: bool, no_browser: bool) -> int:
    """Train a small network on real digits with FP16 autocast and a GradScaler, watched, then open the dashboard."""
    out = console()
    out.print("A network of 3 layers learns scikit-learn's digits with FP16 autocast and a GradScaler.")
    out.print("On the way one batch comes with pixels of 0..255 instead of 0..1, to make the gradients overflow.")
    outcome = _train(log_dir, steps, out)
    out.print()
    for line in story(outcome):
        out.print(shown(line))
    out.print(shown(f"Run folder: {outcome.run_dir}"), soft_wrap=True)
    out.print()
    out.print("Next:")
    for line in following(outcome, log_dir):
        out.print(shown("  " + line), soft_wrap=True)
    if no_dashboard:
        return 0
    from ampscope.cli.dashboard import command as dashboard

    out.print()
    status = ctx.invoke(dashboard, logdir=log_dir, port=port, no_browser=no_browser)
    return status if isinstance(status, int) else 0


def _train(log_dir: str, steps: int, out: Console) -> Outcome:
    from ampscope.cli.demo_training import train

    columns = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=out, disable=not out.is_terminal) as bar:
        task = bar.add_task("training", total=steps, state="")

        def told(state: State) -> None:
            bar.update(task, advance=1, state=short(state))
            if not out.is_terminal and (state.step + 1) % max(1, steps // 5) == 0:
                out.print(f"step {state.step + 1} of {steps}: {short(state)}")

        return train(log_dir, steps, told)


def short(state: State) -> str:
    """Return the state in a few words."""
    accuracy = "" if math.isnan(state.accuracy) else f", test accuracy {state.accuracy:.1%}"
    return f"loss {state.loss:.3f}, loss scale 2^{math.log2(state.scale):.0f}{accuracy}"


def story(outcome: Outcome) -> list[str]:
    """Say what happened, from the log."""
    from ampscope.run.find import open_run

    run = open_run(outcome.run_dir)
    steps, scale, skipped = run.steps.tolist(), run.scalar("loss_scale"), run.scalar("skipped") > 0
    lines = [f"Test accuracy {outcome.accuracy:.1%} after {len(steps)} steps, {int(skipped.sum())} of them skipped."]
    bad = outcome.bad_step
    at = int(run.steps.searchsorted(bad))
    if at < len(steps) and skipped[at]:
        layers = [layer.name for layer, n in zip(run.layers, run.metric("nonfinite_count")[at], strict=True) if n > 0]
        after = f", and halved the loss scale to 2^{math.log2(scale[at + 1]):.0f}" if at + 1 < len(scale) else ""
        lines.append(
            f"Step {bad} was the batch with pixels of 0..255: its gradients overflowed FP16 at loss scale "
            f"2^{math.log2(scale[at]):.0f} in {', '.join(layers[:3])}. GradScaler skipped the step, so that no weight "
            f"was harmed{after}."
        )
    else:
        lines.append(
            f"Step {bad} was the batch with pixels of 0..255: at this loss scale its gradients did not overflow."
        )
    others = int(skipped.sum()) - (at < len(steps) and bool(skipped[at]))
    if others:
        who = "one other skipped step is" if others == 1 else f"{others} other skipped steps are"
        lines.append(f"The {who} the scale finding its level: it grows until a step overflows.")
    return lines


def following(outcome: Outcome, log_dir: str) -> list[str]:
    """Return the commands to run next, with a word on each."""
    commands = [
        (f"{program('ampscope')} check {outcome.run_dir}", "is the run healthy?"),
        (f"{program('tensorboard')} --logdir {log_dir}", "the curves in TensorBoard"),
        (f"{program('ampscope')} dashboard {log_dir}", "the dashboard"),
    ]
    width = max(len(c) for c, _ in commands)
    return [f"{c:{width}}  # {what}" for c, what in commands]


def program(name: str) -> str:
    """Return how a command of this environment can be typed here: by its name, or by its path where that is not on PATH."""
    beside = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not beside.exists() or (found is not None and os.path.samefile(found, beside)):
        return name
    shown = os.path.relpath(beside)
    return str(beside) if shown.startswith("..") else shown
