"""One module a tab: what the browser asks (a plain dict), what the server answers. `register` wires them to the page."""

from __future__ import annotations

from dash import Dash

from ..reader import RunStore
from . import client, compare, events, export, findings, layers, overview, poll, whatif


def register(app: Dash, store: RunStore) -> None:
    """Add every callback to an app."""
    client.register(app)
    for tab in (poll, overview, layers, events, whatif, compare, findings, export):
        tab.register(app, store)
