"""The TensorBoard sink: one event a step that carries all tags. Imports neither torch nor tensorflow."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from ampscope.errors import LogError
from ampscope.log.crc32c import record
from ampscope.log.encode import Row
from ampscope.log.files import AppendFile
from ampscope.log.schema import Header
from ampscope.log.streams import earlier
from ampscope.record.step import MEASURED, Layer

TAGS = (
    "loss_scale", "skipped", "skipped_total", "growth_tracker", "loss", "grad_norm", "headroom_bits", "underflow_ratio",
    "zero_ratio", "nonfinite_layers", "step_seconds",
)  # fmt: skip
"""Tags `amp/NAME` of every step; one whose number was not taken at a step is left out of it."""
LAYER_TAGS = ("grad_norm", "grad_max", "underflow_ratio")
"""Tags `NAME/LAYER` of every `LAYERS_EVERY`-th step."""
LAYERS_EVERY = 10
MAX_GROUPS = 100
"""Above so many layers tags are written by module: TensorBoard loads 12,000 tags in minutes."""
KEEP_BYTES = 8 << 20
"""Newest bytes kept while nothing can be written."""

Array = np.ndarray[Any, Any]
_EVENT_FILE = re.compile(r"^events\.out\.tfevents\.(\d{10,})\.")


class Events(Protocol):
    """Where summaries go."""

    def add(self, summary: Summary, step: int, wall: float) -> None:
        """Take one event."""

    def flush(self) -> None:
        """Put what was added on disk."""

    def close(self) -> None:
        """Flush and close."""


class EventFile:
    """An event file of our own. It begins with a session start: older steps from there on are dropped."""

    def __init__(self, folder: Path, header: Header, now: float) -> None:
        # TensorBoard reads a folder's files in the order of their names and never goes back.
        earlier = [int(m[1]) for name in _names(folder) if (m := _EVENT_FILE.match(name))]
        stamp = max([int(now), *(e + 1 for e in earlier)])
        name = f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.{header.session}.ampscope"
        start = Event(wall_time=now, step=header.first_step, session_log=SessionLog(status=SessionLog.START))
        begin = [Event(wall_time=now, file_version="brain.Event:2"), start]
        self._file = AppendFile(folder / name, b"".join(record(e.SerializeToString()) for e in begin))
        self._waiting: list[bytes] = []
        self._size = 0

    def add(self, summary: Summary, step: int, wall: float) -> None:
        """Take one event."""
        data = record(Event(wall_time=wall, step=step, summary=summary).SerializeToString())
        self._waiting.append(data)
        self._size += len(data)
        while self._size > KEEP_BYTES:
            self._size -= len(self._waiting.pop(0))

    def flush(self) -> None:
        """Put what was added on disk.

        Raises:
            OSError: it could not be written; it is kept.
        """
        self._file.ensure()
        if self._waiting:
            self._file.append(b"".join(self._waiting))
            self._waiting.clear()
            self._size = 0

    def close(self) -> None:
        """Flush and close.

        Raises:
            OSError: it could not be written.
        """
        try:
            self.flush()
        finally:
            self._file.close()


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


class UsersWriter:
    """A `SummaryWriter` of the user's, used as it is and never closed."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._closed = False

    def add(self, summary: Summary, step: int, wall: float) -> None:
        """Write one event (or, where the writer has no file writer we know, one scalar a tag).

        Raises:
            LogError: the user has closed the writer; from now on nothing is written.
        """
        if self._closed:
            return
        try:
            self._add(summary, step, wall)
        except OSError as error:
            self._closed = True
            raise LogError(
                f"writes no more to TensorBoard: the SummaryWriter passed to watch() failed at step {step} ({error})"
            ) from None

    def _add(self, summary: Summary, step: int, wall: float) -> None:
        get = getattr(self._writer, "_get_file_writer", None)
        file = get() if get is not None else None
        if file is not None and hasattr(file, "add_event"):
            file.add_event(Event(summary=summary), step, wall)
            return
        for value in summary.value:
            self._writer.add_scalar(value.tag, value.simple_value, step, wall)

    def flush(self) -> None:
        """Flush the user's writer; one that the user has closed has flushed already."""
        with contextlib.suppress(OSError):
            self._writer.flush()

    def close(self) -> None:
        """Flush; the writer is the user's to close."""
        self.flush()


class TensorBoardSink:
    """Turns rows into summaries.

    Args:
        events: where they go.
        layers: of the rows to come.
        skipped: steps skipped before the first row.
    """

    def __init__(self, events: Events, layers: Sequence[Layer], skipped: float = 0.0) -> None:
        self._events = events
        self._skipped = skipped
        self._due = 0
        self.set_layers(layers)

    def set_layers(self, layers: Sequence[Layer]) -> None:
        """From now on rows have these layers."""
        self._numel = np.array([layer.numel for layer in layers], np.int64)
        self._groups = group([layer.name for layer in layers])

    def write(self, row: Row) -> None:
        """Take one row; only steps are shown."""
        if not row.is_step:
            return
        scalars = row.scalars
        skipped = scalars.get("skipped", 0.0)
        self._skipped += skipped if skipped == skipped else 0.0
        known = {**scalars, "skipped_total": self._skipped}
        values = [(f"amp/{n}", known[n]) for n in TAGS if n in known]
        if row.columns is not None and row.step >= self._due:
            # The first sampled step of each ten, also where only every k-th is sampled.
            self._due = row.step - row.step % LAYERS_EVERY + LAYERS_EVERY
            values += self._layer_values(row)
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values])
        self._events.add(summary, row.step, scalars["time"])

    def _layer_values(self, row: Row) -> list[tuple[str, float]]:
        c = row.columns
        assert c is not None
        scale = np.float64(row.scalars["loss_scale"])
        on = c["state"] == MEASURED
        ratio = row.flushed if row.flushed is not None else np.zeros(len(on))
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


def group(names: Sequence[str], most: int = MAX_GROUPS) -> dict[str, Array]:
    """Return {tag suffix: layer indices}: a layer each; above `most` layers a module each, as deep as fits."""
    parts = [n.split(".") for n in names]
    keys = ["/".join(p) for p in parts]
    if len(names) > most:
        parts = [p[:-1] or p for p in parts]
        keys = ["/".join(p) for p in parts]
        depth = max(map(len, parts))
        while len(set(keys)) > most and depth > 1:
            depth -= 1
            keys = ["/".join(p[:depth]) for p in parts]
        kept = set(list(dict.fromkeys(keys))[: most if len(set(keys)) <= most else most - 1])
        keys = [k if k in kept else "other" for k in keys]
    out: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        out.setdefault(key, []).append(i)
    return {k: np.array(v, np.int64) for k, v in out.items()}


def make_sink(choice: Any, folder: Path, header: Header, now: float) -> TensorBoardSink | None:
    """Return the sink for `watch(tensorboard=...)`: True (rank 0 writes), a `SummaryWriter`, or False (None).

    Args:
        choice: as given to `watch`.
        folder: the run's.
        header: of the first stream.
        now: Unix seconds.
    """
    if choice is False or choice is None or (choice is True and header.rank):
        return None
    events: Events = EventFile(folder, header, now) if choice is True else UsersWriter(choice)
    return TensorBoardSink(events, header.layers, _skipped_before(folder, header))


def _skipped_before(folder: Path, header: Header) -> float:
    """Return how many steps before this session's first were skipped, so that `amp/skipped_total` goes on."""
    if not header.session:
        return 0.0
    try:
        known = earlier(folder, header.session)
    except LogError:
        return 0.0
    return float(np.nansum(known["skipped"][known["step"] < header.first_step]))
