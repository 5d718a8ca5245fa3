"""Dashboard: plain data → plotly figures. Asserted on the figures' data, and on what plotly itself accepts."""

import json
import math

import numpy as np
import plotly.graph_objects as go
import pytest
from ampscope_dashboards.background import collect, prepare
from ampscope_dashboards.figures import compare as compare_figures
from ampscope_dashboards.figures import encode, metrics, theme
from ampscope_dashboards.figures import layer as layer_figures
from ampscope_dashboards.figures import layers as layers_figures
from ampscope_dashboards.figures import overview as overview_figures
from ampscope_dashboards.figures import whatif as whatif_figures
from ampscope_dashboards.figures.stack import BAD, Line, Panel, powers, stacked
from ampscope_dashboards.reader import RunStore
from ampscope_dashboards.views import compare, layer, layers, overview, whatif
from ampscope_dashboards.views.common import Range

from ampscope.record.step import Layer
from tests.helpers_log import make_layers, records, write_run

HOSTILE = "<img src=x onerror=alert(1)><b>\"'&amp;%{x}\n\x00end"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a run with an overflow, a NaN, two sessions, and a layer whose name is hostile."""
    path = tmp_path_factory.mktemp("logs")
    kinds = [*make_layers(5), Layer(HOSTILE, (64, 16), 1024, "float32", "Adam.0")]
    write_run(path, kinds, records(80, kinds, skip=[5], nan={30: 2}, growth_interval=12), name="run")
    write_run(path, kinds, records(40, kinds, first=60), name="run", step=60)
    return RunStore(path).source("run")


def every_figure(source, kind):
    """Return every figure of a theme."""
    view = layer.exponents(source, 0, 0, Range())
    pair = compare.compare([(source, 0), (source, 0)], "step")
    sweep = whatif.sweep(source, 0, collect(source.run), "fp16", 12)
    return {
        "overview": overview_figures.figure(overview.overview(source, 0, Range()), kind, "r"),
        "layers": layers_figures.figure(layers.layer_map(source, 0, "grad_norm", Range()), kind, "r", Range()),
        "lines": layer_figures.lines(layer.lines(source, 0, 5, Range()), kind, "r"),
        "exponents": layer_figures.exponents(view, kind, "r"),
        "histogram": layer_figures.histogram(view, kind, "r"),
        "compare": compare_figures.figure(pair, kind, "r"),
        "ratio": compare_figures.ratio(pair.ratios, kind, "r"),
        "whatif": whatif_figures.figure(sweep, kind, "r"),
        "windows": whatif_figures.layers(sweep, kind, "r"),
        "replay": whatif_figures.replay(whatif.replay(prepare(source.run), {"growth_interval": 5}, Range()), kind, "r"),
        "message": theme.message(kind, "empty"),
    }


@pytest.mark.parametrize("kind", ["light", "dark"])
def test_plotly_accepts_every_figure(source, kind):
    """Each is valid JSON without NaN literals, and every attribute is one plotly knows."""
    for figure in every_figure(source, kind).values():
        json.dumps(figure, allow_nan=False)
        go.Figure(figure)
        assert figure["layout"]["uirevision"]
        assert figure["layout"]["template"]["layout"]["paper_bgcolor"] == theme.PALETTES[kind].surface


def test_nothing_may_be_sent_to_a_cloud():
    """The configuration of every chart switches plotly's sharing off."""
    assert theme.CONFIG["showSendToCloud"] is False
    assert theme.CONFIG["plotlyServerURL"] == ""
    assert theme.CONFIG["displaylogo"] is False
    assert theme.CONFIG["displayNotifier"] is False


