"""What the browser tests share: Chromium, a server, and a page that fails on console errors and on requests beyond 127.0.0.1.

A module that imports from here is skipped without Chromium, except in CI, where that is an error.
"""

import os
import shutil
from urllib.parse import urlencode, urlsplit

import pytest

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")) if p), None)
if CHROMIUM is None and os.environ.get("CI") != "true":
    pytest.skip("no Chromium on this system (apt-get install chromium)", allow_module_level=True)

from ampscope_dashboards.app import create_app  # noqa: E402  (after the check for a browser)
from ampscope_dashboards.server import Server  # noqa: E402  (as above)
from playwright.sync_api import expect, sync_playwright  # noqa: E402  (as above)

from tests.helpers_log import make_layers, records, write_run  # noqa: E402  (as above)

HOSTILE = "x<script>alert(1)<​\"'&{%" + "long" * 20 + "نص"
"""A run's name: markup, quotes, a character without width, right-to-left text, and long."""


def serve(folder, **how):
    """Start the dashboard of a folder; the caller closes it."""
    server = Server(create_app(folder, **how), port=0)
    server.start()
    return server


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Runs of every kind that a page has to cope with."""
    folder = tmp_path_factory.mktemp("logs")
    layers = make_layers(6)
    write_run(folder, layers, records(300, layers, skip=[40, 41, 200], nan={120: 2}), name="amp")
    write_run(folder, layers, records(200, layers, seed=3), name="other")
    write_run(folder, layers, records(60, layers), name=HOSTILE)
    return folder


@pytest.fixture(scope="module")
def server(logs):
    """Serve them with the real waitress server."""
    made = serve(logs)
    yield made
    made.close()


@pytest.fixture(scope="module")
def browser():
    """Start Chromium."""
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


def observe(page, wrong):
    """Put into `wrong` what a page may not do: log an error, raise, ask anything beyond 127.0.0.1."""
    page.set_default_timeout(20_000)
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on("request", lambda r: None if urlsplit(r.url).hostname in ("127.0.0.1", None) else wrong.append(r.url))


@pytest.fixture
def visit(browser, server):
    """Return a function that opens a view; at the end nothing may have gone wrong in any of its pages."""
    contexts, wrong = [], []

    def make(base=None, *, width=1280, scheme="light", ready="#state:not(:empty)", **query):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        contexts.append(context)
        page = context.new_page()
        observe(page, wrong)
        page.on("dialog", lambda d: (wrong.append(f"dialog: {d.message}"), d.dismiss()))
        page.goto(f"{base or server.url}?{urlencode(query, doseq=True)}")
        if ready:
            page.wait_for_selector(ready, state="attached")
        return page

    yield make
    for context in contexts:
        context.close()
    assert not wrong


def drawn(page, chart):
    """Wait until a chart is drawn from data."""
    page.wait_for_function(
        "id => { const g = document.querySelector('#' + id + ' .js-plotly-plot');"
        " return g && g.layout && g.data.length && g.layout.uirevision !== 'message'; }",
        arg=chart,
    )


def ends(page, chart="overview-chart"):
    """Return the x range a chart shows."""
    return page.evaluate(
        "id => document.querySelector('#' + id + ' .js-plotly-plot')._fullLayout.xaxis.range.map(Number)", chart
    )


__all__ = ["HOSTILE", "browser", "drawn", "ends", "expect", "logs", "serve", "server", "visit"]
