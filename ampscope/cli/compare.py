"""`ampscope compare`: two runs side by side, in the terminal."""

from __future__ import annotations

import math

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ampscope.analysis.compare import Comparison, Side, compare
from ampscope.cli.console import console, shown
from ampscope.run.find import open_run

SAME = 0.02
"""Step times closer than this share are called the same: medians of a few steps scatter as much."""


@click.command("compare")
@click.argument("run_a")
@click.argument("run_b")
@click.option(
    "--layers",
    "count",
    default=10,
    show_default=True,
    type=click.IntRange(min=0),
    metavar="N",
    help="Show so many layers.",
)
def command(run_a: str, run_b: str, count: int) -> None:
    """Compare RUN_B with RUN_A, for example AMP with FP32: time, memory, loss, skips, gradient norms.

    RUN_A and RUN_B are the folders of two runs.
    """
    show(compare(open_run(run_a), open_run(run_b)), count, console())


def show(c: Comparison, count: int, out: Console) -> None:
    """Print a comparison."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for side, letter in ((c.a, "A"), (c.b, "B")):
        table.add_column(Text(f"{letter}: ").append_text(shown(side.name)), justify="right", overflow="fold")
    table.add_column("B / A", justify="right")
    for row in rows(c):
        table.add_row(*row)
    out.print(table)
    out.print()
    out.print(shown(verdict(c), "bold"))
    if c.a.device != c.b.device:
        out.print(shown(f"The devices differ ({c.a.device}; {c.b.device}): times do not compare."))
    if count and c.layers:
        out.print()
        _layers(c, count, out)
    for names, letter in ((c.only_a, "A"), (c.only_b, "B")):
        if names:
            out.print(
                shown(
                    f"only in {letter}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
                )
            )


def rows(c: Comparison) -> list[tuple[str, str, str, str]]:
    """Return the rows of the upper table."""
    a, b = c.a, c.b
    return [
        ("precision", a.precision, b.precision, ""),
        ("steps", f"{a.steps:,}", f"{b.steps:,}", ""),
        (
            "step time (median)",
            duration(a.step_seconds),
            duration(b.step_seconds),
            times(b.step_seconds / a.step_seconds if a.step_seconds else math.nan),
        ),
        ("peak memory", memory(a.peak_memory_bytes), memory(b.peak_memory_bytes), times(c.memory)),
        (
            "final loss",
            number(a.final_loss),
            number(b.final_loss),
            times(b.final_loss / a.final_loss if a.final_loss else math.nan),
        ),
        ("skipped steps", skips(a), skips(b), ""),
    ]


def _layers(c: Comparison, count: int, out: Console) -> None:
    if not c.compared_steps:
        out.print("Gradient norms cannot be compared: no step was recorded, and made, in both runs.")
        return
    out.print(f"Gradient norms that differ most (median over {c.compared_steps} steps of both):")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer", overflow="fold")
    for name in ("A", "B", "B / A"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, layer in enumerate(c.layers[:count]):
        table.add_row(shown(layer), number(c.grad_norm_a[i]), number(c.grad_norm_b[i]), times(c.grad_norm_ratio[i]))
    out.print(table)
    if len(c.layers) > count:
        out.print(f"{len(c.layers) - count} more layers differ less (--layers N shows more).")


def verdict(c: Comparison) -> str:
    """Return the speed in words: "AMP is 1.83× faster"."""
    if not math.isfinite(c.speed) or c.speed <= 0:
        return "Step times were not recorded in both runs."
    swap = c.a.amp and not c.b.amp
    side, speed = (c.a, 1 / c.speed) if swap else (c.b, c.speed)
    who = "AMP" if c.a.amp != c.b.amp else side.name
    if abs(math.log(speed)) < SAME:
        return f"{who} is as fast, within {SAME:.0%}."
    return f"{who} is {speed:.2f}× faster." if speed > 1 else f"{who} is {1 / speed:.2f}× slower."


def duration(seconds: float) -> str:
    """Return seconds as text with three significant digits."""
    if not math.isfinite(seconds):
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def memory(size: float) -> str:
    """Return bytes as text; "-" where there is no measurement (a CPU)."""
    if not math.isfinite(size):
        return "-"
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.3g} {unit}"
    return f"{size:.0f} B"


def number(x: float) -> str:
    """Return four significant digits; "-" for what was not recorded."""
    return "-" if math.isnan(x) else f"{x:.4g}"


def times(ratio: float) -> str:
    """Return a ratio as text."""
    return "" if math.isnan(ratio) else f"{ratio:.3g}×"


def skips(side: Side) -> str:
    """Return the skipped steps and their share."""
    return f"{side.skipped:,} ({side.skipped / side.steps:.1%})" if side.steps else "0"
