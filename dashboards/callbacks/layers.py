"""The layers tab: the heatmap, and the layer that was chosen."""

from __future__ import annotations

from typing import Any, cast

from dash import Dash, Input, Output, State, html, no_update

from ..figures import layer as layer_figures
from ..figures import layers as figures
from ..figures.metrics import STYLES
from ..figures.theme import message
from ..layout.parts import act
from ..reader import RunStore
from ..views import layer as layer_views
from ..views import layers as views
from ..views.common import number, percent
from .common import ERRORS, Ask, Sender, open_source, read_ask


def answer(store: RunStore, data: Any, have: Any) -> tuple[Any, ...]:
    """Return (chart, note, opened modules, list of rows, rows for the script, options of the layer control, have)."""
    ask = read_ask(data)
    if ask is None:
        return (no_update,) * 7
    sender = Sender(have)
    metric = ask.choice("metric", STYLES, "underflow_ratio")
    try:
        source, rank = open_source(store, ask)
        if not len(source.steps):
            return (
                sender.figure("chart", message(ask.theme, "No step is recorded yet.")),
                "",
                [],
                [],
                [],
                [],
                sender.state,
            )
        view = source.cached(("layers", rank, metric, ask.span, *_how(ask)), lambda: view_of(ask, source, rank, metric))
    except ERRORS as error:
        return (
            sender.figure("chart", message(ask.theme, "This run cannot be read.")),
            str(error),
            [],
            [],
            [],
            [],
            sender.state,
        )
    if view.rows and view.values.shape[1]:
        figure = figures.figure(
            view, ask.theme, f"{ask.run}/{rank}/{metric}/{ask.text('order')}", ask.span,
            selected=ask.text("layer"), mark=ask.mark, narrow=ask.narrow,
        )  # fmt: skip
    else:
        figure = message(ask.theme, "No layer matches." if not view.matched else "Nothing was recorded in these steps.")
    rows = [[name, row.key, row.is_group] for name, row in zip(figures.names(view), view.rows, strict=True)]
    names = [layer.name for layer in source.layers]
    table = [(row.label, row.key, row.is_group, row.worst, row.bad) for row in view.rows]
    return (
        sender.figure("chart", figure),
        sender.part("note", note(view), note(view)),
        sender.part("opened", view.opened, [act(f"fold {m} ×", "fold", m, className="chip") for m in view.opened]),
        sender.part("table", [table, metric], row_list(view)),
        sender.part("rows", rows, rows),
        sender.part("names", names, names),
        sender.state,
    )


def _how(ask: Ask) -> tuple[Any, ...]:
    return ask.text("order"), ask.text("group"), ask.text("q"), tuple(ask.texts("open"))


def view_of(ask: Ask, source: Any, rank: int, metric: str) -> views.LayerMap:
    """Return the heatmap that a browser asks for."""
    return views.layer_map(
        source, rank, metric, ask.span,
        order=cast(views.Order, ask.choice("order", ("network", "worst"), "network")),
        group=cast(views.Group, ask.choice("group", ("auto", "none", "module", "top"), "auto")),
        query=ask.text("q"), opened=ask.texts("open"),
    )  # fmt: skip


def note(view: views.LayerMap) -> str:
    """Return what has to be said of the heatmap: what was left out, what is not read yet."""
    said = (
        [f"{view.matched:,} of {view.total:,} parameters"]
        if view.matched != view.total
        else [f"{view.total:,} parameters"]
    )
    if view.left_out:
        said.append(f"{view.left_out:,} rows are left out: search, or let rows be modules")
    if any(row.is_group for row in view.rows):
        said.append("a folded module shows its worst layer; click it to unfold")
    if view.done < 1:
        said.append(f"still reading: {100 * view.done:.0f} % of the run")
    if view.problem:
        said.append(view.problem)
    return "; ".join(said) + "."


