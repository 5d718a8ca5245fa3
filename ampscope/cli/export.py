"""`ampscope export`: a run's numbers as one table in a file. docs/cli.md describes its columns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ampscope.cli.console import clean, console
from ampscope.cli.runs import choose
from ampscope.errors import AmpscopeError
from ampscope.run import metrics

if TYPE_CHECKING:
    import pyarrow as pa

    from ampscope.run.run import Run

VALUES_AT_ONCE = 1 << 22
"""Numbers held in memory at a time (16 to 32 MB)."""


class Sink(Protocol):
    """What a table is written to, piece by piece."""

    def write(self, table: Any) -> None:
        """Append rows."""

    def close(self) -> None:
        """Finish the file."""


@click.command("export")
@click.argument("logdir")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE", help="FILE.parquet or FILE.csv."
)
@click.option("--run", "name", metavar="NAME", help="Export this run, not the newest one.")
@click.option(
    "--metric",
    "chosen",
    multiple=True,
    metavar="NAME",
    help="Only this layer metric (several times for several; none for no layers).",
)
@click.option("--rank", default=0, show_default=True, help="Process of a distributed run.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def command(logdir: str, output: Path, name: str | None, chosen: Sequence[str], rank: int, force: bool) -> None:
    """Write the newest run in LOGDIR to FILE: one row a step, its scalars, and a column METRIC/LAYER for each metric and layer.

    LOGDIR is a run's folder or a folder of runs.
    """
    open_sink = {".parquet": parquet, ".csv": csv}.get(output.suffix.lower())
    if open_sink is None:
        raise click.UsageError(f"FILE must end in .parquet or .csv, not {str(output)!r}")
    wanted = [m for m in (chosen or metrics.METRICS) if m != "none"]
    for metric in wanted:
        if metric not in metrics.METRICS:
            raise click.UsageError(f"no metric {metric!r}; there are {', '.join(metrics.METRICS)}")
    if output.exists() and not force:
        raise AmpscopeError(f"{str(output)!r} exists: pass --force to overwrite it")
    run = choose(logdir, name)
    pieces = Pieces(run, wanted, rank)
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeRemainingColumn(),
    ]
    err = console(stderr=True)
    with replacing(output) as path, Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(f"exporting {clean(run.name)}", total=len(run.steps))
        with contextlib.closing(open_sink(path, pieces.schema)) as sink:
            for table in pieces:
                sink.write(table)
                bar.advance(task, table.num_rows)
    size = output.stat().st_size
    click.echo(
        f"{clean(str(output))}: run {clean(run.name)}, {len(run.steps):,} rows, {len(pieces.schema):,} columns, {size:,} bytes"
    )


class Pieces:
    """A run as consecutive tables of one schema."""

    def __init__(self, run: Run, chosen: Sequence[str], rank: int = 0) -> None:
        import pyarrow as pa

        self._run, self._metrics, self._rank = run, list(chosen), rank
        layers = [layer.name for layer in run.layers]
        cells = [f"{m}/{layer}" for m in self._metrics for layer in layers]
        taken = {"step", *cells}
        self._scalars = {(f"logged/{s}" if s in taken else s): s for s in run.scalars}
        fields = [pa.field("step", pa.int64()), *(pa.field(s, pa.float64()) for s in self._scalars)]
        fields += [pa.field(c, pa.float32()) for c in cells]
        self.schema: pa.Schema = pa.schema(fields, metadata={"ampscope.run": run.name, "ampscope.rank": str(rank)})
        self._values = {new: run.scalar(old, rank) for new, old in self._scalars.items()}

    def __iter__(self) -> Iterator[pa.Table]:
        import pyarrow as pa

        steps = self._run.steps
        rows = max(1, VALUES_AT_ONCE // len(self.schema))
        for start in range(0, len(steps), rows):
            part = slice(start, min(start + rows, len(steps)))
            arrays = [pa.array(steps[part])] + [pa.array(v[part]) for v in self._values.values()]
            for metric in self._metrics:
                values = self._run.metric(metric, self._rank, part)
                arrays += [pa.array(values[:, i]) for i in range(values.shape[1])]
            yield pa.Table.from_arrays(arrays, schema=self.schema)


def parquet(path: Path, schema: pa.Schema) -> Sink:
    """Open a Parquet file."""
    from pyarrow.parquet import ParquetWriter

    writer: Sink = ParquetWriter(path, schema, compression="zstd")
    return writer


def csv(path: Path, schema: pa.Schema) -> Sink:
    """Open a CSV file: a header, numbers in full precision, `nan` and `inf` as such."""
    from pyarrow.csv import CSVWriter

    writer: Sink = CSVWriter(str(path), schema)
    return writer


@contextlib.contextmanager
def replacing(output: Path) -> Iterator[Path]:
    """Give a path beside `output` to write to; it becomes `output` at the end, or is removed where something raises.

    Raises:
        AmpscopeError: `output` is a folder, or its folder does not exist.
    """
    if output.is_dir():
        raise AmpscopeError(f"{str(output)!r} is a folder: pass the name of a file")
    if not output.parent.is_dir():
        raise AmpscopeError(f"no folder {str(output.parent)!r} to write {output.name!r} to")
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, output)
    finally:
        part.unlink(missing_ok=True)
