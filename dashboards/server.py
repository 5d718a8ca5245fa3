"""Serving the dashboard: loopback by default, foreign `Host` headers and cross-origin requests refused, Ctrl-C ends it."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from dash import Dash
from waitress.server import create_server

from ampscope.errors import AmpscopeError

THREADS = 8
"""One process, as style.md measured: ten viewers are served well within the limits."""
TRIES = 50
"""Ports tried after the one asked for."""
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'self'"
)
"""The browser itself keeps every request on this server. (Plotly compiles functions, hence 'unsafe-eval'.)"""

Environ = dict[str, Any]
StartResponse = Callable[..., Any]


class Guard:
    """WSGI middleware that refuses requests a foreign page could have made this browser send (DNS rebinding, cross-origin callbacks).

    Args:
        app: the WSGI application.
        hosts: names this server may be called by in `Host`, without ports; None allows every IP address and name (then only
            cross-origin requests are refused).
    """

    def __init__(self, app: Callable[[Environ, StartResponse], Iterable[bytes]], hosts: Sequence[str] | None) -> None:
        self._app = app
        self._hosts = None if hosts is None else {h.lower() for h in hosts}

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request."""
        host = str(environ.get("HTTP_HOST", ""))
        if self._hosts is not None and name_of(host) not in self._hosts:
            return refuse(
                start_response,
                f"this dashboard is not served as {name_of(host)!r}; start it with --allow-host to allow that name",
            )
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD", "OPTIONS"):
            origin = environ.get("HTTP_ORIGIN")
            if origin is not None and urlsplit(str(origin)).netloc.lower() != host.lower():
                return refuse(start_response, "cross-origin request")
            if environ.get("HTTP_SEC_FETCH_SITE", "same-origin") not in ("same-origin", "none"):
                return refuse(start_response, "cross-site request")

        def with_headers(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            extra = [
                ("X-Content-Type-Options", "nosniff"),
                ("Referrer-Policy", "no-referrer"),
                ("Content-Security-Policy", POLICY),
            ]
            return start_response(status, [*headers, *extra], *rest)

        return self._app(environ, with_headers)


def name_of(host: str) -> str:
    """Return the name in a `Host` header without its port: "127.0.0.1:8060" → "127.0.0.1", "[::1]:8060" → "::1"."""
    try:
        return (urlsplit("//" + host).hostname or "").lower()
    except ValueError:
        return ""


def refuse(start_response: StartResponse, why: str) -> Iterable[bytes]:
    """Answer 403 with a line."""
    body = f"Refused: {why}.\n".encode()
    start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
    return [body]


def is_loopback(host: str) -> bool:
    """Whether a `--host` stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allowed_hosts(host: str, more: Sequence[str] = ()) -> list[str]:
    """Return the names a server bound to `host` answers to."""
    names = ["127.0.0.1", "localhost", "::1", *more]
    if not is_loopback(host):
        names += [host, socket.gethostname(), socket.getfqdn()]
        if host in ("0.0.0.0", "::"):
            names += own_addresses()
    return names


def own_addresses() -> list[str]:
    """Return this machine's IP addresses, as far as its own name tells, and the one it reaches others from."""
    found: set[str] = set()
    with contextlib.suppress(OSError):  # a machine that does not know its own name
        found.update(str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a datagram socket sends nothing by connecting
            found.add(probe.getsockname()[0])
        except OSError:
            pass
    return sorted(found)


class Server:
    """A waitress server for a Dash app, bound to `port` or the next free one.

    Raises:
        AmpscopeError: the host cannot be bound, or no port is free.
    """

    def __init__(self, app: Dash, host: str = "127.0.0.1", port: int = 8060, *, allow: Sequence[str] = ()) -> None:
        logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # it warns of every request that waits for a thread
        guarded = Guard(app.server.wsgi_app, allowed_hosts(host, allow))
        self._server, self.port = bind(guarded, host, port)
        self.host = host
        prefix = app.config.requests_pathname_prefix or "/"
        shown = "127.0.0.1" if host in ("0.0.0.0", "127.0.0.1", "localhost") else f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}{prefix}"

    def run(self) -> None:
        """Serve until Ctrl-C or SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _interrupt)
        try:
            self._server.run()
        finally:
            self.close()

    def start(self) -> threading.Thread:
        """Serve on a thread of its own; return it."""
        thread = threading.Thread(target=self._server.run, name="ampscope-dashboard", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def bind(app: Any, host: str, port: int) -> tuple[Any, int]:
    """Return a waitress server and the port it got: `port`, or the next free one (0: any)."""
    if not 0 <= port <= 65535:
        raise AmpscopeError(f"port must be between 0 and 65535, not {port}")
    last: OSError | None = None
    for candidate in range(port, min(port + TRIES, 65536)):
        try:
            server = create_server(
                app, host=host, port=candidate, threads=THREADS, ident="ampscope", clear_untrusted_proxy_headers=True
            )
        except OSError as error:
            last = error
            if error.errno not in _TAKEN:
                break
            continue
        except ValueError as error:  # waitress says so of a host that does not resolve
            raise AmpscopeError(f"cannot serve on host {host!r}: {error}") from None
        got = getattr(server, "effective_port", None) or server.effective_listen[0][1]
        return server, int(got)
    reason = last.strerror if last is not None else "no port"
    raise AmpscopeError(f"cannot serve on {host}:{port} ({reason}); choose another with --port or --host")


_TAKEN = {98, 48, 10048, 13}
"""Address in use (Linux, macOS, Windows), and a port one may not have."""


def ssh_line(port: int, environ: dict[str, str] | None = None) -> str:
    """Return the command that forwards the port to one's own machine, "" outside an SSH session."""
    values = dict(os.environ) if environ is None else environ
    connection = values.get("SSH_CONNECTION", "").split()
    if len(connection) < 4:
        return ""
    user = values.get("USER") or values.get("LOGNAME") or "USER"
    return f"ssh -N -L {port}:127.0.0.1:{port} {user}@{connection[2]}"
