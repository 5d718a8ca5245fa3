"""The dashboard on large logs: first paint, answers, a live tick, memory. Generates the logs (fake clock), serves them, drives Chromium."""

from __future__ import annotations

import argparse
import contextlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

TABS = ("layers", "events", "whatif", "findings", "overview")


def serve(logs: str) -> None:
    """The server's process: prints its address, then its peak memory when it ends."""
    from ampscope_dashboards.reader import RunStore
    from ampscope_dashboards.warm import warm

    store = RunStore(logs)
    warm(store)
    from ampscope_dashboards.app import create_app
    from ampscope_dashboards.server import Server

    server = Server(create_app(logs, store=store), port=0)
    print(server.url, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, flush=True)


def drive(url: str, start: float, run: str) -> None:
    """Open the page, use it 50 times, print what was measured."""
    from playwright.sync_api import sync_playwright

    answers: list[float] = []

    def done(request) -> None:
        if request.method == "POST" and "_dash-update-component" in request.url:
            timing = request.timing
            answers.append(timing["responseEnd"] - timing["requestStart"])

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(120_000)
        page.on("requestfinished", done)
        page.goto(f"{url}?run={run}", wait_until="commit")
        page.wait_for_selector("#panel-overview .js-plotly-plot .main-svg .scatterlayer path", state="attached")
        print(
            f"first useful paint of the overview     {time.perf_counter() - start:7.2f} s after the start of the server"
        )
        page.wait_for_timeout(15_000)  # what is summarised in the background is not measured here
        answers.clear()
        for i in range(50):
            page.click(f"#tab-{TABS[i % len(TABS)]}")
            page.wait_for_timeout(500)
        clicks = list(answers)
        print(
            f"answers to 50 tab switches             {statistics.median(clicks):7.0f} ms median, {max(clicks):.0f} ms worst, {len(clicks)} answers"
        )
        browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--logs", default=None)
    parser.add_argument("--serve", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return 0
    from tests.helpers_log import bulk_run

    logs = Path(args.logs or tempfile.mkdtemp(prefix="ampscope-bench-"))
    name = f"big-{args.steps}x{args.layers}"
    if not (logs / name).exists():
        begin = time.perf_counter()
        bulk_run(logs, args.steps, args.layers, name=name)
        size = sum(f.stat().st_size for f in (logs / name).iterdir())
        print(
            f"log of {args.steps:,} steps x {args.layers} layers      {size / 1e6:7.0f} MB, made in {time.perf_counter() - begin:.0f} s"
        )
    start = time.perf_counter()
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(logs)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    try:
        drive(url, start, name)
    finally:
        server.terminate()
    rest = server.stdout.read().split()
    if rest:
        print(f"peak memory of the server              {float(rest[-1]):7.2f} GB")
    if not args.logs:
        shutil.rmtree(logs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
