"""The TensorBoard sink: one event a step that carries all tags. Imports neither torch nor tensorflow."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from ampscope.log.encode import Row
from ampscope.log.schema import Header
from ampscope.record import underflow
from ampscope.record.step import MEASURED, Layer

TAGS = (
    "loss_scale", "skipped", "skipped_total", "growth_tracker", "loss", "grad_norm", "headroom_bits", "underflow_ratio",
    "zero_ratio", "nonfinite_layers", "step_seconds",
)  # fmt: skip
"""Tags `amp/NAME` of every step."""
LAYER_TAGS = ("grad_norm", "grad_max", "underflow_ratio")
"""Tags `NAME/LAYER` of every `LAYERS_EVERY`-th step."""
LAYERS_EVERY = 10
MAX_GROUPS = 100
"""Above so many layers tags are written by module: TensorBoard loads 12,000 tags in minutes."""


class Events(Protocol):
    """Where summaries go."""

    def add(self, summary: Summary, step: int, wall: float) -> None:
        """Write one event."""

    def flush(self) -> None:
        """Put what was added on disk."""

    def close(self) -> None:
        """Flush and close."""


class EventFile:
    """An event file of our own, opened with a file-version event and, in a resumed run, a session start."""

    def __init__(self, folder: Path, header: Header, now: float) -> None:
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{header.session}.ampscope"
        self._file = open(folder / name, "ab")  # noqa: SIM115  (stays open)
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        if header.session:
            start = Event(wall_time=now, step=header.first_step, session_log=SessionLog(status=SessionLog.START))
            self._write(start)
        self.flush()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())

    def add(self, summary: Summary, step: int, wall: float) -> None:
        """Write one event."""
        self._write(Event(wall_time=wall, step=step, summary=summary))

    def flush(self) -> None:
        """Put what was added on disk."""
        self._records.flush()

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._records.close()


class UsersWriter:
    """A `SummaryWriter` of the user's, used as it is and never closed."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def add(self, summary: Summary, step: int, wall: float) -> None:
        """Write one event (or, where the writer has no file writer we know, one scalar a tag)."""
        get = getattr(self._writer, "_get_file_writer", None)
        file = get() if get is not None else None
        if file is not None and hasattr(file, "add_event"):
            file.add_event(Event(summary=summary), step, wall)
            return
        for value in summary.value:
            self._writer.add_scalar(value.tag, value.simple_value, step, wall)

    def flush(self) -> None:
        """Flush the user's writer."""
        self._writer.flush()

    def close(self) -> None:
        """Flush; the writer is the user's to close."""
        self._writer.flush()


class TensorBoardSink:
    """Turns rows into summaries."""

    def __init__(self, events: Events, layers: Sequence[Layer]) -> None:
        self._events = events
        self._skipped = 0.0
        self.set_layers(layers)

    def set_layers(self, layers: Sequence[Layer]) -> None:
        """From now on rows have these layers."""
        self._numel = np.array([layer.numel for layer in layers], np.int64)
        self._groups = group([layer.name for layer in layers])

    def write(self, row: Row) -> None:
        """Write one step."""
        if not row.is_step:
            return
        if not math.isnan(row.scalars.get("skipped", math.nan)):
            self._skipped += row.scalars.get("skipped", math.nan)
        values = [(f"amp/{n}", self._skipped if n == "skipped_total" else row.scalars[n]) for n in TAGS if n in row.scalars or n == "skipped_total"]
        if row.columns is None:  # nothing was measured at this step: a gap, not a NaN that looks like a fault
            measured = ("grad_norm", "headroom_bits", "underflow_ratio", "zero_ratio", "nonfinite_layers")
            values = [(tag, v) for tag, v in values if tag.removeprefix("amp/") not in measured]
        elif row.step % LAYERS_EVERY == 0:
            values += self._layer_values(row)
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values])
        self._events.add(summary, row.step, row.scalars["time"])

    def _layer_values(self, row: Row) -> list[tuple[str, float]]:
        c = row.columns
        assert c is not None
        scale = np.float64(row.scalars["loss_scale"])
        on = c["state"] == MEASURED
        ratio = underflow.estimate(c, self._numel)[0]
        out: list[tuple[str, float]] = []
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            for name, index in self._groups.items():
                index = index[on[index]]
                if not len(index):
                    continue
                largest = c["max_abs"][index]
                largest = largest[~np.isnan(largest)]
                weight = self._numel[index]
                out.append((f"grad_norm/{name}", float(np.sqrt(c["sum_squares"][index].sum()) / scale)))
                out.append((f"grad_max/{name}", float(largest.max() / scale) if len(largest) else math.nan))
                out.append((f"underflow_ratio/{name}", float((ratio[index] * weight).sum() / max(weight.sum(), 1))))
        return out

    def flush(self) -> None:
        """Put what was written on disk."""
        self._events.flush()

    def close(self) -> None:
        """Flush and close."""
        self._events.close()


def group(names: Sequence[str], most: int = MAX_GROUPS) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return {tag suffix: layer indices}: a layer each, or above `most` layers the deepest module level with at most `most` modules."""
    parts = [n.split(".") for n in names]
    depth = max(map(len, parts), default=1)
    keys = ["/".join(p) for p in parts]
    while len(set(keys)) > most and depth > 1:
        depth -= 1
        keys = ["/".join(p[:depth]) for p in parts]
    if len(set(keys)) > most:  # a flat list of names: the rest shares one group
        first = list(dict.fromkeys(keys))[: most - 1]
        keys = [k if k in set(first) else "other" for k in keys]
    out: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        out.setdefault(key, []).append(i)
    return {k: np.array(v, np.int64) for k, v in out.items()}


def make_sink(choice: Any, folder: Path, header: Header, clock: Callable[[], float]) -> TensorBoardSink:
    """Return the sink for `watch(tensorboard=...)`: True, or a `SummaryWriter`."""
    events: Events = EventFile(folder, header, clock()) if choice is True else UsersWriter(choice)
    return TensorBoardSink(events, header.layers)