def luminance(color):
    """Return the relative luminance of "#rrggbb" (WCAG 2)."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("kind", ["light", "dark"])
def test_contrast_is_aa(kind):
    """Text 4.5 against its ground, marks 3."""
    p = theme.PALETTES[kind]

    def contrast(a, b):
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for ground in (p.surface, p.page):
        assert contrast(p.text, ground) >= 4.5
        assert contrast(p.muted, ground) >= 4.5
    for mark in (p.line, p.probe, p.good, p.skip, p.nan, p.inf, p.growth, p.session):
        assert contrast(mark, p.surface) >= 3, mark


def test_panels_share_one_x_axis_and_one_crosshair(source):
    """One x axis, several y domains, unified hover over all of them."""
    layout = every_figure(source, "light")["overview"]["layout"]
    assert layout["hoversubplots"] == "axis"
    assert layout["hovermode"] == "x unified"
    assert "xaxis2" not in layout
    domains = sorted(v["domain"] for k, v in layout.items() if k.startswith("yaxis") and "overlaying" not in v)
    assert len(domains) == 6
    assert all(a[1] < b[0] for a, b in zip(domains, domains[1:], strict=False))


def test_the_loss_scale_is_labelled_in_powers_of_two(source):
    """Ticks say 2^16, not 65.536k."""
    axis = every_figure(source, "light")["overview"]["layout"]["yaxis"]
    assert axis["type"] == "log"
    assert "2^16" in axis["ticktext"]
    for value, text in zip(axis["tickvals"], axis["ticktext"], strict=True):
        assert text == f"2^{round(math.log2(value))}"


@pytest.mark.parametrize("values", [[1.0], [2.0**-30, 2.0**100], [3.0, 5.0], [], [math.nan, 0.0, -1.0]])
def test_ticks_exist_for_any_scale(values):
    """Few, increasing, and around the values."""
    ticks = powers([np.array(values)])
    assert ticks["tickvals"] == sorted(ticks["tickvals"])
    assert 1 <= len(ticks["tickvals"]) <= 13


def test_events_are_one_trace_and_differ_by_shape(source):
    """All marks in one trace on a fixed 0–1 axis; a kind has its own symbol."""
    figure = every_figure(source, "light")["overview"]
    strips = [t for t in figure["data"] if t["name"] == "events"]
    assert len(strips) == 1
    symbols = dict(zip(strips[0]["y"], strips[0]["marker"]["symbol"], strict=True))
    assert len(set(symbols.values())) == len(symbols) >= 3
    assert not figure["layout"]["shapes"]


def test_values_that_are_no_number_are_marked():
    """NaN, +inf and −inf get marks of different shape at the panel's edge, on an axis of their own."""
    panel = Panel(
        "p",
        [Line("l", np.arange(3), np.array([1.0, np.nan, 2.0]), "#000000")],
        bad_x=np.array([1, 2, 2]),
        bad_kind=list(BAD),
    )
    figure = stacked([panel], "light", "r")
    bad = next(t for t in figure["data"] if t["name"].endswith("not finite"))
    assert bad["marker"]["symbol"] == list(BAD.values())
    assert bad["text"] == ["NAN", "+inf", "-inf"]
    assert figure["layout"][f"yaxis{bad['yaxis'][1:]}"]["range"] == [0, 1]


def test_a_session_break_and_the_chosen_step_are_drawn(source):
    """A session's first step is a line over all panels; the chosen step is one shape."""
    figure = overview_figures.figure(overview.overview(source, 0, Range()), "light", "r", mark=33)
    breaks = next(t for t in figure["data"] if t["name"] == "session start")
    assert breaks["x"] == [60.0, 60.0, None]
    assert [s["x0"] for s in figure["layout"]["shapes"]] == [33]


def test_a_zoom_is_kept_in_the_figure(source):
    """The range asked for is the one shown; without one the axis follows the data."""
    zoomed = overview_figures.figure(overview.overview(source, 0, Range(10.0, 20.0)), "light", "r")
    assert zoomed["layout"]["xaxis"]["range"] == [10.0, 20.0]
    assert every_figure(source, "light")["overview"]["layout"]["xaxis"]["autorange"] is True


def test_names_of_a_log_are_text(source):
    """Whatever a layer is called, plotly gets entities, never tags or templates."""
    for figure in every_figure(source, "light").values():
        raw = json.dumps(figure)
        assert "<img" not in raw
        assert '<b>\\"' not in raw
        for trace in figure["data"]:
            assert "%{x}\\n" not in json.dumps(trace.get("hovertemplate", ""))
    names = layers_figures.names(layers.layer_map(source, 0, "grad_norm", Range()))
    assert names[-1].startswith("&lt;img src=x onerror=alert(1)&gt;")
    assert encode.text("a\nb") == "a�b"


def test_rows_of_the_same_text_stay_apart(source):
    """A category axis would draw two rows of one name on top of each other."""
    view = layers.layer_map(source, 0, "grad_norm", Range())
    twice = layers.LayerMap(**{**view.__dict__, "rows": [view.rows[0]] * len(view.rows)})
    assert len(set(layers_figures.names(twice))) == len(view.rows)


def test_the_heatmap_has_fixed_colours_and_marks_what_is_no_number(source):
    """The range is the metric's own, not the run's; NaN cells are red and crossed, and say what they are."""
    view = layers.layer_map(source, 0, "grad_norm", Range())
    figure = layers_figures.figure(view, "light", "r", Range())
    heat, overlay, crosses, _ = figure["data"]
    assert (heat["zmin"], heat["zmax"], heat["zauto"]) == (1e-8, 1e4, False)
    z = encode.decode(heat["z"])
    assert z.shape == (6, 100)
    row = [r.label for r in view.rows].index("block.1.weight")
    assert heat["text"][row][30] == "NaN or inf"
    assert encode.decode(overlay["z"])[row, 30] == 2
    assert heat["y"][row] in crosses["y"]


