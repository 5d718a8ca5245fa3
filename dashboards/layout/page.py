"""The page: header, tabs, one panel a tab, the keyboard help, and the stores."""

from __future__ import annotations

from typing import Any

from dash import dcc, html

from . import panels
from .parts import act, dropdown

TABS = (
    ("overview", "Overview"),
    ("layers", "Layers"),
    ("events", "Events"),
    ("whatif", "What if"),
    ("compare", "Compare"),
    ("findings", "Findings"),
)
TICK_MS = 2000
"""Milliseconds between two looks at the log."""

KEYS = (
    ("1 … 6", "the tabs"),
    ("n, p", "next, previous event; every panel goes there"),
    ("[, ]", "previous, next layer"),
    ("/", "search"),
    ("f", "follow the newest steps"),
    ("k", "pause, go on"),
    ("r", "show all steps"),
    ("t", "theme: system, light, dark"),
    ("?", "this list"),
    ("Esc", "close it"),
)

ASKS = ("overview", "layers", "layer", "events", "whatif", "replay", "compare", "findings")
"""Stores `ask-NAME`: what the page asks of the server, written by its script only where the answer would differ."""

HAVE = ("poll", "overview", "layers", "layer", "events", "whatif", "replay", "compare", "findings")
"""Stores `have-NAME`: marks of what the page shows, so that the server sends only what differs."""


def page(options: list[dict[str, str]], run: str | None) -> html.Div:
    """Return the page.

    Args:
        options: the runs found, newest first.
        run: the run to show first.
    """
    return html.Div(
        [
            html.A("Skip to the charts", href="#main", className="skip-link"),
            _header(options, run),
            html.Nav(_tabs(), className="tabs", role="tablist", **{"aria-label": "Views"}),
            html.Div(
                [
                    html.Span(id="event-text"),
                    act("Previous", "event-step", "-1", title="Previous event (p)"),
                    act("Next", "event-step", "1", title="Next event (n)"),
                    act("Close", "event-close", title="Back to all steps"),
                ],
                id="event-bar", className="banner event", hidden=True, role="status",
            ),
            html.Div(id="offline", role="alert", hidden=True, className="banner"),
            html.Div(id="trouble", role="status", hidden=True, className="banner"),
            html.Main(
                [
                    html.Div(id="blank", hidden=bool(options)),
                    html.Div(
                        [
                            html.Div(
                                _panel(name, options),
                                id=f"panel-{name}", className="panel", role="tabpanel", hidden=name != "overview",
                                **{"aria-labelledby": f"tab-{name}"},
                            )
                            for name, _ in TABS
                        ],
                        id="panels", hidden=not options,
                    ),
                ],
                id="main", tabIndex="-1",
            ),
            _help(),
            *_state(),
        ],
        id="page",
    )  # fmt: skip


def _panel(name: str, options: list[dict[str, str]]) -> list[Any]:
    return panels.compare(options) if name == "compare" else list(getattr(panels, name)())


def _header(options: list[dict[str, str]], run: str | None) -> html.Header:
    return html.Header(
        [
            html.H1("ampscope"),
            html.Div(dropdown("run", options, run, placeholder="no run yet", searchable=True), className="run-pick"),
            html.Div(dropdown("rank", [{"value": 0, "label": "rank 0"}], 0), className="rank-pick", id="rank-box", hidden=True),
            html.Div(
                [html.Span(id="state", className="state"), html.Span(id="age", className="age")],
                className="life", role="status", **{"aria-live": "off"},
            ),
            html.Div(
                [
                    act("Pause", "pause", id="pause", title="Stop looking for new steps (k)", **{"aria-pressed": "false"}),
                    act("Follow", "follow", id="follow", title="Keep the newest steps in view (f)", **{"aria-pressed": "false"}),
                    act("All steps", "reset", id="reset", title="Show all steps (r)"),
                    act("CSV", "csv", title="Download what this tab shows as CSV"),
                    act("PNG", "png", title="Download the charts of this tab as PNG"),
                    act("Theme: system", "theme", id="theme", title="System, light, dark (t)"),
                    act("?", "help", title="Keys (?)", **{"aria-label": "Keyboard help"}),
                ],
                className="tools", role="toolbar", **{"aria-label": "Tools"},
            ),
        ]
    )  # fmt: skip


def _tabs() -> list[html.Button]:
    return [
        act(
            text, "tab", name, id=f"tab-{name}", className="tab", role="tab",
            **{"aria-selected": "true" if name == "overview" else "false", "aria-controls": f"panel-{name}"},
        )
        for name, text in TABS
    ]  # fmt: skip


def _help() -> html.Dialog:
    rows = [html.Tr([html.Th(html.Kbd(key)), html.Td(what)]) for key, what in KEYS]
    return html.Dialog(
        [html.H2("Keys"), html.Table(html.Tbody(rows)), act("Close", "close-help")],
        id="help",
        **{"aria-label": "Keyboard help"},
    )


def _state() -> list[Any]:
    return [
        dcc.Interval(id="tick", interval=TICK_MS),
        dcc.Store(id="view", data={}),
        dcc.Store(id="beat"),
        dcc.Store(id="version"),
        dcc.Store(id="status"),
        dcc.Store(id="busy", data=False),
        dcc.Store(id="control"),
        dcc.Store(id="csv-ask"),
        dcc.Store(id="ask-step"),
        dcc.Store(id="stepped"),
        dcc.Store(id="layer-rows"),
        *[
            dcc.Store(id=f"sink-{name}")
            for name in ("version", "status", "relayout", "rows", "click", "stepped", "column")
        ],
        dcc.Download(id="download"),
        *[dcc.Store(id=f"ask-{name}") for name in ASKS],
        *[dcc.Store(id=f"have-{name}") for name in HAVE],
    ]
