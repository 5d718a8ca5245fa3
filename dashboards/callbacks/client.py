"""Callbacks that the browser answers by itself (`assets/app.js`)."""

from __future__ import annotations

from dash import ClientsideFunction, Dash, Input, Output, State

CONTROLS = (
    "run", "rank", "metric", "group", "order", "q", "layer", "grad", "kinds", "evq", "evorder", "fmt", "scale", "r_init",
    "r_growth", "r_backoff", "r_interval", "cmp", "align",
)  # fmt: skip
"""The controls, in the order in which `control` of assets/app.js takes their values (a test compares the two)."""
ZOOMABLE = ("overview-chart", "layers-chart", "layer-lines", "layer-exponents", "replay-chart")
"""Charts whose x axis is the step: zooming one zooms them all."""


def register(app: Dash) -> None:
    """Add the callbacks."""

    def client(name: str, output: Output, *inputs: Input | State) -> None:
        app.clientside_callback(ClientsideFunction("ampscope", name), output, *inputs)

    client("control", Output("control", "data"), *[Input(name, "value") for name in CONTROLS])
    client("beat", Output("beat", "data"), Input("tick", "n_intervals"), Input("view", "data"), State("busy", "data"))
    client("version", Output("sink-version", "data"), Input("version", "data"))
    client("status", Output("sink-status", "data"), Input("status", "data"))
    client("relayout", Output("sink-relayout", "data"), *[Input(name, "relayoutData") for name in ZOOMABLE])
    client("rows", Output("sink-rows", "data"), Input("layer-rows", "data"))
    client("clickRow", Output("sink-click", "data"), Input("layers-chart", "clickData"))
    client("stepped", Output("sink-stepped", "data"), Input("stepped", "data"))
    client("column", Output("sink-column", "data"), Input("layer-exponents", "hoverData"))
