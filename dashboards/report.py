"""The offline report: the dashboard's views of one run as one HTML file, plotly.js inside, no request to anywhere."""

from __future__ import annotations

import html
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plotly.offline import get_plotlyjs

from .figures import layer as layer_figures
from .figures import layers as layers_figures
from .figures import overview as overview_figures
from .figures.metrics import STYLES
from .figures.theme import CONFIG
from .source import Source
from .views import events as events_view
from .views import findings as findings_view
from .views import health as health_view
from .views import layer as layer_view
from .views import layers as layers_view
from .views import overview as overview_view
from .views.common import Range

if TYPE_CHECKING:
    from ampscope.analysis.finding import Finding
    from ampscope.run.run import Run

WHOLE = Range(None, None)
HEATMAPS = ("underflow_ratio", "headroom_bits", "grad_norm")
EVENTS = 200
"""Events listed; the rest is counted."""
ROWS, COLUMNS = 120, 300
"""Of a heatmap: the file stays under 8 MB with plotly.js inside."""

STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --muted: #57606a; --line: #d0d7de; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #fff; max-width: 1100px; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .2rem; }
.hint, footer { color: var(--muted); font-size: .9rem; margin: 0 0 .6rem; }
.health { border-left: 4px solid #0072B2; padding: .6rem 1rem; background: #f6f8fa; margin: 1rem 0; }
.health.error { border-color: #b3261e; } .health.warning { border-color: #9a6700; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; } th, td { text-align: left; padding: .25rem .5rem; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
td:nth-child(-n+3) { white-space: nowrap; } dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .3rem 0; } dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
article { border: 1px solid var(--line); border-radius: 6px; padding: .8rem 1rem; margin: .6rem 0; break-inside: avoid; } article h3 { margin: 0; font-size: 1rem; }
@media print { section { break-inside: avoid; } body { padding: 0; max-width: none; } .modebar { display: none !important; } }
@media (max-width: 480px) { body { padding: .8rem; } }
"""


def write(run: Run, path: Path, *, force: bool = False, now: float | None = None) -> Path:
    """Write the report of a run; return the path.

    Raises:
        AmpscopeError: the file exists and `force` is not given, or cannot be written.
    """
    from ampscope.errors import AmpscopeError

    if path.exists() and not force:
        raise AmpscopeError(f"{str(path)!r} exists; choose another name with -o, or overwrite it with --force")
    text = render(run, time.time() if now is None else now)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise AmpscopeError(f"cannot write {str(path)!r} ({error.strerror or error})") from None
    return path


def render(run: Run, now: float) -> str:
    """Return the report as HTML."""
    from ampscope.analysis.diagnose import diagnose

    source = Source(run.name, run)
    rank = run.ranks[0] if run.ranks else 0
    findings = diagnose(run) if len(run.steps) else []
    parts: list[str] = []
    charts: list[Any] = []

    def chart(title: str, hint: str, figure: Any) -> None:
        parts.append(
            f"<section><h2>{html.escape(title)}</h2><p class='hint'>{html.escape(hint)}</p><div class='chart' id='c{len(charts)}'></div></section>"
        )
        charts.append(figure)

    parts.append(
        f"<header><h1>{html.escape(run.name)}</h1><p class='hint'>{html.escape(subtitle(run, now))}</p></header>"
    )
    if not len(run.steps):
        parts.append("<p class='health'>No step is recorded yet.</p>")
    else:
        parts.append(sentence(source, rank, findings))
        view = overview_view.overview(source, rank, WHOLE)
        chart(
            "Is the training healthy?",
            "Loss scale, skips, loss, gradient norm and underflow over steps.",
            overview_figures.figure(view, "light", "report"),
        )
        for metric in HEATMAPS:
            found = layers_view.layer_map(source, rank, metric, WHOLE, order="worst", rows=ROWS, columns=COLUMNS)
            if found.rows and found.values.shape[1]:
                title = f"Which layer? {STYLES[metric].title}"
                more = f" {found.left_out} further rows are left out." if found.left_out else ""
                chart(
                    title,
                    f"One row a layer, worst first.{more}",
                    layers_figures.figure(found, "light", "report", WHOLE),
                )
        worst = worst_layer(source, rank)
        exponents = layer_view.exponents(source, rank, worst, WHOLE) if worst is not None else None
        if exponents is not None and worst is not None:
            chart(
                f"How large are the gradients of {run.layers[worst].name}?",
                "Share of elements by power of two, over steps, with FP16's limits.",
                layer_figures.exponents(exponents, "light", "report"),
            )
        parts.append(finding_list(findings))
        parts.append(event_table(source))
    body = "\n".join(parts)
    return page(run.name, body, charts)


def worst_layer(source: Source, rank: int) -> int | None:
    """Return the layer that loses most, or the first."""
    name, _ = health_view.worst_underflow(source, rank)
    found = layer_view.find(source, name)
    return found if found is not None else (0 if source.layers else None)


def sentence(source: Source, rank: int, findings: Sequence[Finding]) -> str:
    """Return the sentence of health."""
    from .background import Verdict

    words = health_view.health(source, rank, Verdict(list(findings)))
    remedy = f"<br>{html.escape(words.remedy)}" if words.remedy else ""
    return f"<p class='health {words.level}'><strong>{html.escape(words.sentence)}</strong>{remedy}</p>"


def subtitle(run: Run, now: float) -> str:
    """Return one line on where and when the run was made."""
    meta = run.metadata
    versions = ", ".join(f"{k} {v}" for k, v in dict(meta.get("versions", {})).items())
    state = "ended" if run.finished else "not ended when this was written"
    return f"{len(run.steps):,} steps, {len(run.layers)} layers, {meta.get('device', '')}; {versions}; {state}; report of {time.strftime('%Y-%m-%d %H:%M', time.localtime(now))}"


def finding_list(findings: Sequence[Finding]) -> str:
    """Return the findings."""
    out = ["<section><h2>What is wrong, and what to change?</h2>"]
    for card in findings_view.cards(list(findings)):
        pairs = "".join(
            f"<dt>{html.escape(str(k))}</dt><dd>{html.escape(str(v))}</dd>" for k, v in [*card.facts, *card.evidence]
        )
        out.append(
            f"<article><h3>{html.escape(card.sign)}: {html.escape(card.title)}</h3><dl>{pairs}<dt>what to do</dt><dd>{html.escape(card.remedy)}</dd></dl></article>"
        )
    if len(out) == 1:
        out.append("<p>Nothing was found.</p>")
    return "".join([*out, "</section>"])


def event_table(source: Source) -> str:
    """Return the events, the first `EVENTS` of them."""
    items = events_view.all_items(source)
    rows = []
    for item in items[:EVENTS]:
        e = item.event
        cells = (e.step, e.kind, e.phase, ", ".join(e.layers[:3]), e.op, e.where, e.message)
        rows.append("<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in cells) + "</tr>")
    more = (
        f"<p class='hint'>{len(items) - EVENTS:,} further events are left out; ampscope export has all.</p>"
        if len(items) > EVENTS
        else ""
    )
    head = "".join(f"<th>{h}</th>" for h in ("step", "kind", "phase", "layers", "op", "where", "what"))
    return f"<section><h2>What happened?</h2>{more}<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></section>"


def page(title: str, body: str, charts: Sequence[Any]) -> str:
    """Return the whole document. Everything a log said is text: escaped in HTML, and in scripts unable to end them."""
    data = json.dumps(list(charts)).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    config = json.dumps({**CONFIG, "responsive": True})
    script = (
        f"var charts={data},config={config};charts.forEach(function(f,i){{"
        "Plotly.newPlot('c'+i,f.data,Object.assign({autosize:true},f.layout),config)});"
    )
    plotly = get_plotlyjs().replace("</script", "<\\/script")
    policy = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
    return (
        f"<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>ampscope: {html.escape(title)}</title><link rel='icon' href='data:,'><style>{STYLE}</style><script>{plotly}</script></head>"
        f"<body>{body}<footer>Made by ampscope; this file needs no network.</footer><script>{script}</script></body></html>"
    )
