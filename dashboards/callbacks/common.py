"""What every tab does: read what the browser asks, send only what changed, turn a known error into words."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dash import Patch, no_update

from ampscope.errors import AmpscopeError

from ..figures.theme import Figure, Theme
from ..reader import RunStore
from ..source import Source
from ..views.common import Range

ERRORS = (AmpscopeError, OSError)
"""What a log may do to a reader; everything else is a bug and is shown as one."""


@dataclass(frozen=True)
class Ask:
    """What the browser asks, checked. `more` holds what one tab alone asks, unchecked."""

    run: str
    rank: int
    theme: Theme
    span: Range
    narrow: bool
    mark: float | None
    more: Mapping[str, Any]

    def text(self, key: str, default: str = "") -> str:
        """Return a text of `more`."""
        value = self.more.get(key)
        return value if isinstance(value, str) else default

    def choice(self, key: str, allowed: Any, default: str) -> str:
        """Return a text of `more` if it is one of `allowed`."""
        value = self.text(key, default)
        return value if value in allowed else default

    def texts(self, key: str) -> list[str]:
        """Return a list of texts of `more`."""
        value = self.more.get(key)
        return [v for v in value if isinstance(v, str)][:1000] if isinstance(value, list) else []

    def number(self, key: str) -> float | None:
        """Return a finite number of `more`."""
        value = self.more.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
            return None
        return float(value)


def read_ask(data: Any) -> Ask | None:
    """Return what a browser asks, None if it asks nothing. Whatever it sends, the fields have their types."""
    if not isinstance(data, Mapping) or not isinstance(data.get("run"), str):
        return None
    rank, mark = data.get("rank"), data.get("mark")
    return Ask(
        data["run"],
        rank if isinstance(rank, int) and not isinstance(rank, bool) else 0,
        "dark" if data.get("theme") == "dark" else "light",
        Range.of(data.get("range")),
        data.get("narrow") is True,
        float(mark) if isinstance(mark, (int, float)) else None,
        data,
    )


def open_source(store: RunStore, ask: Ask) -> tuple[Source, int]:
    """Return the run asked for and a rank it has.

    Raises:
        AmpscopeError, OSError: the run cannot be read.
    """
    source = store.source(ask.run)
    store.asked()
    ranks = source.run.ranks or [0]
    return source, ask.rank if ask.rank in ranks else ranks[0]


def digest(value: Any) -> str:
    """Return a short mark that differs where `value` does."""
    return f"{zlib.crc32(json.dumps(value, sort_keys=True, default=repr).encode()):08x}"


def send(figure: Figure, have: Any) -> tuple[Any, dict[str, Any]]:
    """Return (what to send of a figure, what the browser then has).

    Traces and layout entries that the browser has are left out; with a new shape (other traces, other theme, another
    run) everything is sent. Zoom stays in both cases: `uirevision` is the same as long as the run is.
    """
    layout = figure["layout"]
    shape = digest(
        [
            len(figure["data"]),
            [t.get("type") for t in figure["data"]],
            layout.get("uirevision"),
            layout.get("template"),
            sorted(layout),
        ]
    )
    traces = [digest(t) for t in figure["data"]]
    entries = {k: digest(v) for k, v in layout.items()}
    new = {"shape": shape, "data": traces, "layout": entries}
    old, old_entries = (have.get("data"), have.get("layout")) if isinstance(have, Mapping) else (None, None)
    fits = isinstance(have, Mapping) and have.get("shape") == shape
    if not (fits and isinstance(old, list) and len(old) == len(traces) and isinstance(old_entries, Mapping)):
        return figure, new
    patch, changed = Patch(), False
    for i, trace in enumerate(figure["data"]):
        if old[i] != traces[i]:
            patch["data"][i] = trace
            changed = True
    for key, mark in entries.items():
        if old_entries.get(key) != mark:
            patch["layout"][key] = layout[key]
            changed = True
    return (patch if changed else no_update), new


class Sender:
    """Sends parts of an answer that changed since the last one; `have` is what the browser says it has."""

    def __init__(self, have: Any) -> None:
        self._old: Mapping[str, Any] = have if isinstance(have, Mapping) else {}
        self.have: dict[str, Any] = {}

    def figure(self, name: str, figure: Figure) -> Any:
        """Return what to send of a chart."""
        out, self.have[name] = send(figure, self._old.get(name))
        return out

    def part(self, name: str, value: Any, children: Any) -> Any:
        """Return `children`, or `no_update` where `value`, which they are made of, is what it was."""
        self.have[name] = digest(value)
        return no_update if self.have[name] == self._old.get(name) else children

    @property
    def state(self) -> Any:
        """What the browser has now, `no_update` if that is what it had."""
        return no_update if self.have == self._old else self.have
