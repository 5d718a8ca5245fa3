"""In Chromium: what holds in every tab. Address, history, keys, zoom, theme, phone, downloads, hostile names, two viewers."""

# ruff: noqa: F811  (fixtures are imported, and are the names of arguments)
import csv
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.browsing import HOSTILE, browser, drawn, ends, expect, logs, serve, server, visit  # noqa: F401  (fixtures)

pytestmark = pytest.mark.browser


def test_the_address_brings_the_same_view_back(visit):
    """Run, tab, metric, layer, range and theme are read from the address, kept in it, and survive a reload."""
    page = visit(
        run="amp", tab="layers", metric="grad_norm", layer="block.1.weight", range="50:150", theme="dark", order="worst"
    )
    for _ in range(2):
        drawn(page, "layers-chart")
        drawn(page, "layer-lines")
        held = {k: v[0] for k, v in parse_qs(urlsplit(page.url).query).items()}
        assert (held["run"], held["tab"]) == ("amp", "layers")
        assert held["metric"] == "grad_norm"
        assert held["layer"] == "block.1.weight"
        assert held["range"] == "50:150"
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert ends(page, "layers-chart") == [50, 150]
        expect(page.locator("#layer-note")).to_contain_text("block.1.weight")
        page.reload()


def test_back_and_forward_go_through_the_tabs(visit):
    """Each tab is an entry of the browser's history."""
    page = visit(run="amp")
    drawn(page, "overview-chart")
    for tab in ("layers", "events"):
        page.click(f"#tab-{tab}")
        expect(page.locator(f"#panel-{tab}")).to_be_visible()
    page.go_back()
    expect(page.locator("#panel-layers")).to_be_visible()
    page.go_back()
    expect(page.locator("#panel-overview")).to_be_visible()
    page.go_forward()
    expect(page.locator("#tab-layers")).to_have_attribute("aria-selected", "true")


def test_n_and_p_step_through_the_events_and_the_charts_follow(visit):
    """`n` goes to the first event, again to the next, `p` back; Close ends it."""
    page = visit(run="amp")
    drawn(page, "overview-chart")
    page.keyboard.press("n")
    expect(page.locator("#event-text")).to_contain_text("step 40")
    page.keyboard.press("n")
    expect(page.locator("#event-text")).to_contain_text("step 41")
    low, high = ends(page)
    assert low < 41 < high < 299
    page.keyboard.press("p")
    expect(page.locator("#event-text")).to_contain_text("step 40")
    page.get_by_role("button", name="Close", exact=True).click()
    expect(page.locator("#event-bar")).to_be_hidden()


def test_keys_open_tabs_help_and_search(visit):
    """1 to 6 are the tabs, `?` lists the keys, `/` goes to the search; typing there is no command."""
    page = visit(run="amp")
    page.keyboard.press("4")
    expect(page.locator("#panel-whatif")).to_be_visible()
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    page.keyboard.press("/")
    expect(page.locator("#q")).to_be_focused()
    page.keyboard.type("n1")
    expect(page.locator("#panel-layers")).to_be_visible()
    assert page.input_value("#q") == "n1"


def test_focus_is_visible(visit):
    """Whoever uses the keyboard sees where they are."""
    page = visit(run="amp")
    page.focus("#tab-overview")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-layers")).to_be_focused()
    style = page.evaluate("getComputedStyle(document.activeElement).outline")
    assert "solid" in style
    assert "2px" in style


def test_the_theme_follows_the_system_until_it_is_chosen(visit):
    """System, light, dark: the page and the charts; t goes through them."""
    page = visit(run="amp")
    drawn(page, "overview-chart")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    paper = "document.querySelector('#overview-chart .js-plotly-plot')._fullLayout.paper_bgcolor"
    page.wait_for_function(f"{paper} === '#171c23'")
    page.keyboard.press("t")
    page.wait_for_function("document.documentElement.dataset.theme === 'light'")
    page.wait_for_function(f"{paper} === '#ffffff'")
    page.emulate_media(color_scheme="light")
    page.keyboard.press("t")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")


def test_a_phone_shows_no_page_sideways(visit):
    """390 pixels wide: every tab fits, and all six names stay as text."""
    page = visit(width=390, run="amp", layer="block.1.weight", cmp=["amp", "other"])
    tabs = page.locator(".tabs button")
    assert tabs.all_inner_texts() == ["Overview", "Layers", "Events", "What if", "Compare", "Findings"]
    for k in range(6):
        tabs.nth(k).click()
        page.wait_for_function("document.querySelector('.panel:not([hidden])').innerText.length > 100")
        page.wait_for_timeout(700)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        boxes = [tabs.nth(i).bounding_box() for i in range(6)]
        assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes)


def test_csv_and_png_hold_what_is_shown(visit, tmp_path):
    """CSV is of the range in view; PNG is an image."""
    page = visit(run="amp", range="100:120")
    drawn(page, "overview-chart")
    with page.expect_download() as got:
        page.get_by_role("button", name="CSV", exact=True).click()
    got.value.save_as(tmp_path / "a.csv")
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [int(r["step"]) for r in rows] == list(range(100, 121))
    with page.expect_download() as got:
        page.get_by_role("button", name="PNG", exact=True).click()
    got.value.save_as(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_hostile_name_is_text(visit):
    """Markup in a run's name is shown, and runs nowhere."""
    page = visit(run=HOSTILE)
    drawn(page, "overview-chart")
    expect(page.locator("#run")).to_contain_text("<script>")
    assert page.locator("script:has-text('alert(1)')").count() == 0


def test_an_unknown_run_is_said_and_the_newest_is_one_click_away(visit):
    """It does not fall back silently."""
    page = visit(run="gone", ready="#blank .notice")
    expect(page.locator("#blank")).to_contain_text("no run 'gone'")
    page.get_by_role("button", name="Show the newest run").click()
    drawn(page, "overview-chart")
    expect(page.locator("#blank")).to_be_hidden()


def test_two_viewers_see_their_own(visit):
    """One zooms and changes the tab; the other's view stays."""
    one, two = visit(run="amp", range="10:20"), visit(run="other", tab="layers")
    drawn(one, "overview-chart")
    drawn(two, "layers-chart")
    assert ends(one) == [10, 20]
    assert ends(two, "layers-chart") != [10, 20]


def test_behind_a_prefix(logs, visit):
    """Everything is asked below the prefix."""
    made = serve(logs, url_prefix="/amp/")
    try:
        page = visit(f"http://127.0.0.1:{made.port}/amp/", run="amp")
        drawn(page, "overview-chart")
    finally:
        made.close()
