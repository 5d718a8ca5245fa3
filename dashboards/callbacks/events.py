"""The events tab, and stepping from event to event in every tab."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, html, no_update

from ..layout.parts import act
from ..reader import RunStore
from ..views import events as views
from ..views.common import Range
from .common import ERRORS, Ask, Sender, open_source, read_ask

HEAD = ("Step", "What", "Phase", "Layer", "Op", "Where", "Rank", "Message")
AROUND = 100
"""Steps shown around an event where the view is not zoomed in already."""


def answer(store: RunStore, data: Any, have: Any) -> tuple[Any, ...]:
    """Return (note, table, detail, have)."""
    ask = read_ask(data)
    if ask is None:
        return (no_update,) * 4
    sender = Sender(have)
    try:
        source, _ = open_source(store, ask)
        view = _view(ask, source, int(ask.number("page") or 0), ask.text("event") or None)
    except ERRORS as error:
        return str(error), [], [], sender.state
    return (
        sender.part("note", note(view), note(view)),
        sender.part("table", repr((view.items, view.page, view.pages, view.chosen)), table(view)),
        sender.part("detail", repr(view.chosen), detail(view.chosen)),
        sender.state,
    )


def _view(ask: Ask, source: Any, page: int, chosen: str | None) -> views.EventList:
    kinds = [k for k in ask.texts("kinds") if k in views.KIND_WORDS]
    return views.event_list(
        source, kinds, ask.text("evq"), newest_first=ask.text("evorder") == "new", page=page, chosen=chosen
    )


def note(view: views.EventList) -> str:
    """Return how many there are."""
    words = f"{view.matched:,} of {view.total:,} events" + (f", number {view.place:,} chosen" if view.place else "")
    return f"{words}; {view.problem}" if view.problem else words


def table(view: views.EventList) -> list[Any]:
    """Return the page of events as a table, with buttons for the other pages."""
    if not view.items:
        return [
            html.P(
                "No event matches." if view.total else "Nothing was skipped, and nothing was NaN or inf.",
                className="note",
            )
        ]
    body = [_line(item, view.chosen is not None and item.id == view.chosen.id) for item in view.items]
    parts: list[Any] = [
        html.Table([html.Thead(html.Tr([html.Th(h) for h in HEAD])), html.Tbody(body)], className="cards")
    ]
    if view.pages > 1:
        parts.append(
            html.Div(
                [
                    act("First", "page", "0", disabled=view.page == 0),
                    act("Back", "page", str(view.page - 1), disabled=view.page == 0),
                    html.Span(f"page {view.page + 1:,} of {view.pages:,}", className="note"),
                    act("On", "page", str(view.page + 1), disabled=view.page == view.pages - 1),
                    act("Last", "page", str(view.pages - 1), disabled=view.page == view.pages - 1),
                ],
                className="controls",
            )
        )
    return parts


def _line(item: views.Item, chosen: bool) -> html.Tr:
    e = item.event
    layer = e.layers[0] + (f" + {len(e.layers) - 1} more" if len(e.layers) > 1 else "") if e.layers else ""
    at = act(f"{e.step:,}", "event", item.id, className="link", title="Show this step on every chart")
    told: list[tuple[Any, str]] = [
        (at, "brief"), (views.KIND_WORDS.get(e.kind, e.kind), f"brief kind-{e.kind}"), ("" if e.phase == "none" else e.phase, "brief"),
        (layer, "free"), ("" if e.op == "-" else e.op, ""), (e.where, ""), (str(e.rank), "brief"), (e.message, "free"),
    ]  # fmt: skip
    # on a phone a row is a card: each cell says what it is, and empty ones are left out
    cells = [
        html.Td(value, className=f"{kind} none" if value == "" else kind, **{"data-label": name})
        for name, (value, kind) in zip(HEAD, told, strict=True)
    ]
    return html.Tr(cells, className="chosen" if chosen else "", **({"aria-current": "true"} if chosen else {}))


def detail(item: views.Item | None) -> list[Any]:
    """Return what is known of the chosen event."""
    if item is None:
        return []
    pairs = [part for name, value in views.facts(item.event) for part in (html.Dt(name), html.Dd(value))]
    buttons = [act("Show its layer", "layer", item.event.layers[0])] if item.event.layers else []
    buttons += [act("Show the curves", "tab", "overview")]
    return [html.Dl(pairs), html.Div(buttons, className="controls")]


def step(store: RunStore, data: Any) -> Any:
    """Return the event next to (or named by) the chosen one: its id, step, the range to show and one line about it."""
    ask = read_ask(data)
    if ask is None:
        return no_update
    by, event = int(ask.number("by") or 0), ask.text("event") or None
    try:
        source, _ = open_source(store, ask)
        view = _view(ask, source, -1, event)
        if by and view.chosen is not None and view.place:
            wanted = view.next if by > 0 else view.previous
            view = _view(ask, source, -1, wanted or view.chosen.id)
        elif by:
            found, _ = views.matching(source, [k for k in ask.texts("kinds") if k in views.KIND_WORDS], ask.text("evq"))
            if not found:
                return {"id": None, "text": "No event of the kinds chosen on the Events tab."}
            view = _view(ask, source, -1, (found[0] if by > 0 else found[-1]).id)
    except ERRORS as error:
        return {"id": None, "text": str(error)}
    if view.chosen is None:
        return {"id": None, "text": "That event is not in this run."}
    e = view.chosen.event
    place = f" ({view.place:,} of {view.matched:,})" if view.place else ""
    text = f"{views.KIND_WORDS.get(e.kind, e.kind)} at step {e.step:,}{place}: {e.message}"
    return {
        "id": view.chosen.id,
        "step": e.step,
        "range": around(e.step, ask.span, int(source.steps[0]) if len(source.steps) else 0),
        "text": text,
    }


def around(step: int, span: Range, first: int = 0) -> list[float]:
    """Return the range that shows a step and begins no earlier than the `first`: as wide as the one in view where that is narrow, else `AROUND` steps."""
    width = AROUND if span.low is None or span.high is None else min(span.high - span.low, 4 * AROUND)
    low = max(step - width / 2, first - 1.0)
    return [round(low, 2), round(low + width, 2)]


def register(app: Dash, store: RunStore) -> None:
    """Add the callbacks."""

    def reply(data: Any, have: Any) -> tuple[Any, ...]:
        return answer(store, data, have)

    def reply_step(data: Any) -> Any:
        return step(store, data)

    app.callback(
        Output("events-note", "children"), Output("events-table", "children"), Output("event-detail", "children"),
        Output("have-events", "data"), Input("ask-events", "data"), State("have-events", "data"),
        running=[(Output("busy", "data"), True, False)], prevent_initial_call=True,
    )(reply)  # fmt: skip
    app.callback(Output("stepped", "data"), Input("ask-step", "data"), prevent_initial_call=True)(reply_step)
