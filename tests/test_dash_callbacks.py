"""Dashboard: callbacks, called directly with what a browser would send.

One file: a tab a section, over the same made run.
"""

import csv
import io
import json
import re
from pathlib import Path

import ampscope_dashboards
import numpy as np
import pytest
from ampscope_dashboards.app import create_app
from ampscope_dashboards.callbacks import (
    client,
    common,
    compare,
    events,
    export,
    findings,
    layers,
    overview,
    poll,
    whatif,
)
from ampscope_dashboards.layout import page
from ampscope_dashboards.reader import RunStore
from dash import Patch, no_update

from ampscope.log.schema import Header
from tests.helpers_log import FakeClock, make_layers, records, write_run

ASSETS = Path(ampscope_dashboards.__file__).parent / "assets"


@pytest.fixture
def store(tmp_path):
    """Return a store over one run that skipped steps 5 and 30."""
    kinds = make_layers(6)
    write_run(tmp_path, kinds, records(120, kinds, skip=[5], nan={30: 2}), name="run")
    return RunStore(tmp_path)


def ask(**more):
    """Return what a browser asks."""
    return {
        "run": "run",
        "rank": 0,
        "theme": "light",
        "range": None,
        "stamp": [0, 0, 0],
        "narrow": False,
        "mark": None,
    } | more


def patched(patch):
    """Return the paths a Patch touches."""
    return [tuple(op["location"]) for op in patch.to_plotly_json()["operations"]]


# Asking and sending


@pytest.mark.parametrize("data", [None, {}, [], "x", {"run": 3}, {"run": None}])
def test_a_browser_that_asks_nothing_gets_nothing(store, data):
    """No run named: nothing is sent, in any tab."""
    for answer in (
        overview.answer,
        layers.answer,
        layers.detail,
        events.answer,
        whatif.answer,
        whatif.replay,
        compare.answer,
        findings.answer,
    ):
        assert set(map(type, answer(store, data, None))) == {type(no_update)}


@pytest.mark.parametrize(
    "more",
    [
        {"rank": "x"}, {"rank": True}, {"range": "1:2"}, {"range": [None, 3]}, {"theme": "<b>"}, {"mark": "x"}, {"metric": "nope"},
        {"kinds": 3}, {"open": [1, None]}, {"page": 1e99}, {"event": 7}, {"order": {}}, {"q": ["a"]}, {"scale": float("nan")},
    ],
)  # fmt: skip
def test_nonsense_fields_are_ignored(store, more):
    """Whatever the fields hold, the answer is one of the run."""
    for answer in (overview.answer, layers.answer, events.answer, compare.answer):
        answer(store, ask(kinds=["skip"]) | more, None)
    events.step(store, ask(kinds=["skip"], by=1) | more)


def test_only_what_changed_is_sent(store):
    """The same again sends nothing; another range sends a patch of the traces; another theme everything."""
    first = overview.answer(store, ask(), None)
    assert isinstance(first[0], dict)
    again = overview.answer(store, ask(), first[-1])
    assert [x is no_update for x in again] == [True] * 5
    zoomed = overview.answer(store, ask(range=[40, 60]), first[-1])
    assert isinstance(zoomed[0], Patch)
    places = patched(zoomed[0])
    assert ("layout", "xaxis") in places
    assert ("layout", "template") not in places
    assert any(p[0] == "data" for p in places)
    dark = overview.answer(store, ask(theme="dark"), first[-1])
    assert isinstance(dark[0], dict)
    assert dark[2] is no_update, "the tiles are the same"


def test_a_patch_applied_is_the_figure(store):
    """What the browser holds after a patch is what a fresh answer would have been."""
    first = overview.answer(store, ask(), None)
    zoomed = overview.answer(store, ask(range=[40, 60]), first[-1])
    figure = json.loads(json.dumps(first[0]))
    for op in zoomed[0].to_plotly_json()["operations"]:
        target = figure
        for key in op["location"][:-1]:
            target = target[key]
        target[op["location"][-1]] = op["params"]["value"]
    assert figure == json.loads(json.dumps(overview.answer(store, ask(range=[40, 60]), None)[0]))


