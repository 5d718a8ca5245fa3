"""The six panels, as they are before the server has answered."""

from __future__ import annotations

from typing import Any

from dash import dcc, html

from ..figures.metrics import STYLES
from .parts import act, card, choice, dropdown, field, graph


def overview() -> list[Any]:
    """Return the overview."""
    return [
        html.Div(id="health", className="health", role="status"),
        html.Div(id="tiles", className="tiles"),
        card(
            "How did the training go?",
            "All panels share the step axis and one crosshair. Drag to zoom, double-click for all steps. A vertical line is a restart.",
            html.P(id="overview-note", className="note"),
            graph("overview-chart", "Loss scale, events, loss, gradient norm, underflow and step time over the steps"),
        ),
    ]


def layers() -> list[Any]:
    """Return the heatmap of layers, and the layer that was clicked."""
    metrics = [{"value": key, "label": f"{style.title}: {style.hint}"} for key, style in STYLES.items()]
    groups = [
        {"value": "auto", "label": "automatic"},
        {"value": "none", "label": "single parameters"},
        {"value": "module", "label": "modules"},
        {"value": "top", "label": "blocks"},
    ]
    controls = [
        field("Metric", dropdown("metric", metrics, "underflow_ratio"), "wide"),
        field("Rows", dropdown("group", groups, "auto")),
        field("Order", choice("order", [("network", "network"), ("worst", "worst first")], "network")),
        field(
            "Search",
            dcc.Input(id="q", type="search", placeholder="words, or re:pattern", debounce=0.3, value=""),
            "search",
        ),
    ]
    detail = html.Div(
        [
            card(
                "What happens in this layer?",
                "Its curves over the steps in view. Where a point joins several steps, least and greatest are drawn.",
                html.Div(
                    [
                        field(
                            "Layer", dropdown("layer", [], None, placeholder="choose a layer", searchable=True), "wide"
                        ),
                        act("Previous", "layer-step", "-1", title="Previous layer ([)"),
                        act("Next", "layer-step", "1", title="Next layer (])"),
                    ],
                    className="controls",
                ),
                html.P("Click a row of the heatmap, or choose one here.", id="layer-note", className="note"),
                html.Div(graph("layer-lines", "Curves of the chosen layer"), id="layer-curves", hidden=True),
                id="layer-card",
            ),
            html.Div(
                card(
                    "Where do its gradients lie in FP16?",
                    "Each column is a histogram of magnitudes; colour is the share of the layer's elements. What lies in the red zone "
                    "becomes zero, what crosses the upper line overflows.",
                    html.Div(
                        [
                            field(
                                "Gradients",
                                choice("grad", [("scaled", "scaled, as FP16 holds them"), ("true", "true")], "scaled"),
                            )
                        ],
                        className="controls",
                    ),
                    html.P(id="exponents-note", className="note"),
                    graph("layer-exponents", "Exponents of the chosen layer over time"),
                    html.H3("The step under the cursor", id="histogram-title"),
                    graph("layer-histogram", "Histogram of exponents at one step"),
                ),
                id="layer-picture",
                hidden=True,
            ),
        ],
        id="layer-detail",
    )
    return [
        card(
            "Which layers are in trouble, and when?",
            "Worst value of each cell; brighter is worse. Red with a cross: NaN or inf. Grey: no gradient. Click a row for its details; "
            "a folded module opens.",
            html.Div(controls, className="controls"),
            html.P(id="layers-note", className="note"),
            html.Div(id="opened", className="chips"),
            graph("layers-chart", "Heatmap of layers by steps"),
            html.Details([html.Summary("The rows as a list"), html.Div(id="rows", className="rows")]),
        ),
        detail,
    ]


