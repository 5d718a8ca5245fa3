"""ampscope: what mixed-precision training does to gradients.

Public names load on first use, so `import ampscope` costs no torch, no pyarrow and no dash.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampscope.errors import AmpscopeError, LogError

__version__ = "0.1.0"

_PUBLIC = {
    "AmpscopeError": "ampscope.errors",
    "LogError": "ampscope.errors",
    "watch": "ampscope.probe.watch",
    "unwatch": "ampscope.probe.watch",
    "handle": "ampscope.probe.watch",
    "Watch": "ampscope.probe.watch",
    "trace": "ampscope.probe.trace",
    "audit": "ampscope.probe.audit",
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

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604  (computed on purpose: one table of public names)


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