def test_a_stale_have_of_another_shape_sends_everything(store):
    """What a browser says it has is not believed beyond its shape."""
    norms = layers.answer(store, ask(metric="grad_norm"), None)
    assert isinstance(layers.answer(store, ask(metric="zero_ratio"), norms[-1])[0], dict)
    first = overview.answer(store, ask(), None)
    shape = first[-1]["chart"]["shape"]
    for nonsense in ("x", {"shape": "x"}, {"shape": shape}, {"shape": shape, "data": 3, "layout": []}):
        assert isinstance(overview.answer(store, ask(), {"chart": nonsense})[0], dict)


@pytest.mark.parametrize(
    ("answer", "more"),
    [
        (overview.answer, {}),
        (layers.answer, {"metric": "grad_norm"}),
        (layers.detail, {"layer": "block.1.weight"}),
        (events.answer, {"kinds": ["skip"], "event": "5.0"}),
        (whatif.answer, {"fmt": "fp16"}),
        (whatif.replay, {"r_interval": 5}),
        (compare.answer, {"cmp": []}),
        (findings.answer, {}),
    ],
)
def test_answers_are_json(store, answer, more):
    """Every answer can be sent: no NaN literals, no NumPy types."""
    from dash._utils import to_json

    text = to_json(answer(store, ask(**more), None))
    json.loads(text, parse_constant=lambda name: pytest.fail(f"sent {name}"))


# Tabs


