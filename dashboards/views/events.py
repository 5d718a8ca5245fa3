"""Everything that happened, as a list that can be filtered, paged and stepped through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampscope.record.step import Event

from ..source import Source
from .common import number, power
from .layers import Query

PAGE = 50
KIND_WORDS = {
    "skip": "▼ skipped",
    "nonfinite": "✕ not finite",
    "growth": "▲ growth",
    "backoff": "▽ backoff",
    "session": "┃ session",
    "settings": "⚙ settings",
    "note": "• note",
}


@dataclass(frozen=True)
class Item:
    """One event. `id` names it as long as the run keeps its past: "STEP.N", the N-th event of its step."""

    id: str
    event: Event


@dataclass(frozen=True)
class EventList:
    """One page of the events that match, and the chosen one with its neighbours (`previous`, `next`: ids or "")."""

    items: list[Item]
    total: int
    matched: int
    page: int
    pages: int
    chosen: Item | None
    place: int
    """1-based place of the chosen one among those that match, 0 if none."""
    previous: str
    next: str
    problem: str = ""


def all_items(source: Source) -> list[Item]:
    """Return every event by step, with skipped steps of which no event was written filled in from the rows."""
    skipped = [int(np.nansum(source.values("skipped", rank))) for rank in source.run.ranks]
    return source.kept("event-items", (source.run.events_revision, skipped), lambda: _all_items(source))


def _all_items(source: Source) -> list[Item]:
    events = list(source.events)
    told = {(e.step, e.rank) for e in events if e.kind in ("skip", "nonfinite")}
    steps = source.steps
    for rank in source.run.ranks:
        skipped, scale = source.values("skipped", rank), source.values("loss_scale", rank)
        events += [
            Event(int(steps[row]), "skip", rank, message=f"step skipped at loss scale {power(scale[row])}")
            for row in np.flatnonzero(skipped > 0).tolist()
            if (int(steps[row]), rank) not in told
        ]
    events.sort(key=lambda e: (e.step, e.rank))
    seen: dict[int, int] = {}
    items = []
    for event in events:
        n = seen.get(event.step, 0)
        seen[event.step] = n + 1
        items.append(Item(f"{event.step}.{n}", event))
    return items


def matching(source: Source, kinds: Sequence[str], query: str | None) -> tuple[list[Item], str]:
    """Return the events of these kinds whose text matches a query (see `layers.Query`), and what is wrong with the query."""
    wanted = Query(query)
    shown = set(kinds)
    found = [i for i in all_items(source) if i.event.kind in shown and wanted(_searched(i.event))]
    return found, wanted.problem


def _searched(e: Event) -> str:
    return " ".join([str(e.step), e.kind, e.phase, *e.layers, e.op, e.where, f"rank{e.rank} rank {e.rank}", e.message])


def event_list(
    source: Source,
    kinds: Sequence[str],
    query: str | None = "",
    *,
    newest_first: bool = False,
    page: int = 0,
    chosen: str | None = None,
) -> EventList:
    """Return a page of events.

    Args:
        source: the run.
        kinds: values of `Event.kind` to show.
        query: words or `re:` pattern, in layers, op, place and message.
        newest_first: the order.
        page: which page, 0-based; a chosen event that matches decides it instead when `page` is negative.
        chosen: id of the chosen event.
    """
    found, problem = matching(source, kinds, query)
    if newest_first:
        found = found[::-1]
    place = next((i for i, item in enumerate(found) if item.id == chosen), -1)
    item = found[place] if place >= 0 else next((i for i in all_items(source) if i.id == chosen), None)
    pages = max(1, -(-len(found) // PAGE))
    page = place // PAGE if page < 0 and place >= 0 else min(max(page, 0), pages - 1)
    before = found[place - 1].id if place > 0 else ""
    after = found[place + 1].id if 0 <= place < len(found) - 1 else found[0].id if place < 0 and found else ""
    return EventList(
        found[page * PAGE : (page + 1) * PAGE],
        len(all_items(source)),
        len(found),
        page,
        pages,
        item,
        place + 1,
        before,
        after,
        problem,
    )


def facts(event: Event) -> list[tuple[str, str]]:
    """Return what is known of an event as (name, value) pairs, without what is not."""
    layers = ", ".join(event.layers[:12]) + (f" and {len(event.layers) - 12} more" if len(event.layers) > 12 else "")
    pairs = [
        ("step", f"{event.step:,}"), ("kind", event.kind), ("phase", "" if event.phase == "none" else event.phase), ("layers", layers),
        ("op", event.op), ("where", event.where), ("rank", str(event.rank)), ("message", event.message),
    ]  # fmt: skip
    for name, value in event.data.items():
        if name not in ("topic", "layers") and value not in ("", None, False, [], {}):
            pairs.append((name.replace("_", " "), _fact(value)))
    return [(name, value) for name, value in pairs if value]


def _fact(value: Any) -> str:
    if value is True:
        return "yes"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return ", ".join(value[:12]) + (f" and {len(value) - 12} more" if len(value) > 12 else "")
    return str(value)[:400]
