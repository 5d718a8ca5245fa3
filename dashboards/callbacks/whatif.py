"""The what-if tab."""

from __future__ import annotations

import math
from typing import Any

from dash import Dash, Input, Output, State, html, no_update

from ..background import PATIENCE
from ..figures import whatif as figures
from ..figures.theme import message
from ..reader import RunStore
from ..source import Source
from ..views import whatif as views
from ..views.common import percent
from .common import ERRORS, Ask, Sender, open_source, read_ask

FORMATS = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
WAIT = "The histograms are being added up …"


def chosen_exponent(ask: Ask, source: Source, rank: int) -> int:
    """Return the exponent on the slider; where none was chosen, that of the newest recorded scale."""
    asked = ask.number("scale")
    if asked is None:
        scale = source.values("loss_scale", rank)
        last = float(scale[-1]) if len(scale) else 1.0
        asked = math.log2(last) if math.isfinite(last) and last > 0 else 16
    return int(min(max(round(asked), views.LOW), views.HIGH))


def answer(store: RunStore, data: Any, have: Any) -> tuple[Any, ...]:
    """Return (chart, chart of the layers, words, table, have)."""
    ask = read_ask(data)
    if ask is None:
        return (no_update,) * 5
    sender = Sender(have)

    def only(words: str) -> tuple[Any, ...]:
        empty = message(ask.theme, words)
        return (
            sender.figure("chart", empty),
            sender.figure("layers", empty),
            sender.part("words", words, []),
            [],
            sender.state,
        )

    try:
        source, rank = open_source(store, ask)
        verdict = store.collected.of(source, PATIENCE)
        if verdict.value is None:
            return only(verdict.problem or WAIT)
        name = ask.choice("fmt", FORMATS, "fp16")
        view = views.sweep(source, rank, verdict.value, name, chosen_exponent(ask, source, rank))
    except ERRORS as error:
        return only(str(error))
    revision = f"{ask.run}/{rank}/{name}"
    return (
        sender.figure("chart", figures.figure(view, ask.theme, revision, narrow=ask.narrow)),
        sender.figure("layers", figures.layers(view, ask.theme, revision, narrow=ask.narrow)),
        sender.part("words", view.words, [*[html.P(w) for w in view.words], assumptions(view.assumptions)]),
        sender.part("table", repr(view.rows), table(view)),
        sender.state,
    )


def assumptions(lines: list[str]) -> html.Details:
    """Return what an answer rests on, folded."""
    return html.Details([html.Summary("What this rests on"), html.Ul([html.Li(line) for line in lines])])


def table(view: views.Sweep) -> list[Any]:
    """Return the layers at the chosen scale, the worst first."""
    head = html.Thead(html.Tr([html.Th(h) for h in ("Layer", "Flushed", "Fewer bits", "Overflowing", "Good scales")]))

    def good(r: views.Row) -> str:
        if math.isnan(r.low):
            return "nothing measured"
        if not (math.isfinite(r.low) and math.isfinite(r.high)) or r.low > r.high:
            return "✕ none"
        return f"2^{round(r.low)} to 2^{round(r.high)}"

    body = [
        html.Tr(
            [
                html.Td(r.name),
                html.Td(percent(r.flushed)),
                html.Td(percent(r.subnormal)),
                html.Td(percent(r.overflow)),
                html.Td(good(r)),
            ]
        )
        for r in view.rows
    ]
    rest = (
        [html.P(f"{view.left_out:,} further layers, which lose less, are left out.", className="note")]
        if view.left_out
        else []
    )
    return [html.Details([html.Summary("The layers as a table"), html.Table([head, html.Tbody(body)]), *rest])]


def settings(ask: Ask) -> dict[str, Any]:
    """Return the settings that the viewer set, as `replay` takes them; nonsense is left to it to refuse."""
    out: dict[str, Any] = {}
    init, growth, backoff, interval = (ask.number(k) for k in ("r_init", "r_growth", "r_backoff", "r_interval"))
    if init is not None:
        out["init_scale"] = 2.0 ** min(max(init, -140), 127)
    if growth is not None:
        out["growth_factor"] = growth
    if backoff is not None:
        out["backoff_factor"] = backoff
    if interval is not None:
        out["growth_interval"] = int(interval)
    return out


def replay(store: RunStore, data: Any, have: Any) -> tuple[Any, ...]:
    """Return (chart, words, have)."""
    from ampscope.analysis.policy import Settings

    ask = read_ask(data)
    if ask is None:
        return (no_update,) * 3
    sender = Sender(have)
    try:
        source, rank = open_source(store, ask)
        override = settings(ask)
        Settings(**override).check()
        verdict = store.prepared.of(source, PATIENCE)
        if verdict.value is None:
            words = verdict.problem or "The run's overflows are being read …"
            return sender.figure("chart", message(ask.theme, words)), sender.part("words", words, []), sender.state
        view = views.replay(verdict.value, override, ask.span)
    except ERRORS as error:
        return (
            sender.figure("chart", message(ask.theme, str(error))),
            sender.part("words", str(error), []),
            sender.state,
        )
    figure = figures.replay(view, ask.theme, f"{ask.run}/{rank}", narrow=ask.narrow, mark=ask.mark)
    return (
        sender.figure("chart", figure),
        sender.part("words", view.words, [*[html.P(w) for w in view.words], assumptions(view.assumptions)]),
        sender.state,
    )


def register(app: Dash, store: RunStore) -> None:
    """Add the callbacks."""

    def reply(data: Any, have: Any) -> tuple[Any, ...]:
        return answer(store, data, have)

    def reply_replay(data: Any, have: Any) -> tuple[Any, ...]:
        return replay(store, data, have)

    app.callback(
        Output("whatif-chart", "figure"), Output("whatif-layers", "figure"), Output("whatif-words", "children"),
        Output("whatif-table", "children"), Output("have-whatif", "data"), Input("ask-whatif", "data"), State("have-whatif", "data"),
        running=[(Output("busy", "data"), True, False)], prevent_initial_call=True,
    )(reply)  # fmt: skip
    app.callback(
        Output("replay-chart", "figure"), Output("replay-words", "children"), Output("have-replay", "data"),
        Input("ask-replay", "data"), State("have-replay", "data"),
        running=[(Output("busy", "data"), True, False)], prevent_initial_call=True,
    )(reply_replay)  # fmt: skip