def test_the_layers_tab_names_its_rows_to_the_script(store):
    """What was clicked is found by the row's text; opened modules can be folded again."""
    out = layers.answer(store, ask(metric="grad_norm", group="module", open=["block.1"]), None)
    assert [r[1:] for r in out[4]] == [
        ["block.0", True],
        ["block.1.weight", False],
        ["block.1.bias", False],
        ["block.2", True],
    ]
    assert [r[0] for r in out[4]] == out[0]["data"][0]["y"]
    assert [b.to_plotly_json()["props"]["data-arg"] for b in out[2]] == ["block.1"]
    assert out[5] == [f"block.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]


def test_a_search_without_a_match_says_so(store):
    """An empty heatmap is a message."""
    out = layers.answer(store, ask(metric="grad_norm", q="nothing like it"), None)
    assert out[0]["data"] == []
    assert "No layer matches" in json.dumps(out[0]["layout"]["annotations"])


def test_a_layer_that_is_not_there_is_said(store):
    """Its name in the URL may be of another run."""
    out = layers.detail(store, ask(layer="gone"), None)
    assert "no layer 'gone'" in out[3]


def test_next_and_previous_walk_through_the_events(store):
    """From nothing chosen to the first, on to the next, and not beyond the last; the range shows the step."""
    asked = ask(kinds=["skip"], evq="", evorder="old", by=1, event=None)
    first = events.step(store, asked)
    assert (first["step"], first["id"]) == (5, "5.0")
    assert first["range"][0] < 5 < first["range"][1]
    second = events.step(store, asked | {"event": first["id"]})
    assert second["step"] == 30
    assert "(2 of 2)" in second["text"]
    assert events.step(store, asked | {"event": second["id"]})["step"] == 30
    assert events.step(store, asked | {"event": second["id"], "by": -1})["step"] == 5
    assert events.step(store, asked | {"by": -1})["step"] == 30
    assert events.step(store, asked | {"kinds": ["growth"]})["id"] is None
    assert events.step(store, asked | {"by": 0, "event": "9.9"})["id"] is None


def test_the_chosen_event_is_told_in_full(store):
    """Its facts stand above the table, and its line is pointed out."""
    _, table, detail, _ = events.answer(store, ask(kinds=["skip"], event="30.0", page=-1), None)
    assert "block.1.weight" in str(detail)
    assert "chosen" in str(table)


def settled(store):
    """Wait for what is made in the background."""
    source = store.source("run")
    for background in (store.collected, store.prepared, store.diagnosis):
        background.of(source, patience=20)
        assert background.finish(timeout=20)


def test_what_if_answers_at_the_recorded_scale_by_itself(store):
    """Without a choice the slider's place is the newest scale; with one, that is drawn."""
    settled(store)
    chart, rows, said, *_ = whatif.answer(store, ask(fmt="fp16", scale=None), None)
    newest = store.source("run").values("loss_scale", 0)[-1]
    assert f"chosen: 2^{int(np.log2(newest))}" in json.dumps(chart["layout"]["annotations"])
    assert len(rows["layout"]["yaxis"]["categoryarray"]) == 6
    assert "FP16 at 2^" in words(said)
    other = whatif.answer(store, ask(fmt="fp8_e4m3", scale=3), None)
    assert "FP8_E4M3 at 2^3" in words(other[2])
    assert "chosen: 2^32" in json.dumps(whatif.answer(store, ask(scale=1e9), None)[0]["layout"]["annotations"])


def test_what_if_without_histograms_says_why(tmp_path):
    """The message names the option that keeps them."""
    kinds = make_layers(2)
    write_run(tmp_path, kinds, records(3, kinds, exponents_every=1000, first=1), name="run")
    store = RunStore(tmp_path)
    settled(store)
    out = whatif.answer(store, ask(), None)
    assert "exponents_every" in json.dumps(out[0]["layout"]["annotations"])


def test_replay_refuses_settings_that_a_scaler_refuses(store):
    """The words are those of the library."""
    settled(store)
    out = whatif.replay(store, ask(r_backoff=1.5), None)
    assert "backoff_factor must be between 0 and 1" in json.dumps(out[0]["layout"]["annotations"])
    good = whatif.replay(store, ask(), None)
    assert "These are the run's own settings" in words(good[1])


def test_compare_takes_the_run_in_view_first(store):
    """Nothing chosen: the run in view; a chosen list is taken as it is; one that is gone is said."""
    assert compare.chosen(common.read_ask(ask(cmp=[]))) == ["run"]
    assert compare.chosen(common.read_ask(ask(cmp=["b", "run"]))) == ["b", "run"]
    out = compare.answer(store, ask(cmp=["run", "gone"]), None)
    assert "no run 'gone'" in str(out[2])


def test_findings_link_to_their_evidence(store):
    """A finding's button carries tab, metric, layer and range as data, never as code."""
    from ampscope_dashboards.views.findings import cards

    from ampscope.analysis.finding import Finding

    found = Finding(
        "layer-underflow",
        "warning",
        "<b>x</b>",
        layers=("block.1.weight",),
        steps=(10, 60, 51),
        evidence={"share": 0.25},
    )
    card = cards([found])[0]
    assert card.evidence == [("share", "0.25")]
    shown = findings.finding(card).to_plotly_json()["props"]["children"][-1].to_plotly_json()["props"]
    target = json.loads(shown["data-arg"])
    assert target["tab"] == "layers"
    assert target["metric"] == "underflow_ratio"
    assert target["layer"] == "block.1.weight"
    assert target["range"][0] <= 10 <= 60 <= target["range"][1]
    assert cards([Finding("scaler-useless-with-bf16", "warning", "x")])[0].link is None


# The tick


def named(out):
    """Return a poll's outputs by name."""
    return dict(zip((*poll.OUTPUTS, "have"), out, strict=True))


def test_a_tick_without_news_sends_nothing(store):
    """Asked again, every output is left alone."""
    first = named(poll.poll(store, {"run": "run", "rank": 0}, None))
    assert first["version"]["last"] == 119
    assert first["status"]["state"] == "ended"
    assert first["blank-hidden"] is True
    store.diagnosis.finish(timeout=20)
    second = named(poll.poll(store, {"run": "run", "rank": 0}, first["have"]))
    third = named(poll.poll(store, {"run": "run", "rank": 0}, second["have"]))
    assert all(v is no_update for v in third.values())


def test_the_newest_run_is_chosen_where_none_is(store):
    """A page without a run takes the first there is."""
    assert named(poll.poll(store, {"run": None}, None))["run"] == "run"


def test_a_tick_tells_of_new_rows(tmp_path):
    """New rows move the stamp; the log is looked at no more often than the store allows."""
    kinds = make_layers(2)
    path = write_run(tmp_path, kinds, records(10, kinds), name="run", finish=False)
    clock = FakeClock(max(p.stat().st_mtime for p in path.iterdir()))
    store = RunStore(tmp_path, clock=clock)
    first = named(poll.poll(store, {"run": "run"}, None))
    assert first["status"]["state"] == "live"
    whole = write_run(tmp_path / "other", kinds, records(25, kinds), name="run")
    for file in whole.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    clock.tick(5)
    second = named(poll.poll(store, {"run": "run"}, first["have"]))
    assert second["version"]["last"] == 24
    assert second["version"]["stamp"] != first["version"]["stamp"]


def words(component):
    """Return all text of a component."""
    return re.sub(r"\s+", " ", str(component))


def test_missing_folder_empty_folder_and_no_step_are_told(tmp_path):
    """Each says what was looked for and where, and what makes it."""
    missing = named(poll.poll(RunStore(tmp_path / "nowhere"), {"run": None}, None))
    assert "nowhere" in words(missing["blank"])
    assert "ampscope.watch" in words(missing["blank"])
    assert missing["panels-hidden"] is True
    empty = named(poll.poll(RunStore(tmp_path), {"run": None}, None))
    assert str(tmp_path) in words(empty["blank"])
    assert "ampscope-*.arrows" in words(empty["blank"])
    kinds = make_layers(1)
    path = write_run(tmp_path, kinds, [], name="begun", finish=False)
    clock = FakeClock(max(p.stat().st_mtime for p in path.iterdir()))
    waiting = named(poll.poll(RunStore(tmp_path, clock=clock), {"run": "begun"}, None))
    assert "Waiting for the first step" in words(waiting["blank"])
    clock.tick(1000)
    dead = named(poll.poll(RunStore(tmp_path, clock=clock), {"run": "begun"}, None))
    assert "This run has no step" in words(dead["blank"])


def test_a_log_of_a_newer_version_is_told(tmp_path, monkeypatch):
    """The message says what to do; other runs can still be chosen."""
    kinds = make_layers(1)
    monkeypatch.setattr(Header, "to_json", _newer(Header.to_json))
    write_run(tmp_path, kinds, records(2, kinds), name="new")
    monkeypatch.undo()
    write_run(tmp_path, kinds, records(2, kinds), name="old")
    out = named(poll.poll(RunStore(tmp_path), {"run": "new"}, None))
    assert "upgrade ampscope" in words(out["blank"])
    assert {o["value"] for o in out["run-options"]} == {"new", "old"}


def _newer(to_json):
    def wrapped(self):
        data = json.loads(to_json(self))
        return json.dumps(data | {"version": 99}).encode()

    return wrapped


def test_a_damaged_log_is_shown_and_told(tmp_path):
    """What can be read is shown; a banner says what was left out."""
    kinds = make_layers(2)
    path = write_run(tmp_path, kinds, records(60, kinds), name="run", batch=20)
    file = next(path.glob("ampscope-0-rank0.arrows"))
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 40] = bytes(40)
    file.write_bytes(raw)
    store = RunStore(tmp_path)
    first = named(poll.poll(store, {"run": "run"}, None))
    assert isinstance(overview.answer(store, ask(), None)[0], dict)
    for metric in ("grad_norm", "grad_max", "zero_ratio", "subnormal_ratio"):
        assert isinstance(layers.answer(store, ask(metric=metric), None)[0], dict)
    # a column is checked when it is first read, so damage may show at a later tick
    out = named(poll.poll(store, {"run": "run"}, first["have"]))
    told = out["trouble"] if first["trouble"] == [] else first["trouble"]
    assert "could not be read" in words(told)