@pytest.mark.parametrize("name", list(metrics.STYLES))
def test_colour_scales_rise_evenly(name):
    """Stops increase from 0 to 1; a log metric's middle colour is its geometric middle; the bad end is the bright one."""
    style = metrics.STYLES[name]
    scale = metrics.colorscale(style)
    stops = [s for s, _ in scale]
    assert stops[0] == 0
    assert stops[-1] == 1
    assert all(a <= b for a, b in zip(stops, stops[1:], strict=False))
    bright = scale[0][1] if style.reverse else scale[-1][1]
    assert bright == theme.CIVIDIS[-1]
    if style.log:
        middle = style.low + stops[len(stops) // 2] * (style.high - style.low)
        assert middle == pytest.approx(math.sqrt(style.low * style.high), rel=1e-6)


def test_every_metric_of_a_run_has_a_style(source):
    """A metric added to `Run` must get its words and range here."""
    assert set(metrics.STYLES) == set(source.run.metrics)


def test_the_exponent_picture_draws_fp16_s_limits(source):
    """Overflow at 2^16, bits lost below 2^-14, zero at 2^-25; for true gradients they lie log2(S) lower."""
    scaled = layer_figures.exponents(layer.exponents(source, 0, 0, Range()), "light", "r")
    levels = {t["name"]: t["y"][0] for t in scaled["data"] if t.get("name", "").startswith("FP16 ")}
    assert levels["FP16 overflows"] == pytest.approx(math.log2(65520))
    assert levels["FP16 loses bits"] == -14
    assert levels["FP16 becomes zero"] == -25
    true = layer_figures.exponents(layer.exponents(source, 0, 0, Range(), "true"), "light", "r")
    lower = {t["name"]: t["y"][0] for t in true["data"] if t.get("name", "").startswith("FP16 ")}
    assert lower["FP16 becomes zero"] == -25 - 16
    assert scaled["layout"]["yaxis"]["range"][0] <= -25


def test_the_histogram_colours_what_is_lost(source):
    """Bars below the flush limit, and of subnormals, differ from the others."""
    view = layer.exponents(source, 0, 0, Range())
    bars = layer_figures.histogram(view, "light", "r")["data"][0]
    p = theme.PALETTES["light"]
    for x, color in zip(encode.decode(bars["x"]).tolist(), bars["marker"]["color"], strict=True):
        k = math.floor(x)
        assert color == (p.nan if k < -25 else p.skip if k < -14 else p.line)


def test_compared_runs_differ_by_shape_too(source):
    """Each run has a colour and a symbol of its own."""
    figure = every_figure(source, "dark")["compare"]
    marks = [
        (t["marker"]["color"], t["marker"]["symbol"])
        for t in figure["data"]
        if t["mode"] == "markers" and isinstance(t["marker"]["symbol"], str)
    ]
    assert len(set(marks)) == 2
    assert len({symbol for _, symbol in marks}) == 2


@pytest.mark.parametrize(
    "values",
    [
        np.array([1.5, np.nan, np.inf, -np.inf]), np.array([1e300, 1.0]), np.array([1e-300, 1.0]), np.arange(6).reshape(2, 3),
        np.array([2**40]), np.array([], np.int64), np.array([1, 2], np.uint8), np.array([True, False]),
    ],
)  # fmt: skip
def test_arrays_survive_the_way_to_the_browser(values):
    """What was encoded decodes to the same numbers, NaN and inf included, and plotly reads the same."""
    got = encode.decode(encode.array(values))
    np.testing.assert_array_equal(got, np.asarray(values, got.dtype))
    assert got.shape == values.shape


def test_long_names_keep_both_ends():
    """A label is cut in its middle."""
    short = encode.shorten("encoder.layers.11.self_attention.out_proj.weight", 20)
    assert len(short) == 20
    assert short.startswith("encod")
    assert short.endswith("weight")
    assert encode.shorten("short", 20) == "short"


def test_clock_times_stay_apart():
    """Unix milliseconds a second apart are not made one by float32."""
    times = 1.8e12 + 1000.0 * np.arange(50)
    kept = encode.decode(encode.array(times))
    assert len(np.unique(kept)) == 50
    assert np.array_equal(kept, times)


def test_a_short_log_axis_writes_its_ticks_in_full():
    """Plotly's own ticks would label 20 as a small "2"."""
    panel = Panel("p", [Line("l", np.arange(3), np.array([4.0, 11.0, 30.0]), "#000000")], scale="log10")
    texts = stacked([panel], "light", "r")["layout"]["yaxis"]["ticktext"]
    assert {"5", "10", "20"} <= set(texts)


def test_zeros_on_a_log_axis_are_marked_and_not_a_plunge():
    """A gradient norm of zero has a mark at the lower edge; the line has a gap there."""
    panel = Panel("p", [Line("l", np.arange(4), np.array([1.0, 0.0, 0.0, 2.0]), "#000000")], scale="log10")
    data = stacked([panel], "light", "r")["data"]
    assert np.isnan(encode.decode(data[0]["y"])[1:3]).all()
    marks = next(t for t in data if t["name"].endswith("not finite"))
    assert encode.decode(marks["x"]).tolist() == [1, 2]
    assert marks["text"] == ["0", "0"]
