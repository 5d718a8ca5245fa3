"""Marks on the time line: skipped steps, NaN, inf, growth of the scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ampscope.record.step import Event

from ..source import Source
from .common import Range, power

Array = np.ndarray[Any, Any]
Kind = Literal["growth", "skip", "inf", "nan"]

KINDS: tuple[Kind, ...] = ("growth", "skip", "inf", "nan")
BUCKETS = 500
"""Marks of a kind drawn at most; closer ones become one mark that says how many."""


@dataclass(frozen=True)
class Marks:
    """One mark an entry: step, kind, and what to say of it."""

    x: Array
    kind: list[Kind]
    text: list[str]
    counts: dict[Kind, int]
    """Steps of each kind within the range, all of them."""


def event_kinds(event: Event) -> set[Kind]:
    """Return which marks an event gets: a skipped step may have seen both NaN and inf."""
    found: set[Kind] = set()
    if event.kind == "growth":
        found.add("growth")
    if event.kind not in ("skip", "nonfinite"):
        return found
    if event.kind == "skip":
        found.add("skip")
    if _positive(event, "nan"):
        found.add("nan")
    if _positive(event, "pos_inf") or _positive(event, "neg_inf"):
        found.add("inf")
    if event.kind == "nonfinite" and not found:
        found.add("nan" if "nan" in event.message.lower() else "inf")
    return found


def _positive(event: Event, name: str) -> bool:
    count = event.data.get(name, 0)
    return isinstance(count, (int, float)) and count > 0


def marks(source: Source, rank: int, span: Range) -> Marks:
    """Return the marks within a range of steps."""
    steps = source.steps
    found: dict[Kind, Array] = source.cached(("marks", rank), lambda: _all(source, rank))
    scale = source.values("loss_scale", rank)
    xs: list[Array] = []
    kinds: list[Kind] = []
    texts: list[str] = []
    counts: dict[Kind, int] = {}
    for kind in KINDS:
        at = found[kind]
        if span.low is not None and span.high is not None:
            at = at[(at >= span.low) & (at <= span.high)]
        counts[kind] = len(at)
        firsts, many = _thin(at, span)
        xs.append(firsts)
        kinds += [kind] * len(firsts)
        for step, n in zip(firsts.tolist(), many.tolist(), strict=True):
            row = int(np.searchsorted(steps, step))
            texts.append(_text(kind, n, scale[row] if row < len(scale) else float("nan")))
    return Marks(np.concatenate(xs) if xs else np.zeros(0, np.int64), kinds, texts, counts)


def _all(source: Source, rank: int) -> dict[Kind, Array]:
    """Return the steps of each kind: from events, and from what every row says even where no event was written."""
    steps = source.steps
    told = source.kept(("told", rank), source.run.events_revision, lambda: _told(source.events, rank))
    out = {kind: set(found) for kind, found in told.items()}
    out["skip"] |= set(steps[source.values("skipped", rank) > 0].tolist())
    loss = source.values("loss", rank)
    if np.isfinite(loss).any() or np.isinf(loss).any():
        out["nan"] |= set(steps[np.isnan(loss)].tolist())
    out["inf"] |= set(steps[np.isinf(loss)].tolist())
    bad = set(steps[source.values("nonfinite_layers", rank) > 0].tolist())
    out["inf"] |= bad - out["nan"]  # where no event says which, inf is by far the likelier
    return {kind: np.array(sorted(found), np.int64) for kind, found in out.items()}


def _told(events: list[Event], rank: int) -> dict[Kind, set[int]]:
    """Return the steps of each kind that a rank's events tell of."""
    out: dict[Kind, set[int]] = {kind: set() for kind in KINDS}
    for event in events:
        if event.rank == rank:
            for kind in event_kinds(event):
                out[kind].add(event.step)
    return out


def _thin(at: Array, span: Range) -> tuple[Array, Array]:
    """Return the first step of each bucket of a range and how many there are in it."""
    if len(at) <= BUCKETS:
        return at, np.ones(len(at), np.int64)
    low = float(at[0]) if span.low is None else span.low
    high = float(at[-1]) if span.high is None else span.high
    bucket = ((at - low) / max(high - low, 1) * BUCKETS).astype(np.int64)
    _, first, many = np.unique(bucket, return_index=True, return_counts=True)
    return at[first], many


def _text(kind: Kind, many: int, scale: float) -> str:
    if many > 1:
        return {"growth": "scale grew", "skip": "skipped", "inf": "inf in gradients or loss", "nan": "NaN"}[
            kind
        ] + f" ×{many}"
    return {
        "growth": f"scale grew after {power(scale)}",
        "skip": f"step skipped at {power(scale)}",
        "inf": "inf in gradients or loss",
        "nan": "NaN in gradients or loss",
    }[kind]
