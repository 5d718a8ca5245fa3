"""Building blocks of the page."""

from __future__ import annotations

from typing import Any

from dash import dcc, html

from ..figures.theme import CONFIG, waiting


def card(title: str, hint: str, *children: Any, id: str = "", className: str = "") -> html.Section:
    """Return a card: its title is the question it answers, then one grey line on how to read it."""
    head = [html.H2(title), html.P(hint, className="hint")]
    extra = {"id": id} if id else {}
    return html.Section([*head, *children], className=f"card {className}".strip(), **extra)


def graph(id: str, label: str) -> html.Div:
    """Return a chart that is empty until the server answers."""
    chart = dcc.Graph(id=id, figure=waiting(), config=CONFIG, className="chart")
    return html.Div(chart, role="group", className="chart-box", **{"aria-label": label})


def field(label: str, control: Any, className: str = "") -> html.Div:
    """Return a control under its label."""
    name = html.Span(label, className="label", id=f"label-{getattr(control, 'id', label)}")
    return html.Div(
        [name, control], className=f"field {className}".strip(), role="group", **{"aria-labelledby": name.id}
    )


def choice(id: str, options: list[tuple[str, str]], value: str) -> dcc.RadioItems:
    """Return a row of radio buttons."""
    items = [{"value": v, "label": text} for v, text in options]
    return dcc.RadioItems(id=id, options=items, value=value, inline=True, className="choice")


def dropdown(id: str, options: list[Any], value: Any, **extra: Any) -> dcc.Dropdown:
    """Return a dropdown that always holds a value."""
    return dcc.Dropdown(id=id, options=options, value=value, clearable=False, maxHeight=360, **extra)


def act(
    label: Any, action: str, arg: str = "", *, title: str = "", className: str = "act", **extra: Any
) -> html.Button:
    """Return a button whose click the page's script handles: `action` with `arg` (one listener serves every button)."""
    data: dict[str, Any] = {"data-act": action, "data-arg": arg}
    if title:
        data["title"] = title
    return html.Button(label, type="button", className=className, **data, **extra)


def notice(title: str, *lines: Any, command: str = "", className: str = "notice") -> html.Div:
    """Return an empty or error state: what it is, why, and the command that helps."""
    body: list[Any] = [html.H2(title), *[html.P(line) for line in lines]]
    if command:
        body.append(html.Pre(command))
    return html.Div(body, className=className, role="status")