def events() -> list[Any]:
    """Return the list of events."""
    kinds = [
        {"value": "skip", "label": "skipped"},
        {"value": "nonfinite", "label": "NaN, inf"},
        {"value": "growth", "label": "growth"},
        {"value": "backoff", "label": "backoff"},
        {"value": "session", "label": "session"},
        {"value": "settings", "label": "settings"},
        {"value": "note", "label": "note"},
    ]
    return [
        card(
            "What happened, where, and who is to blame?",
            "Every skipped step and every NaN or inf. Choose one and all charts go to its step; n and p step through them.",
            html.Div(
                [
                    field(
                        "Show",
                        dcc.Checklist(
                            id="kinds", options=kinds, value=["skip", "nonfinite"], inline=True, className="choice"
                        ),
                        "all",
                    ),
                    field(
                        "Search",
                        dcc.Input(id="evq", type="search", placeholder="layer, op, rank 0 …", debounce=0.3, value=""),
                        "search",
                    ),
                    field("Order", choice("evorder", [("old", "oldest first"), ("new", "newest first")], "old")),
                ],
                className="controls",
            ),
            html.Div(
                [
                    act("Previous", "event-step", "-1", title="Previous event (p)", id="event-previous"),
                    act("Next", "event-step", "1", title="Next event (n)", id="event-next"),
                    html.Span(id="events-note", className="note"),
                ],
                className="controls",
            ),
            html.Div(id="event-detail", className="detail", role="status"),
            html.Div(id="events-table", className="table"),
        )
    ]


def whatif() -> list[Any]:
    """Return the question what another scale or format would do, and the replay of other scaler settings."""
    formats = [("fp16", "FP16"), ("bf16", "BF16"), ("fp8_e4m3", "FP8 E4M3"), ("fp8_e5m2", "FP8 E5M2")]
    marks = {k: f"2^{k}" for k in range(-8, 33, 8)}
    slider = dcc.Slider(
        id="scale", min=-8, max=32, step=1, value=16, marks=marks, included=False, allow_direct_input=False
    )
    number = {"type": "number", "debounce": 0.4, "inputMode": "numeric"}
    replay = [
        field("Initial scale, 2^", dcc.Input(id="r_init", min=-24, max=40, step=1, value=16, **number)),
        field("Growth factor", dcc.Input(id="r_growth", min=1.0, max=16, step="any", value=2.0, **number)),
        field("Backoff factor", dcc.Input(id="r_backoff", min=0.01, max=0.99, step="any", value=0.5, **number)),
        field("Growth interval", dcc.Input(id="r_interval", min=1, max=1_000_000, step=1, value=2000, **number)),
    ]
    return [
        card(
            "What would another loss scale or format do?",
            "Computed from the recorded histograms: share of the gradient's elements that would be flushed to zero, and that would "
            "overflow. The green zone is the window of good scales.",
            html.Div([field("Format", choice("fmt", formats, "fp16"))], className="controls"),
            html.Div([field("Loss scale, as a power of two", slider, "slider")], className="controls"),
            html.Div(id="whatif-words", className="words", role="status"),
            graph("whatif-chart", "Flushed and overflowing share by loss scale"),
            html.H3("Which scales suit each layer? Worst first; a cross: none does."),
            graph("whatif-layers", "Window of good loss scales, a layer a row"),
            html.Div(id="whatif-table", className="table"),
        ),
        card(
            "Would other scaler settings have done better?",
            "The recorded gradients, played through GradScaler's rule with these settings. It assumes that training itself would "
            "have gone the same way.",
            html.Div(replay, className="controls"),
            html.Div(id="replay-words", className="words", role="status"),
            graph("replay-chart", "Recorded and replayed loss scale"),
        ),
    ]


def compare(options: list[dict[str, str]]) -> list[Any]:
    """Return the runs side by side; `options`: the runs found (a dropdown drops values that are not among its options)."""
    align = [("step", "step"), ("relative", "time since start"), ("wall", "clock time")]
    return [
        card(
            "How do the runs differ?",
            "The first run chosen is what the others are measured against. Lines differ in their marks as well as in colour.",
            html.Div(
                [
                    field("Runs", dcc.Dropdown(id="cmp", options=options, value=[], multi=True, maxHeight=360), "wide"),
                    field("Align by", choice("align", align, "step")),
                ],
                className="controls",
            ),
            html.Div(id="compare-words", className="words", role="status"),
            html.Div(id="compare-table", className="table"),
            graph("compare-chart", "Loss, loss scale and step time of the runs"),
        ),
        card(
            "Do the layers' gradients differ?",
            "Gradient norm over that of the first run, a layer a row, the largest difference on top: ×1 is equal. Median over the steps "
            "that both runs made, as ampscope compare prints it.",
            html.P(id="ratio-note", className="note"),
            graph("compare-ratio", "Gradient norm ratio by layer"),
        ),
    ]


def findings() -> list[Any]:
    """Return the diagnosis."""
    return [
        card(
            "What is wrong, and what to change?",
            "Most important first; what follows from a root cause is not listed again. Each has a link to its evidence.",
            html.Div(id="findings-list", className="findings", role="status"),
        )
    ]
