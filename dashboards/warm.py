"""The newest run is opened and its first screen made while the browser still loads the page."""

from __future__ import annotations

import threading

from ampscope.errors import AmpscopeError

from .reader import RunStore
from .views import overview
from .views.common import Range


def warm(store: RunStore) -> threading.Thread:
    """Begin to read the newest run on a thread of its own; return it."""
    thread = threading.Thread(target=_newest, args=(store,), name="ampscope-warm", daemon=True)
    thread.start()
    return thread


def _newest(store: RunStore) -> None:
    try:
        entries = store.entries()
        if not entries:
            return
        source = store.source(entries[0].key)
        if not len(source.steps):
            return
        rank, whole = (source.run.ranks or [0])[0], Range(None, None)
        source.cached(("overview", rank, whole), lambda: overview.overview(source, rank, whole))
        source.cached(("tiles", rank), lambda: overview.tiles(source, rank))
    except (AmpscopeError, OSError):
        return  # the page says what is wrong with the folder or the log
