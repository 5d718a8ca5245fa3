"""The findings tab."""

from __future__ import annotations

import json
from typing import Any

from dash import Dash, Input, Output, State, html, no_update

from ..background import PATIENCE
from ..layout.parts import act, notice
from ..reader import RunStore
from ..views import findings as views
from .common import ERRORS, Sender, open_source, read_ask


def answer(store: RunStore, data: Any, have: Any) -> tuple[Any, ...]:
    """Return (list of findings, have)."""
    ask = read_ask(data)
    if ask is None:
        return no_update, no_update
    sender = Sender(have)
    try:
        source, _ = open_source(store, ask)
    except ERRORS as error:
        return [html.P(str(error))], sender.state
    verdict = store.diagnosis.of(source, PATIENCE)
    if verdict.value is None:
        words = f"No diagnosis: {verdict.problem}" if verdict.problem else "The diagnosis is under way …"
        return sender.part("list", words, [html.P(words, className="note")]), sender.state
    cards = views.cards(verdict.value)
    if not cards:
        shown: list[Any] = [notice("Nothing found", "No rule found a fault in this run.", className="notice good")]
    else:
        shown = [finding(c) for c in cards]
    return sender.part("list", repr(cards), shown), sender.state


def finding(c: views.Card) -> html.Article:
    """Return one finding: what, where, the evidence, the remedy, a link to the chart that shows it."""
    body: list[Any] = [
        html.H3([html.Span(c.sign, className=f"sign {c.severity}"), " ", c.title]),
        html.P(["Rule ", html.Code(c.rule)], className="hint"),
    ]
    if c.remedy:
        body.append(html.P([html.Strong("Change: "), c.remedy], className="remedy"))
    for title, pairs in (("Where", c.facts), ("Evidence", c.evidence)):
        if pairs:
            body += [html.H4(title), html.Dl([part for k, v in pairs for part in (html.Dt(k), html.Dd(v))])]
    if c.link is not None:
        target: dict[str, Any] = {"tab": c.link.tab, "range": c.link.span, "follow": False}
        if c.link.tab == "layers":
            target |= {"metric": c.link.metric, "layer": c.link.layer or None, "order": "worst"}
        body.append(act(c.link.words, "link", json.dumps(target), className="link"))
    return html.Article(body, className=f"finding {c.severity}")


def register(app: Dash, store: RunStore) -> None:
    """Add the callback."""

    def reply(data: Any, have: Any) -> tuple[Any, ...]:
        return answer(store, data, have)

    app.callback(
        Output("findings-list", "children"), Output("have-findings", "data"),
        Input("ask-findings", "data"), State("have-findings", "data"), prevent_initial_call=True,
    )(reply)  # fmt: skip
