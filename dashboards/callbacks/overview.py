"""The overview tab."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, html, no_update

from ..background import PATIENCE
from ..figures import overview as figures
from ..figures.theme import message
from ..layout.parts import act
from ..reader import RunStore
from ..source import SMALL
from ..views import health as health_view
from ..views import overview as views
from .common import ERRORS, Sender, open_source, read_ask

SIGNS = {"good": "✓", "info": "●", "warning": "▲", "error": "✕", "unknown": "…"}


def answer(store: RunStore, data: Any, have: Any) -> tuple[Any, ...]:
    """Return (chart, health, tiles, note, have)."""
    ask = read_ask(data)
    if ask is None:
        return (no_update,) * 5
    sender = Sender(have)
    try:
        source, rank = open_source(store, ask)
        if not len(source.steps):
            return sender.figure("chart", message(ask.theme, "No step is recorded yet.")), [], [], "", sender.state
        view = source.cached(("overview", rank, ask.span), lambda: views.overview(source, rank, ask.span))
        patience = (
            PATIENCE if len(source.steps) * len(source.layers) <= SMALL else 0.0
        )  # a long run's takes longer anyway
        words = health_view.health(source, rank, store.diagnosis.of(source, patience))
        tiles = source.cached(("tiles", rank), lambda: views.tiles(source, rank))
    except ERRORS as error:
        return sender.figure("chart", message(ask.theme, "This run cannot be read.")), [], [], str(error), sender.state
    figure = figures.figure(view, ask.theme, f"{ask.run}/{rank}", mark=ask.mark, narrow=ask.narrow)
    return (
        sender.figure("chart", figure),
        sender.part("health", repr(words), health_card(words)),
        sender.part("tiles", repr(tiles), [tile(t) for t in tiles]),
        sender.part("note", note(view), note(view)),
        sender.state,
    )


def note(view: views.Overview) -> str:
    """Return what has to be said of the chart, "" if nothing."""
    if view.reading < 1:
        return f"The underflow bounds are still being read: {100 * view.reading:.0f} % of the run."
    return ""


def health_card(words: health_view.Health) -> list[Any]:
    """Return the sentence of health: a sign, the words, what to do."""
    body: list[Any] = [html.Strong(words.sentence)]
    if words.remedy:
        body.append(html.P(words.remedy))
    if words.rule:
        body.append(act("Evidence and other findings", "tab", "findings", className="link"))
    return [html.Span(SIGNS[words.level], className=f"sign {words.level}", **{"aria-hidden": "true"}), html.Div(body)]


def tile(t: views.Tile) -> html.Div:
    """Return one number."""
    return html.Div(
        [
            html.Span(t.label, className="label"),
            html.Span(t.value, className="value"),
            html.Span(t.hint, className="hint"),
        ],
        className="tile",
    )


def register(app: Dash, store: RunStore) -> None:
    """Add the callback."""

    def reply(data: Any, have: Any) -> tuple[Any, ...]:
        return answer(store, data, have)

    app.callback(
        Output("overview-chart", "figure"), Output("health", "children"), Output("tiles", "children"),
        Output("overview-note", "children"), Output("have-overview", "data"),
        Input("ask-overview", "data"), State("have-overview", "data"),
        running=[(Output("busy", "data"), True, False)], prevent_initial_call=True,
    )(reply)  # fmt: skip
