"""The dashboard (import name `ampscope_dashboards`): a Dash app, and the figures it shares with the static report.

Data moves one way: `reader` (runs, behind a lock) → `views` (plain data) → `figures` (plotly dicts) → `layout`, `callbacks`.
Imports inside the package are relative, so that tools which read the folder under its own name follow them too.
"""
