"""The boundary between ampscope and the user's training: nothing that goes wrong on this side reaches the other."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from ampscope.probe.observer import Observer
from ampscope.probe.window import Window
from ampscope.record.step import Event


def say(text: str) -> None:
    """Warn the user, at the line of theirs that led here; where warnings are errors, print: a monitor must not end a job."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("ampscope."):
        level, frame = level + 1, frame.f_back
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=level)
    except RuntimeWarning:
        print(f"RuntimeWarning: {text}", file=sys.stderr)


class Guarded:
    """Runs a recorder's steps, and its observers, so that a fault costs ampscope and not the user.

    Attributes:
        enabled: False once a fault, or the end, has switched the recorder off.
        observers: those that still listen.
        window: what the open record has gathered; the host time spent here goes into its `overhead`.
        on_fault: called when a fault switches the recorder off.
    """

    window: Window

    def __init__(self, observers: Iterable[Observer], rank: int, submit_events: Callable[[list[Event]], None]) -> None:
        self.enabled = True
        self.observers = list(observers)
        self._listeners: dict[str, tuple[Observer, ...]] = {}
        self.rank = rank
        self.on_fault: Callable[[], None] | None = None
        self._submit_events = submit_events
        self._pid = os.getpid()
        self._began: float | None = None

    def _release(self) -> None:
        """Remove the hooks of the open record."""
        self.window.release()

    def guarded(self, method: str, *args: Any) -> None:
        """Run one of this recorder's steps; a fault in it disables ampscope with one warning and goes no further."""
        if not self.enabled:
            return
        if os.getpid() != self._pid:  # a forked child: the log is its parent's
            self.enabled = False
            return
        outermost = self._began is None
        if outermost:
            self._began = time.perf_counter()
        try:
            getattr(self, method)(*args)
        except Exception as error:  # the one guarded boundary: a monitor must not end a job
            self.disable(f"{type(error).__name__} in {method}: {error}")
        finally:
            if outermost and self._began is not None:
                self.window.overhead += time.perf_counter() - self._began
                self._began = None

    def disable(self, why: str) -> None:
        """Stop recording, say so once, and take everything out."""
        if not self.enabled:
            return
        self.enabled = False
        self._release()
        self.shut()
        if self.on_fault is not None:
            self.on_fault()
        text = f"ampscope stopped recording ({why}). Training goes on unwatched."
        self._submit_events([Event(self.window.step, "note", self.rank, message=text, data={"topic": "stopped"})])
        say(text)

    def shut(self) -> None:
        """Close the observers."""
        self._each("closed")
        self.observers.clear()
        self._listeners.clear()

    def _tell(self, observer: Observer, what: str, *args: Any) -> None:
        try:
            getattr(observer, what)(*args)
        except Exception as error:  # a fault in one observer costs that observer, not the record
            if observer in self.observers:
                self.observers.remove(observer)
                self._listeners.clear()
            name = type(observer).__name__
            text = f"ampscope switched {name} off ({type(error).__name__} in {what}: {error})"
            event = Event(
                self.window.step, "note", self.rank, message=text, data={"topic": "switched_off", "part": name}
            )
            self.window.events.append(event)
            say(f"{text}. Recording and training go on.")
            if what != "closed":
                self._tell(observer, "closed")

    def _each(self, what: str, *args: Any) -> None:
        listeners = self._listeners.get(what)
        if listeners is None:  # those that do something when they hear it
            nothing = getattr(Observer, what)
            listeners = tuple(o for o in self.observers if getattr(getattr(o, what), "__func__", None) is not nothing)
            self._listeners[what] = listeners
        for observer in listeners:
            self._tell(observer, what, *args)
