"""The compare tab."""

from __future__ import annotations

from typing import Any, cast

from dash import Dash, Input, Output, State, html, no_update

from ..figures import compare as figures
from ..figures.theme import message
from ..reader import RunStore
from ..source import Source
from ..views import compare as views
from .common import ERRORS, Ask, Sender, read_ask


def chosen(ask: Ask) -> list[str]:
    """Return the runs to compare: those chosen, with the one in view first where none or only others were."""
    return list(dict.fromkeys([*ask.texts("cmp"), ask.run] if ask.run not in ask.texts("cmp") else ask.texts("cmp")))[
        : views.MOST
    ]


def answer(store: RunStore, data: Any, have: Any) -> tuple[Any, ...]:
    """Return (chart, ratio chart, words, table, note of the ratios, have)."""
    ask = read_ask(data)
    if ask is None:
        return (no_update,) * 6
    sender = Sender(have)
    sources: list[tuple[Source, int]] = []
    problems: list[str] = []
    for key in chosen(ask):
        try:
            source = store.refresh(key)
            ranks = source.run.ranks or [0]
            sources.append((source, ask.rank if ask.rank in ranks else ranks[0]))
        except ERRORS as error:
            problems.append(str(error))
    align = cast(views.Align, ask.choice("align", ("step", "relative", "wall"), "step"))
    try:
        view = views.compare(sources, align)
    except ERRORS as error:
        view, problems = views.Comparison([], align, [], [], []), [*problems, str(error)]
    names = [run.name for run in view.runs]
    words = [*view.words, *problems]
    chart = (
        figures.figure(view, ask.theme, f"{names}/{align}", narrow=ask.narrow)
        if names
        else message(ask.theme, "No run to compare.")
    )
    ratios = (
        figures.ratio(view.ratios, ask.theme, f"{names}", label=16 if ask.narrow else 36)
        if view.ratios
        else message(ask.theme, "Choose two runs that have layers of the same name.")
    )
    left_out = max(0, len(view.ratios[0].layers) - figures.LAYERS) if view.ratios else 0
    note = f"{left_out:,} further layers are left out." if left_out else ""
    return (
        sender.figure("chart", chart),
        sender.figure("ratio", ratios),
        sender.part("words", words, [html.P(w) for w in words]),
        sender.part("table", [names, view.rows], table(names, view.rows)),
        sender.part("note", note, note),
        sender.state,
    )


def table(names: list[str], rows: list[tuple[str, list[str]]]) -> Any:
    """Return the table of the runs."""
    if not names:
        return []
    head = html.Thead(html.Tr([html.Th(""), *[html.Th(n) for n in names]]))
    return html.Table(
        [head, html.Tbody([html.Tr([html.Th(name), *[html.Td(v) for v in values]]) for name, values in rows])]
    )


def register(app: Dash, store: RunStore) -> None:
    """Add the callback."""

    def reply(data: Any, have: Any) -> tuple[Any, ...]:
        return answer(store, data, have)

    app.callback(
        Output("compare-chart", "figure"), Output("compare-ratio", "figure"), Output("compare-words", "children"),
        Output("compare-table", "children"), Output("ratio-note", "children"), Output("have-compare", "data"),
        Input("ask-compare", "data"), State("have-compare", "data"),
        running=[(Output("busy", "data"), True, False)], prevent_initial_call=True,
    )(reply)  # fmt: skip
