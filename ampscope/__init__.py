"""ampscope: what mixed-precision training does to gradients.

Public names load on first use, so `import ampscope` costs no torch, no pyarrow and no dash.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ampscope.version import VERSION as __version__

if TYPE_CHECKING:
    from ampscope_dashboards.notebook import show as show

    from ampscope.analysis.diagnose import diagnose as diagnose
    from ampscope.analysis.finding import Finding as Finding
    from ampscope.analysis.replay import Replay as Replay
    from ampscope.analysis.replay import replay as replay
    from ampscope.analysis.whatif import WhatIf as WhatIf
    from ampscope.analysis.whatif import what_if as what_if
    from ampscope.errors import AmpscopeError as AmpscopeError
    from ampscope.errors import LogError as LogError
    from ampscope.probe.audit import Audit as Audit
    from ampscope.probe.audit import audit as audit
    from ampscope.probe.trace import trace as trace
    from ampscope.probe.watch import Watch as Watch
    from ampscope.probe.watch import handle as handle
    from ampscope.probe.watch import unwatch as unwatch
    from ampscope.probe.watch import watch as watch
    from ampscope.record.step import Event as Event
    from ampscope.record.step import Layer as Layer
    from ampscope.run.find import find_runs as find_runs
    from ampscope.run.find import open_run as open_run
    from ampscope.run.run import Run as Run

_PUBLIC = {
    "AmpscopeError": "ampscope.errors",
    "LogError": "ampscope.errors",
    "watch": "ampscope.probe.watch",
    "unwatch": "ampscope.probe.watch",
    "handle": "ampscope.probe.watch",
    "Watch": "ampscope.probe.watch",
    "trace": "ampscope.probe.trace",
    "audit": "ampscope.probe.audit",
    "Audit": "ampscope.probe.audit",
    "find_runs": "ampscope.run.find",
    "open_run": "ampscope.run.find",
    "Run": "ampscope.run.run",
    "Layer": "ampscope.record.step",
    "Event": "ampscope.record.step",
    "Finding": "ampscope.analysis.finding",
    "diagnose": "ampscope.analysis.diagnose",
    "what_if": "ampscope.analysis.whatif",
    "WhatIf": "ampscope.analysis.whatif",
    "replay": "ampscope.analysis.replay",
    "Replay": "ampscope.analysis.replay",
    "show": "ampscope_dashboards.notebook",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module 'ampscope' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
