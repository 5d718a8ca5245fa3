"""The what-if tab."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, html, no_update

from ..figures.theme import message
from ..reader import RunStore
from .common import Sender, read_ask


def answer(store: RunStore, data: Any, have: Any) -> tuple[Any, ...]:
    """Return (chart, words, table, have)."""
    ask = read_ask(data)
    if ask is None:
        return (no_update,) * 4
    sender = Sender(have)
    words = "This version cannot compute it."
    return (
        sender.figure("chart", message(ask.theme, words)),
        sender.part("words", words, [html.P(words)]),
        [],
        sender.state,
    )


def replay(store: RunStore, data: Any, have: Any) -> tuple[Any, ...]:
    """Return (chart, words, have)."""
    ask = read_ask(data)
    if ask is None:
        return (no_update,) * 3
    sender = Sender(have)
    words = "This version cannot compute it."
    return sender.figure("chart", message(ask.theme, words)), sender.part("words", words, [html.P(words)]), sender.state


def register(app: Dash, store: RunStore) -> None:
    """Add the callbacks."""

    def reply(data: Any, have: Any) -> tuple[Any, ...]:
        return answer(store, data, have)

    def reply_replay(data: Any, have: Any) -> tuple[Any, ...]:
        return replay(store, data, have)

    app.callback(
        Output("whatif-chart", "figure"), Output("whatif-words", "children"), Output("whatif-table", "children"),
        Output("have-whatif", "data"), Input("ask-whatif", "data"), State("have-whatif", "data"),
        running=[(Output("busy", "data"), True, False)], prevent_initial_call=True,
    )(reply)  # fmt: skip
    app.callback(
        Output("replay-chart", "figure"), Output("replay-words", "children"), Output("have-replay", "data"),
        Input("ask-replay", "data"), State("have-replay", "data"),
        running=[(Output("busy", "data"), True, False)], prevent_initial_call=True,
    )(reply_replay)  # fmt: skip
