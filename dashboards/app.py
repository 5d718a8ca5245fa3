"""`create_app`: the Dash app of one log folder. No module-level app: two can live in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dash import Dash

from ampscope.errors import LogError

from .callbacks import register
from .layout.page import page
from .reader import RunStore

ASSETS = Path(__file__).parent / "assets"

INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<title>{%title%}</title>
<link rel="icon" href="data:,">
<script>
(function () {
  var theme = new URLSearchParams(location.search).get("theme");
  try { theme = theme || localStorage.getItem("ampscope-theme"); } catch (e) { theme = theme || "system"; }
  if (theme !== "light" && theme !== "dark") theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = theme;
})();
</script>
{%css%}
</head>
<body>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>
"""
"""The theme is set before the first paint, so that a dark page does not flash white."""


def create_app(log_dir: str | Path, *, url_prefix: str = "/", store: RunStore | None = None) -> Dash:
    """Return the dashboard of a folder of runs.

    Args:
        log_dir: a run's folder, or a folder of runs; it may not exist yet.
        url_prefix: path under which a reverse proxy shows it; begins and ends with "/".
        store: reads the runs; made from `log_dir` if not given.
    """
    reader = RunStore(log_dir) if store is None else store
    app = Dash(
        __name__,
        title="ampscope",
        update_title=None,
        assets_folder=str(ASSETS),
        serve_locally=True,
        requests_pathname_prefix=url_prefix,
        routes_pathname_prefix=url_prefix,
        health_endpoint="health",
        enable_mcp=False,
        add_log_handler=False,
        index_string=INDEX,
        meta_tags=[
            {"name": "viewport", "content": "width=device-width, initial-scale=1"},
            {"name": "color-scheme", "content": "light dark"},
        ],
    )

    def layout() -> Any:
        try:
            keys = [entry.key for entry in reader.entries()]
        except LogError:
            keys = []  # the page says what is missing, and goes on looking
        return page([{"value": key, "label": key} for key in keys], keys[0] if keys else None)

    app.layout = layout
    register(app, reader)
    return app
