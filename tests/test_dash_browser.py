"""The dashboard in the system's Chromium: every tab, theme and width; no console error, no request that leaves this machine."""

import os
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from ampscope_dashboards.app import create_app
from ampscope_dashboards.server import Server
from playwright.sync_api import expect

from tests.browsing import browser, observe  # noqa: F401  (a fixture; skips without Chromium)
from tests.helpers_log import make_layers, records, write_run

pytestmark = pytest.mark.browser
TABS = {
    "overview": "Overview",
    "layers": "Layers",
    "events": "Events",
    "whatif": "What if",
    "compare": "Compare",
    "findings": "Findings",
}
SHOTS = Path(os.environ.get("AMPSCOPE_ARTIFACTS", "artifacts")) / "screenshots"


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Real runs: one that is healthy, one whose forward goes NaN; and one of two sessions with a hostile layer name."""
    import torch

    import ampscope

    folder = tmp_path_factory.mktemp("logs")
    for name, wide in (("healthy", 1.0), ("nan", 1e5)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        with torch.no_grad():
            model[0].weight.mul_(wide)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", growth_interval=30)
        ampscope.watch(scaler, model, log_dir=folder, run=name, tensorboard=False)
        for step in range(80):
            x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (model(x).float() - x.sum(1, keepdim=True)).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        ampscope.unwatch(scaler)
    layers = make_layers(6)
    for _ in range(2):
        write_run(folder, layers, records(40, layers), name="two-sessions")
    return folder


@pytest.fixture(scope="module")
def server(logs):
    """Serve them with the real waitress server."""
    made = Server(create_app(logs), port=0)
    made.start()
    yield made
    made.close()


@pytest.fixture
def page(browser):  # noqa: F811  (pytest hands the fixture over)
    """Open a page that fails the test on a console error or a request that leaves 127.0.0.1."""
    pages = []
    wrong = []

    def make(url, width=1280, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        observe(page, wrong)
        page.goto(url)
        expect(page.locator("#tab-overview")).to_be_visible()
        pages.append(page)
        return page

    yield make
    for one in pages:
        one.close()
    assert not wrong


def chart(page, panel):
    """Wait for a drawn chart in a tab's panel."""
    page.wait_for_selector(f"#panel-{panel} .js-plotly-plot .main-svg", state="visible")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_tab_is_drawn(server, page, scheme):
    """In both themes; a picture of each is kept."""
    view = page(f"{server.url}?run=healthy", scheme=scheme)
    assert view.evaluate("document.documentElement.dataset.theme") == scheme
    SHOTS.mkdir(parents=True, exist_ok=True)
    for name, text in TABS.items():
        view.click(f"#tab-{name}")
        expect(view.locator(f"#panel-{name}")).to_be_visible()
        assert view.locator(f"#tab-{name}").inner_text().strip() == text
        if name in ("overview", "layers"):
            chart(view, name)
        view.wait_for_timeout(600)
        view.screenshot(path=SHOTS / f"{name}-{scheme}.png")


def test_a_phone_shows_all_six_names_and_nothing_sideways(server, page):
    """390 pixels wide."""
    view = page(f"{server.url}?run=healthy", width=390)
    chart(view, "overview")
    for name, text in TABS.items():
        tab = view.locator(f"#tab-{name}")
        expect(tab).to_be_visible()
        box = tab.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 391
        assert text in tab.inner_text()
    assert view.evaluate("document.documentElement.scrollWidth") <= 391


def test_the_sentence_names_the_fault(server, page):
    """The first thing on the page of a broken run is the finding."""
    view = page(f"{server.url}?run=nan")
    expect(view.locator("#panel-overview")).to_contain_text("FP16", timeout=20_000)
    view.click("#tab-findings")
    expect(view.locator("#panel-findings")).to_contain_text("forward-overflow-activation", timeout=20_000)


def test_the_url_holds_the_view_and_brings_it_back(server, page):
    """Tab and run are in the address; a reload shows the same."""
    view = page(f"{server.url}?run=healthy")
    view.click("#tab-layers")
    chart(view, "layers")
    view.wait_for_function("location.search.includes('tab=layers')")
    held = parse_qs(urlsplit(view.url).query)
    assert held["run"] == ["healthy"]
    view.reload()
    chart(view, "layers")
    expect(view.locator("#tab-layers")).to_have_attribute("aria-selected", "true")


def test_the_keyboard_lists_its_keys_and_the_share_button_is_gone(server, page):
    """`?` opens the list; nothing offers to post a chart to a cloud."""
    view = page(f"{server.url}?run=healthy")
    chart(view, "overview")
    view.keyboard.press("?")
    expect(view.locator("#help")).to_be_visible()
    view.keyboard.press("Escape")
    assert "Share chart" not in view.content()
    assert view.locator("[data-title*='Share'], [data-title*='cloud']").count() == 0


def test_a_growing_run_is_followed(logs, server, page):
    """Rows appended while the page is open appear without a reload."""
    layers = make_layers(4)
    write_run(logs, layers, records(20, layers), name="growing", finish=False)
    time.sleep(2.1)  # the folder is looked at every two seconds
    view = page(f"{server.url}?run=growing")
    expect(view.locator("#panel-overview")).to_contain_text("20")
    write_run(logs, layers, records(70, layers), name="growing")
    expect(view.locator("#panel-overview")).to_contain_text("90", timeout=25_000)


def test_no_folder_and_no_run_are_said(tmp_path, page):
    """Which folder was looked at, and what makes a run."""
    made = Server(create_app(tmp_path / "nothing"), port=0)
    made.start()
    try:
        view = page(made.url)
        expect(view.locator("body")).to_contain_text("nothing", timeout=20_000)
        expect(view.locator("body")).to_contain_text("ampscope")
    finally:
        made.close()
