"""The dashboard on large logs: first paint, answers, a live tick, viewers at once, memory. Each against what was asked of it.

    python benchmarks/dashboard.py                    # three generated logs, removed afterwards
    python benchmarks/dashboard.py --keep /tmp/logs   # made once, used again

The logs are columns put through the real sink. Answers are timed in the server, from request to headers; polls are left out
of the interactions. Chromium runs before the server starts. It shares the machine's cores with the server.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

TOOK = "X-Took-Ms"
VIEWERS = 10
TICKS = 15
LOGS = {
    "100,000 x 200": ("dense", 100_000, 200, 1000, 3.0),
    "1,000,000 x 64": ("long", 1_000_000, 64, 1000, 6.0),
    "20,000 x 64, a flush a second": ("slow", 20_000, 64, 0, 3.0),
}
"""What is said → (run, steps, layers, rows of a batch (0: as a run with 1 s steps leaves it), seconds to the first paint)."""
METRICS = ("max_abs", "zero_ratio", "nonfinite_count", "grad_norm", "underflow_ratio")


class Timed:
    """WSGI middleware: how long an answer took, as a header of it."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        """Answer a request."""
        began = time.perf_counter()

        def timed(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            took = 1e3 * (time.perf_counter() - began)
            return start_response(status, [*headers, (TOOK, f"{took:.1f}")], *rest)

        return self._app(environ, timed)


def serve(logs: str) -> None:
    """The server's process, as `ampscope dashboard` starts it: prints its address, then its peak memory when it ends."""
    from ampscope_dashboards.reader import RunStore
    from ampscope_dashboards.warm import warm

    store = RunStore(logs)
    warm(store)
    from ampscope_dashboards.app import create_app
    from ampscope_dashboards.server import Server

    app = create_app(logs, store=store)
    app.server.wsgi_app = Timed(app.server.wsgi_app)
    server = Server(app, port=0)
    print(server.url, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, flush=True)


def make(logs: Path, name: str, steps: int, layers: int, batch: int) -> None:
    """Write a log, unless it is there."""
    from ampscope.log.buffer import RowBuffer
    from tests.helpers_log import bulk_run, make_layers

    if (logs / name).exists():
        return
    began = time.perf_counter()
    part = logs / f"part-{os.getpid()}"  # half a log must not be taken for a whole one
    bulk_run(part, steps, layers, name=name, batch=batch or RowBuffer(make_layers(layers)).big)
    (part / name).rename(logs / name)
    shutil.rmtree(part)
    size = sum(f.stat().st_size for f in (logs / name).iterdir())
    print(f"made {name}: {size / 1e6:.0f} MB in {time.perf_counter() - began:.0f} s", flush=True)
    if not batch:
        go_on(logs, name, steps, layers).__next__()


def go_on(logs: Path, name: str, steps: int, layers: int) -> Iterator[Callable[[int], None]]:
    """Begin a second session of a run; yield what writes so many rows and flushes."""
    import numpy as np

    from ampscope.log.arrows import ArrowSink
    from ampscope.log.encode import encode
    from ampscope.log.rundir import claim
    from ampscope.log.schema import Header
    from tests.helpers_log import make_layers, records

    kinds, few = make_layers(layers, 65536), records(40, make_layers(layers, 256), first=steps, seed=1)
    found = claim(logs, name, step=steps)
    sink = ArrowSink(found.path, Header(layers=kinds, session=found.session, first_step=steps, created=few[0].time))
    numel, row = np.array([kind.numel for kind in kinds]), 0

    def write(count: int) -> None:
        nonlocal row
        for _ in range(count):
            record = few[row % len(few)]
            record.step = steps + row
            sink.write(encode(record, row, kinds, numel))
            row += 1
        sink.flush()

    for _ in range(40):  # the tail of a slow run: a batch a row
        write(1)
    yield write
    sink.abandon()
    found.release()