# CSV


def table(text):
    """Return CSV as rows."""
    return list(csv.reader(io.StringIO(text)))


def test_csv_holds_the_steps_in_view_as_full_floats(store):
    """One row a step within the range, values equal to the log's."""
    name, text = export.csv_of(store, ask(tab="overview", range=[10, 19]))
    rows = table(text)
    assert name == "ampscope-run-overview.csv"
    column = rows[0].index("loss")
    inside = {int(r[0]): float(r[column]) for r in rows[1:]}
    run = store.source("run").run
    assert inside[15] == run.scalar("loss")[15]
    assert set(range(10, 20)) <= set(inside)
    assert len(inside) <= 12


@pytest.mark.parametrize(
    ("tab", "head"),
    [
        ("layers", ["row", "from_step", "to_step", "underflow_ratio", "note"]),
        ("events", ["step", "kind", "rank", "phase", "layers", "op", "where", "message"]),
        ("compare", ["run", "step", "metric", "value"]),
        ("findings", ["rule", "severity", "title", "where", "evidence", "remedy"]),
    ],
)
def test_every_tab_has_a_csv(store, tab, head):
    """Its head names what the tab shows."""
    rows = table(export.csv_of(store, ask(tab=tab, kinds=["skip"], cmp=[]))[1])
    assert rows[0] == head
    if tab == "events":
        assert [r[0] for r in rows[1:]] == ["5", "30"]