def row_list(view: views.LayerMap) -> html.Table:
    """Return the rows as a table of buttons, for the keyboard and for screen readers."""
    style = STYLES[view.metric]
    head = html.Thead(html.Tr([html.Th("Row"), html.Th(f"Worst {style.title.lower()}"), html.Th("Not finite")]))
    body = []
    for row in view.rows:
        worst = "none" if row.worst != row.worst else percent(row.worst) if style.share else number(row.worst)
        button = act(row.label, "fold" if row.is_group else "layer", row.key, className="link")
        body.append(html.Tr([html.Td(button), html.Td(worst), html.Td(f"✕ {row.bad}" if row.bad else "")]))
    return html.Table([head, html.Tbody(body)])


def detail(store: RunStore, data: Any, have: Any) -> tuple[Any, ...]:
    """Return (curves, exponents, histogram, note, note of the exponents, title of the histogram, have)."""
    ask = read_ask(data)
    if ask is None:
        return (no_update,) * 7
    sender = Sender(have)
    grad = cast(layer_views.View, ask.choice("grad", ("scaled", "true"), "scaled"))
    try:
        source, rank = open_source(store, ask)
        index = layer_views.require(source, ask.text("layer"))
        lines = source.cached(
            ("layer", rank, index, ask.span), lambda: layer_views.lines(source, rank, index, ask.span)
        )
        picture = source.cached(
            ("picture", rank, index, ask.span, grad), lambda: layer_views.exponents(source, rank, index, ask.span, grad)
        )
    except ERRORS as error:
        empty = message(ask.theme, "Nothing to show.")
        return (
            sender.figure("lines", empty),
            sender.figure("picture", empty),
            sender.figure("bars", empty),
            str(error),
            "",
            "",
            sender.state,
        )
    revision = f"{ask.run}/{rank}/{index}"
    layer = source.layers[index]
    about = f"{layer.name}: {' × '.join(map(str, layer.shape)) or 'scalar'}, {layer.numel:,} elements, {layer.dtype}"
    about += f", held by {layer.optimizer}." if layer.optimizer else "."
    if lines.done < 1:
        about += f" Still reading: {100 * lines.done:.0f} % of the run."
    if picture is None:
        empty = message(
            ask.theme, "No histogram was recorded in these steps (watch(exponents_every=…) sets how often)."
        )
        pictures, words, title = (empty, empty), "", ""
    else:
        pictures = (
            layer_figures.exponents(picture, ask.theme, f"{revision}/{grad}", mark=ask.mark, narrow=ask.narrow),
            layer_figures.histogram(picture, ask.theme, f"{revision}/{grad}"),
        )
        words = (
            f"A column joins up to {picture.every} histograms." if picture.every > 1 else "A column is one histogram."
        )
        title = f"Step {int(picture.steps[-1]):,}"
    return (
        sender.figure("lines", layer_figures.lines(lines, ask.theme, revision, mark=ask.mark, narrow=ask.narrow)),
        sender.figure("picture", pictures[0]),
        sender.figure("bars", pictures[1]),
        sender.part("about", about, about),
        sender.part("words", words, words),
        sender.part("title", title, title),
        sender.state,
    )


def register(app: Dash, store: RunStore) -> None:
    """Add the callbacks."""

    def reply(data: Any, have: Any) -> tuple[Any, ...]:
        return answer(store, data, have)

    def reply_detail(data: Any, have: Any) -> tuple[Any, ...]:
        return detail(store, data, have)

    app.callback(
        Output("layers-chart", "figure"), Output("layers-note", "children"), Output("opened", "children"), Output("rows", "children"),
        Output("layer-rows", "data"), Output("layer", "options"), Output("have-layers", "data"),
        Input("ask-layers", "data"), State("have-layers", "data"),
        running=[(Output("busy", "data"), True, False)], prevent_initial_call=True,
    )(reply)  # fmt: skip
    app.callback(
        Output("layer-lines", "figure"), Output("layer-exponents", "figure"), Output("layer-histogram", "figure"),
        Output("layer-note", "children"), Output("exponents-note", "children"), Output("histogram-title", "children"),
        Output("have-layer", "data"), Input("ask-layer", "data"), State("have-layer", "data"),
        running=[(Output("busy", "data"), True, False)], prevent_initial_call=True,
    )(reply_detail)  # fmt: skip