def tick(logs: Path, name: str, steps: int, layers: int) -> dict[str, float]:
    """Return the median milliseconds of a tick with its overview, for ticks that bring 1 row and 100 rows."""
    from ampscope_dashboards.callbacks import overview, poll
    from ampscope_dashboards.reader import RunStore

    with tempfile.TemporaryDirectory(dir=logs.parent) as folder:
        grown = Path(folder) / name
        grown.mkdir()
        for file in (logs / name).iterdir():
            if file.is_file():
                os.link(file, grown / file.name)
        writer = go_on(Path(folder), name, steps, layers)
        write = next(writer)
        store = RunStore(folder)
        beat = {"run": name, "rank": 0}
        ask = {**beat, "theme": "light", "range": None, "narrow": False}
        polled, shown = poll.poll(store, beat, None), overview.answer(store, ask, None)
        store.finish_reading(120)
        store.diagnosis.finish(120)
        shown = overview.answer(store, ask, shown[-1])
        found = {}
        for rows in (1, 100):
            took = []
            for _ in range(TICKS):
                write(rows)
                time.sleep(0.6)  # the disk is looked at twice a second
                began = time.perf_counter()
                polled = poll.poll(store, beat, polled[-1])
                shown = overview.answer(store, ask, shown[-1])
                took.append(1e3 * (time.perf_counter() - began))
            found[str(rows)] = statistics.median(took)
            found[f"worst of {rows}"] = max(took)
        writer.close()
    return found


def interactions(cycle: int, steps: int, layers: int) -> Iterator[tuple[str, str]]:
    """Yield (name, script) of ten things a viewer does; no two cycles ask for the same."""
    middle, width = steps * (cycle + 1) // 6, steps // (4 + 3 * cycle)
    low, high = max(0, middle - width), min(steps - 1, middle + width)
    layer = f"block.{(7 * cycle + 3) % (layers // 2)}.weight"
    tab = "document.getElementById('tab-{}').click()".format
    prop = "dash_clientside.set_props('{}', {{value: {}}})".format
    yield "tab overview", tab("overview")
    yield (
        "zoom",
        f"Plotly.relayout(document.querySelector('#overview-chart .js-plotly-plot'), {{'xaxis.range[0]': {low}, 'xaxis.range[1]': {high}}})",
    )
    yield "tab layers", tab("layers")
    yield "metric", prop("metric", json.dumps(METRICS[cycle % len(METRICS)]))
    yield "layer", prop("layer", json.dumps(layer))
    yield "tab whatif", tab("whatif")
    yield "slider", prop("scale", 6 + 2 * cycle)
    yield "tab events", tab("events")
    yield "tab findings", tab("findings")
    yield (
        "all steps",
        "document.activeElement.blur(), document.dispatchEvent(new KeyboardEvent('keydown', {key: 'r', bubbles: true}))",
    )


class Answers:
    """What the server answered to a page: kind, body and milliseconds of each callback that is no poll."""

    def __init__(self, page: Any) -> None:
        self.open, self.took, self.bodies = 0, [], []  # type: ignore[var-annotated]
        page.on("request", lambda r: self._count(r, 1))
        page.on("requestfailed", lambda r: self._count(r, -1))
        page.on("requestfinished", self._done)

    @staticmethod
    def _counts(request: Any) -> bool:
        return "_dash-update-component" in request.url and "have-poll" not in (request.post_data or "")

    def _count(self, request: Any, by: int) -> None:
        self.open += by if self._counts(request) else 0

    def _done(self, request: Any) -> None:
        if self._counts(request):
            self.open -= 1
            self.took.append(float(request.response().headers[TOOK.lower()]))
            self.bodies.append(request.post_data)

    def settle(self, page: Any) -> None:
        """Wait until nothing was asked for 200 ms."""
        quiet = 0
        while quiet < 4:
            page.wait_for_timeout(50)
            quiet = 0 if self.open else quiet + 1


