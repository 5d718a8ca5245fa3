"""What the writer's thread does, without the thread: rows into the sinks, retries, a note of what was lost."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ampscope.errors import LogError
from ampscope.log.arrows import ArrowSink
from ampscope.log.encode import Row, begin, complete, encode_events
from ampscope.log.lost import Lost
from ampscope.log.schema import Header
from ampscope.log.tensorboard import TensorBoardSink, make_sink
from ampscope.record import underflow
from ampscope.record.history import History
from ampscope.record.step import Event, Layer, StepRecord

TOGETHER = 32
"""Rows that are completed at once, at most."""


class Journal:
    """Writes one session of one rank. No method raises; what goes wrong is warned of once and noted in the log.

    Args:
        folder: the run's.
        header: what is known before the first row.
        tensorboard: True, False, or a `SummaryWriter` of the user's.
        clock: Unix seconds.
    """

    def __init__(self, folder: Path, header: Header, tensorboard: Any, clock: Callable[[], float]) -> None:
        self.lost = Lost()
        self._folder, self._header, self._clock = folder, header, clock
        self._numel = np.array([layer.numel for layer in header.layers], np.int64)
        self._order: list[str] = []
        self._context = self._make_context()
        self._history = History()
        self._row = 0
        self._step = header.first_step
        self._warned = False
        self._closing: list[ArrowSink] = []
        self._begun: list[Row] = []
        """Encoded, and to be completed together."""
        self._sink = ArrowSink(folder, header)
        self._board: TensorBoardSink | None = None
        self.attempt(self._open_board, tensorboard)
        self.flush()

    def _open_board(self, choice: Any) -> None:
        self._board = make_sink(choice, self._folder, self._header, self._clock())

    @property
    def pending(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._begun or self._sink.pending or self._closing or self.lost)

    def attempt(self, do: Callable[..., Any], *args: Any) -> bool:
        """Run a step; return whether it went well. What the disk refuses is kept; anything else costs that step."""
        try:
            do(*args)
        except OSError as error:
            self._warn(
                f"cannot write to {str(self._folder)!r} ({error.strerror or error}); "
                "it keeps the newest records in memory and tries again"
            )
            return False
        except LogError as error:
            self._warn(str(error))
            return False
        except Exception as error:  # the writer's own boundary: a fault here must end neither its thread nor the job
            self._warn(f"could not write a record ({type(error).__name__}: {error})")
            return False
        return True

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            say(f"ampscope {text}. Training goes on.")

    def _make_context(self) -> underflow.Context:
        """Return what the underflow estimate knows of the layers."""
        header = self._header
        tables, summed = header.settings.get("tables", ()), header.gradients == "replicated"
        return underflow.Context.of(header.layers, self._order, tables, summed)

    def record(self, record: StepRecord) -> None:
        """Take a record; it is on disk after the next `flush`."""
        if not self.attempt(self._encode, record):
            self.lost.add([record.step], "it could not be encoded")

    def _encode(self, record: StepRecord) -> None:
        self._step = record.step
        for event in record.events:
            if event.data.get("topic") == "backward_order":
                self._complete()
                self._order = [str(n) for n in event.data.get("layers", ())]
                self._context = self._make_context()
        self._begun.append(begin(record, self._row, len(self._header.layers)))
        self._row += 1
        if len(self._begun) >= TOGETHER:
            self._complete()

    def _complete(self) -> None:
        """Hand the rows begun so far to the sinks."""
        rows, self._begun = self._begun, []
        together = self.attempt(complete, rows, self._numel, self._context, self._history)
        for row in rows:  # one of them is to blame, if not
            if (together or self.attempt(complete, [row], self._numel, self._context, self._history)) and self.attempt(
                self._sink.write, row
            ):
                if self._board is not None:
                    self.attempt(self._board.write, row)
            else:
                self.lost.add([row.step], "it could not be encoded")

    def events(self, events: Sequence[Event]) -> None:
        """Take events that belong to no record."""
        if events:
            self._complete()
            row = encode_events(events, self._row, self._clock())
            self._row += self.attempt(self._sink.write, row)

    def layers(self, layers: Sequence[Layer]) -> None:
        """From the next record on the layers are these: a new part of the log, or before any row a new header."""
        self._complete()
        if self._sink.taken:
            self._closing.append(self._sink)
        else:
            self._sink.abandon()
        self._header = replace(self._header, layers=list(layers), part=self._header.part + self._sink.taken)
        self._numel = np.array([layer.numel for layer in layers], np.int64)
        self._context, self._history = self._make_context(), History()
        self._sink = ArrowSink(self._folder, self._header)
        if self._board is not None:
            self._board.set_layers(layers)
        self.flush()

    def flush(self) -> None:
        """Put everything on disk, if the disk lets us."""
        self._complete()
        while self._closing and self.attempt(self._closing[0].close):
            self._settle(self._closing.pop(0))
        if len(self._closing) > 8:  # a disk that stays full while layers change again and again
            self._settle(self._closing.pop(0), "nothing could be written")
        if self.attempt(self._sink.flush):
            self._settle(self._sink)
            if self.lost:
                self._tell()
        if self._board is not None:
            self.attempt(self._board.flush)

    def _settle(self, sink: ArrowSink, why: str = "") -> None:
        """Take over what a sink lost (`why`: all that it still holds is lost too)."""
        if why:
            sink.lost.add(sink.rows.steps(0, len(sink.rows)), why)
            sink.abandon()
        if sink.lost:
            self.lost.join(sink.lost, sink.lost.why)
            sink.lost = Lost()
            self._warn(f"lost part of its log in {str(self._folder)!r}: {self.lost}")

    def _tell(self) -> None:
        data = {"topic": "lost", "records": self.lost.count, "first": self.lost.first, "last": self.lost.last}
        event = Event(self._step, "note", self._header.rank, message=str(self.lost), data=data)
        self.lost = Lost()
        self.events([event])
        self.attempt(self._sink.flush)

    def beat(self) -> None:
        """Touch the files: the writer lives."""
        if not self.attempt(self._sink.touch):
            self.flush()

    def close(self) -> None:
        """Write what is left and mark the log finished."""
        self.flush()
        for sink in [*self._closing, self._sink]:
            if not self.attempt(sink.close):
                self._settle(sink, "the log could not be closed")
                say(f"ampscope: {self.lost}.")
        if self._board is not None:
            self.attempt(self._board.close)


def say(text: str) -> None:
    """Warn; where warnings are errors, stay silent: nothing may raise into training, or out of the writer's thread."""
    with contextlib.suppress(RuntimeWarning):
        warnings.warn(text, RuntimeWarning, stacklevel=3)
