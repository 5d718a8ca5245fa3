"""The tick: is there more to see, does the run live, which runs are there. Nothing is sent where nothing changed."""

from __future__ import annotations

import math
from typing import Any

from dash import Dash, Input, Output, State, html, no_update

from ampscope.errors import LogError

from ..layout.parts import act, notice
from ..reader import RunStore
from ..source import Source
from .common import ERRORS, Sender

OUTPUTS = (
    "version",
    "status",
    "run-options",
    "rank-options",
    "cmp-options",
    "blank",
    "blank-hidden",
    "panels-hidden",
    "trouble",
    "trouble-hidden",
    "run",
    "rank-hidden",
)


def poll(store: RunStore, beat: Any, have: Any) -> tuple[Any, ...]:
    """Return the outputs in the order of `OUTPUTS`, then what the browser has."""
    sender = Sender(have)
    beat = beat if isinstance(beat, dict) else {}
    key = beat.get("run") if isinstance(beat.get("run"), str) else None
    blank: Any = None
    trouble: list[str] = []
    keys: list[str] = []
    try:
        keys = [entry.key for entry in store.entries()]
        if not keys:
            blank = no_runs(store)
    except LogError as error:
        blank = no_folder(store, str(error))
    pick = no_update
    if key is None and keys:
        key = pick = keys[0]
    version: Any = no_update
    status: Any = no_update
    ranks = [0]
    if key is not None and blank is None:
        try:
            source = store.refresh(key)
            trouble = [*source.run.damage]
            ranks = source.run.ranks or [0]
            store.diagnosis.of(source)
            version = sender.part("version", [key, source.stamp], _version(key, source))
            life = store.life(source)
            told = {
                "state": life.state,
                "age": life.age,
                "rows_age": None if math.isnan(life.rows_age) else life.rows_age,
            }
            status = sender.part("status", [key, life.state, life.last_step, source.revision], told)
            if not len(source.steps):
                blank = no_step(key, life.state)
        except ERRORS as error:
            blank = unreadable(key, str(error), keys)
    options = [{"value": k, "label": k} for k in keys]
    if blank is None:
        blank_part, hidden = None, True
    else:
        blank_part, hidden = blank, False
    said = (
        [f"{len(trouble)} part(s) of this log could not be read and were left out: {'; '.join(trouble[:3])}"]
        if trouble
        else []
    )
    return (
        version,
        status,
        sender.part("runs", keys, options),
        sender.part("ranks", ranks, [{"value": r, "label": f"rank {r}"} for r in ranks]),
        sender.part("runs-compared", keys, options),
        sender.part("blank", repr(blank_part), blank_part),
        sender.part("blank-hidden", hidden, hidden),
        sender.part("panels-hidden", not hidden, not hidden),
        sender.part("trouble", said, [html.Span(line) for line in said]),
        sender.part("trouble-hidden", not said, not said),
        pick,
        sender.part("many-ranks", len(ranks) > 1, len(ranks) < 2),
        sender.state,
    )


def _version(key: str, source: Source) -> dict[str, Any]:
    steps = source.steps
    scaler = source.run.metadata.get("scaler") or {}
    recorded: dict[str, Any] = {}
    init = scaler.get("init_scale")
    if isinstance(init, (int, float)) and init > 0:
        recorded["r_init"] = round(math.log2(init))
    for name, control in (
        ("growth_factor", "r_growth"),
        ("backoff_factor", "r_backoff"),
        ("growth_interval", "r_interval"),
    ):
        if isinstance(scaler.get(name), (int, float)):
            recorded[control] = scaler[name]
    if len(steps):
        scale = source.values("loss_scale", (source.run.ranks or [0])[0])[-1]
        if math.isfinite(scale) and scale > 0:
            recorded["scale"] = max(-8, min(32, round(math.log2(scale))))
    return {
        "run": key, "stamp": source.stamp, "first": int(steps[0]) if len(steps) else 0, "last": int(steps[-1]) if len(steps) else -1,
        "recorded": recorded,
    }  # fmt: skip


def no_folder(store: RunStore, why: str) -> Any:
    """Return what is shown where the log folder does not exist."""
    return notice(
        "There is no log folder", why, "This page goes on looking, and shows the first run as soon as there is one. Training writes one with:",
        command=_command(store),
    )  # fmt: skip


def no_runs(store: RunStore) -> Any:
    """Return what is shown where the folder holds no run."""
    return notice(
        "No run here yet",
        f"Looked in {store.log_dir.resolve()} and its sub-folders for files named ampscope-*.arrows and found none. "
        "This page goes on looking. Training writes a run with:",
        command=_command(store),
    )


def unreadable(key: str, why: str, keys: list[str]) -> Any:
    """Return what is shown of a run that is not there or cannot be read, with the newest other one on offer."""
    others = [k for k in keys if k != key]
    title = "This run cannot be read" if key in keys else "There is no run of that name"
    offer = [act(f"Show the newest run: {others[0]}", "run", others[0])] if others else []
    return notice(title, why, "Any run can be chosen above.", *offer, className="notice error")


def no_step(key: str, state: str) -> Any:
    """Return what is shown of a run without a step."""
    if state in ("ended", "died"):
        return notice(
            "This run has no step",
            f"Run {key} was begun but never finished a step: training failed before its first scaler.update(), or never called it.",
        )
    return notice(
        "Waiting for the first step", f"Run {key} has begun. A step is recorded when scaler.update() is called."
    )


def _command(store: RunStore) -> str:
    return f"scaler = ampscope.watch(torch.amp.GradScaler(), model, log_dir={str(store.log_dir)!r})"


def register(app: Dash, store: RunStore) -> None:
    """Add the callback."""

    def answer(beat: Any, have: Any) -> tuple[Any, ...]:
        return poll(store, beat, have)

    app.callback(
        Output("version", "data"), Output("status", "data"), Output("run", "options"), Output("rank", "options"),
        Output("cmp", "options"), Output("blank", "children"), Output("blank", "hidden"), Output("panels", "hidden"), Output("trouble", "children"),
        Output("trouble", "hidden"), Output("run", "value"), Output("rank-box", "hidden"), Output("have-poll", "data"),
        Input("beat", "data"), State("have-poll", "data"),
        running=[(Output("tick", "disabled"), True, False)], prevent_initial_call=True,
    )(answer)  # fmt: skip
