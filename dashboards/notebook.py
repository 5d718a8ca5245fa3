"""`ampscope.show`: the dashboard inline in Jupyter, or by its address elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .app import create_app
from .server import Server


class Shown:
    """A dashboard that is being served; `url` is its address, `stop()` ends it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.url = server.url
        server.start()

    def stop(self) -> None:
        """Stop serving."""
        self._server.close()

    def __repr__(self) -> str:
        return f"<ampscope dashboard at {self.url}>"


def show(log_dir: str | Path = "logs", *, height: int = 900, port: int = 8060) -> Any:
    """Serve the dashboard of a folder of runs on loopback, and show it inline in Jupyter.

    Args:
        log_dir: a run's folder, or a folder of runs.
        height: of the frame, in pixels.
        port: or the next free one.

    Returns:
        An object with `.url` and `.stop()`. Outside Jupyter nothing is shown: open the address.

    Raises:
        AmpscopeError: no port is free.
    """
    shown = Shown(Server(create_app(log_dir), port=port))
    try:
        from IPython import get_ipython
        from IPython.display import IFrame, display
    except ImportError:
        return shown
    if get_ipython() is not None and "IPKernelApp" in getattr(get_ipython(), "config", {}):
        display(IFrame(shown.url, width="100%", height=height))
    return shown