def test_csv_of_a_long_run_keeps_the_extremes(store, monkeypatch):
    """Beyond the limit, the rows a chart would draw are written."""
    monkeypatch.setattr(export, "ROWS", 50)
    rows = table(export.csv_of(store, ask(tab="overview"))[1])
    assert {"0", "5", "30", "119"} <= {r[0] for r in rows[1:]}


def test_csv_carries_no_formula():
    """Text that a spreadsheet would run is quoted; numbers are not."""
    assert export.cell("=1+1") == "'=1+1"
    assert export.cell("@x") == "'@x"
    assert export.cell("plain") == "plain"
    assert export.cell(-1.5) == "-1.5"
    assert export.cell(np.float32(0.1)) == repr(float(np.float32(0.1)))


# Wiring


def test_the_script_takes_the_controls_in_the_order_they_are_sent():
    """`CONTROLS` of the page's script and of the callback are the same list."""
    script = (ASSETS / "app.js").read_text()
    inside = re.search(r"const CONTROLS = \[(.*?)\];", script, re.DOTALL)[1]
    assert tuple(re.findall(r'"(\w+)"', inside)) == client.CONTROLS
    tabs = re.search(r"const TABS = \[(.*?)\];", script, re.DOTALL)[1]
    assert re.findall(r'"(\w+)"', tabs) == [name for name, _ in page.TABS]


def test_every_id_a_callback_names_is_on_the_page(store):
    """No callback waits for something that is not there; every ask store is listened to."""
    app = create_app(store.log_dir, store=store)
    found = {getattr(c, "id", None) for c in app.layout()._traverse()} | {"page"}
    for key, callback in app.callback_map.items():
        ids = {i["id"] for i in callback["inputs"] + callback["state"]}
        ids |= {part.rsplit(".", 1)[0] for part in key.strip(".").split("...")}
        assert ids <= found, ids - found
    listened = {i["id"] for c in app.callback_map.values() for i in c["inputs"]}
    assert {f"ask-{name}" for name in page.ASKS} <= listened


def test_two_apps_live_side_by_side(tmp_path, store):
    """No module-level app: each has its own folder."""
    other = create_app(tmp_path / "nowhere")
    mine = create_app(store.log_dir)
    assert [o["value"] for o in _by_id(mine.layout(), "run").options] == ["run"]
    assert _by_id(other.layout(), "run").options == []


def _by_id(layout, wanted):
    return next(c for c in layout._traverse() if getattr(c, "id", None) == wanted)


def test_nothing_is_loaded_from_elsewhere(store):
    """Scripts and styles are local; the page names no foreign host."""
    app = create_app(store.log_dir, store=store)
    html = app.server.test_client().get("/").get_data(as_text=True)
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", html)
    assert "https://" not in html.replace("https://github.com/plotly", "")
    for file in ASSETS.iterdir():
        assert not re.search(r"https?://", file.read_text()), file.name


def test_every_key_is_listed_and_handled():
    """The keyboard help and the script agree."""
    script = (ASSETS / "app.js").read_text()
    handled = set(re.findall(r"^\s*const keys = \{(.*?)\};", script, re.DOTALL | re.MULTILINE)[0].split())
    listed = {part.strip() for keys, _ in page.KEYS for part in keys.split(",")} - {"1 … 6", "Esc"}
    for key in listed:
        assert f"{key}:" in handled or f'"{key}":' in handled, key


def test_an_unknown_run_is_said_and_the_newest_offered(store):
    """A link to a run that is gone names it, and has a button for the newest one; nothing is shown in its stead."""
    out = dict(zip(poll.OUTPUTS, poll.poll(store, {"run": "gone <b>"}, None), strict=False))
    assert out["blank-hidden"] is False
    shown = words(out["blank"])
    assert "There is no run of that name" in shown
    assert "gone <b>" in shown
    assert f"Show the newest run: {store.entries()[0].key}" in shown
    assert out["run"] is no_update