def drive(browser: Any, url: str, name: str, steps: int, layers: int, start: float) -> dict[str, Any]:
    """Open the page, do 50 things, then let ten viewers ask for the same at once."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(120_000)
    answers = Answers(page)
    page.goto(f"{url}?run={name}", wait_until="commit")
    page.wait_for_selector("#panel-overview .js-plotly-plot .main-svg .scatterlayer path", state="attached")
    found: dict[str, Any] = {"paint": time.perf_counter() - start}
    answers.settle(page)
    per: list[tuple[str, float]] = []
    answers.bodies.clear()
    for cycle in range(5):
        for kind, script in interactions(cycle, steps, layers):
            answers.took.clear()
            page.evaluate(f"void ({script})")
            answers.settle(page)
            if answers.took:
                per.append((kind, max(answers.took)))
    page.close()
    found["took"], found["of"] = per, 50
    found["one"] = replay(url, answers.bodies, 1)
    found["ten"] = replay(url, answers.bodies, VIEWERS)
    return found


def replay(url: str, bodies: list[str], viewers: int) -> tuple[float, float, int]:
    """Ask what a viewer asked, from so many at once; return (median ms, seconds in all, answers that are not 200)."""
    at = urlsplit(url)
    took: list[float] = []
    wrong: list[int] = []

    def view() -> None:
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=120)
        for body in bodies:
            began = time.perf_counter()
            connection.request("POST", "/_dash-update-component", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            took.append(1e3 * (time.perf_counter() - began))
            if answer.status not in (200, 204):
                wrong.append(answer.status)
        connection.close()

    threads = [threading.Thread(target=view) for _ in range(viewers)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.median(took), time.perf_counter() - began, len(wrong)


def line(what: str, value: float, unit: str, limit: float, more: str = "") -> None:
    """Print a row of the table."""
    verdict = "hit" if value <= limit else "MISS"
    print(f"  {what:38s} {value:9.2f} {unit:3s} asked {limit:7.2f}  {verdict:4s} {more}", flush=True)


def one(browser: Any, logs: Path, said: str) -> None:
    """Measure on one log, and print."""
    name, steps, layers, batch, paint = LOGS[said]
    folder = logs / f"{name}-{steps}x{layers}"
    folder.mkdir(parents=True, exist_ok=True)
    make(folder, name, steps, layers, batch)
    print(said)
    start = time.perf_counter()
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(folder)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    listening = time.perf_counter() - start
    try:
        found = drive(browser, url, name, steps, layers, start)
    finally:
        server.terminate()
    rest = server.stdout.read().split()
    line("first useful paint", found["paint"], "s", paint, f"({listening:.2f} s of it until the server listens)")
    took = [ms for _, ms in found["took"]]
    kind, slow = max(found["took"], key=lambda pair: pair[1])
    line("interactions, median", statistics.median(took), "ms", 400, f"({len(took)} of {found['of']} asked the server)")
    line("interactions, worst", slow, "ms", 1000, f"({kind})")
    alone, ten = found["one"], found["ten"]
    line(
        "ten viewers at once, median", ten[0], "ms", 1000,
        f"(alone {alone[0]:.0f} ms; all {ten[1]:.1f} s, alone {alone[1]:.1f} s; {ten[2]} failed)",
    )  # fmt: skip
    line("peak memory of the server", float(rest[-1]) if rest else float("nan"), "GB", 1.5)
    ticks = json.loads(subprocess.check_output([sys.executable, __file__, "--tick", str(folder), said], text=True))
    line("live tick, 1 new row", ticks["1"], "ms", 150, f"(worst {ticks['worst of 1']:.0f})")
    line("live tick, 100 new rows", ticks["100"], "ms", 150, f"(worst {ticks['worst of 100']:.0f})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", default=None, help="folder in which the logs are kept")
    parser.add_argument("--only", choices=[run for run, *_ in LOGS.values()], default=None, help="one of the logs")
    parser.add_argument("--serve", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--tick", nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return 0
    if args.tick:
        name, steps, layers, *_ = LOGS[args.tick[1]]
        print(json.dumps(tick(Path(args.tick[0]), name, steps, layers)))
        return 0
    from playwright.sync_api import sync_playwright

    logs = Path(args.keep or tempfile.mkdtemp(prefix="ampscope-bench-"))
    try:
        with sync_playwright() as playwright:
            began = time.perf_counter()
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            print(f"Chromium's own start: {time.perf_counter() - began:.2f} s, not counted below")
            for said, (run, *_) in LOGS.items():
                if args.only in (None, run):
                    one(browser, logs, said)
            browser.close()
    finally:
        if not args.keep:
            shutil.rmtree(logs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
