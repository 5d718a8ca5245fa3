"""Pictures of the dashboard: the few in docs/images/ that the README shows, and with --all one a tab, theme and width.

    python benchmarks/screenshots.py                    # trains three small runs, writes docs/images/*.png
    python benchmarks/screenshots.py --logs logs --all  # every tab of your newest run, into artifacts/screenshots/

Needs Chromium (`--chromium PATH`) and playwright. A picture of docs/images/ larger than 200 kB is an error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import urlencode

ROOT = Path(__file__).parent.parent
LIMIT = 200_000
TABS = ("overview", "layers", "events", "whatif", "compare", "findings")
SIZES = {"wide": (1280, 860), "phone": (390, 844)}
PICTURES = {
    "overview.png": ("light", {"run": "amp", "tab": "overview"}, None),
    "overview-dark.png": ("dark", {"run": "nan", "tab": "overview", "theme": "dark"}, None),
    "layers.png": (
        "light",
        {"run": "no-scaling", "tab": "layers", "metric": "underflow_ratio", "layer": "encoder.1.linear1.weight"},
        None,
    ),
    "exponents.png": (
        "light",
        {"run": "no-scaling", "tab": "layers", "layer": "encoder.1.linear1.weight"},
        "#layer-picture",
    ),
    "what-if.png": ("light", {"run": "no-scaling", "tab": "whatif", "scale": "12"}, None),
}
"""File → (colour scheme, what the URL holds, the element to show or None for the window)."""


def train(log_dir: Path) -> None:
    """Train a small transformer three times with FP16 autocast on the CPU: well scaled, unscaled, with a NaN in its loss."""
    import torch

    import ampscope

    torch.set_num_threads(1)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Linear(16, 32)
            layers = [torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(3)]
            self.encoder = torch.nn.ModuleList(layers)
            self.head = torch.nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for layer in self.encoder:
                x = layer(x)
            return self.head(x).squeeze(-1)

    def run(
        name: str, steps: int, init_scale: float, interval: int, weight: float, nan_at: tuple[int, ...] = ()
    ) -> None:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=interval)
        x, y = torch.randn(8, 6, 16), torch.randn(8, 6)
        with ampscope.watch(scaler, model, log_dir=log_dir, run=name, probe_every=20, tensorboard=False):
            for step in range(steps):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = (model(x + 0.1 * torch.randn_like(x)).float() - y).pow(2).mean() * weight
                if step in nan_at:
                    loss = loss * float("nan")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

    run("no-scaling", 300, 1.0, 100_000, 1e-5)
    run("nan", 300, 2.0**16, 60, 1.0, (120, 121, 210))
    run("amp", 600, 2.0**17, 60, 1.0)


def shoot(
    log_dir: Path, pictures: list[tuple[Path, str, dict[str, str], str | None, tuple[int, int]]], chromium: str
) -> None:
    """Serve the dashboard of a folder here and take the pictures."""
    from ampscope_dashboards.app import create_app
    from playwright.sync_api import sync_playwright
    from waitress.server import create_server

    server = create_server(create_app(log_dir).server, host="127.0.0.1", port=0, threads=4)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for path, scheme, query, part, (width, height) in pictures:
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.goto(f"http://127.0.0.1:{server.effective_port}/?{urlencode(query)}")
                page.wait_for_function(
                    """() => {
                        const panel = document.querySelector(".panel:not([hidden])");
                        if (!panel || !document.querySelector("#state").textContent) return false;
                        const seen = [...panel.querySelectorAll(".js-plotly-plot")].filter((g) => g.offsetWidth);
                        const none = !panel.querySelector(".chart-box");
                        return none || (seen.length && seen.every((g) => g.layout && g.layout.uirevision !== "message"));
                    }""",
                    timeout=30_000,
                )
                page.wait_for_timeout(2500)
                path.parent.mkdir(parents=True, exist_ok=True)
                if part is None:
                    page.screenshot(path=path, full_page="screenshots" in path.parts)
                else:  # not locator.screenshot: it scrolls, and the tabs stick to the top of the window
                    page.screenshot(path=path, full_page=True, clip=page.locator(part).bounding_box())
                print(path)
                page.close()
            browser.close()
    finally:
        server.close()
        thread.join(5)


def main(argv: list[str] | None = None) -> int:
    """Take the pictures; return 1 if one for the README is too large."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--logs", type=Path, help="a log folder of yours instead of the trained runs")
    parser.add_argument(
        "--all", action="store_true", help="one picture a tab, theme and width, into artifacts/screenshots/"
    )
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        logs = chosen.logs
        if logs is None:
            logs = Path(folder) / "logs"
            train(logs)
        if chosen.all:
            target = ROOT / "artifacts" / "screenshots"
            pictures = [
                (target / f"{tab}-{theme}-{size}.png", theme, {"tab": tab}, None, SIZES[size])
                for tab in TABS
                for theme in ("light", "dark")
                for size in SIZES
            ]
            shoot(logs, pictures, chosen.chromium)
            return 0
        target = ROOT / "docs" / "images"
        shoot(
            logs,
            [(target / n, scheme, q, part, SIZES["wide"]) for n, (scheme, q, part) in PICTURES.items()],
            chosen.chromium,
        )
    large = [p for p in target.glob("*.png") if p.stat().st_size > LIMIT]
    for path in large:
        print(f"{path}: {path.stat().st_size} bytes, more than {LIMIT}", file=sys.stderr)
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main())
