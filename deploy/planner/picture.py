"""A plan as a picture: how many promises are kept at which rate, for the splits that were looked into.

Owns: the drawing, as SVG in a page of HTML that needs nothing else, or as PNG where matplotlib is installed. Never: a
number that is not in the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from baton.common.errors import ConfigError
from baton.deploy.planner.outcome import told_s
from baton.deploy.planner.search import Option, Plan

WIDTH, HEIGHT = 820, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 24, 56
COLOURS = ("#0b7285", "#e8590c", "#868e96", "#ced4da")
"""The best split, colocated, others."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 860px; margin: 2rem auto; padding: 0 1rem; color: #212529; }
h1 { font-size: 1.3rem; } table { border-collapse: collapse; } td, th { padding: .25rem .8rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr { border-bottom: 1px solid #dee2e6; }
"""


def drawn(plan: Plan) -> list[tuple[Option, str]]:
    """What is shown, in which colour."""
    return list(zip((plan.best, plan.colocated, *plan.others), COLOURS, strict=False))


def write_picture(plan: Plan, verdict: str, path: Path) -> None:
    """Raises ConfigError when it is asked for a kind of file that cannot be made here."""
    match path.suffix:
        case ".html":
            _write(path, page(plan, verdict).encode())
        case ".svg":
            _write(path, chart(plan).encode())
        case ".png":
            _write_png(plan, path)
        case _:
            raise ConfigError("--out", str(path), "is drawn as .html, .svg or .png", "--out plan.html")


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError("--out", str(path), f"cannot be written: {error.strerror}", "--out plan.html") from error


def page(plan: Plan, verdict: str) -> str:
    """HTML that loads nothing."""
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in verdict.splitlines() if line)
    head = f'<meta charset="utf-8"><title>Baton: plan for {escape(plan.trace.name)}</title><style>{STYLE}</style>'
    title = f"<h1>{escape(plan.trace.name)}: {escape(str(plan.slo))}</h1>"
    body = f"{title}{paragraphs}{chart(plan)}{_table(plan)}"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"


def _table(plan: Plan) -> str:
    names = "split", "goodput, requests/s", "TTFT p50", "TTFT p99", "gaps p99", "prefill busy", "decode busy"
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for option, _ in drawn(plan):
        load = option.at_goodput
        times = [told_s(one) for one in (load.ttft_p50_s, load.ttft_p99_s, load.itl_p99_s)]
        goodput = "less" if option.goodput is None else f"{option.goodput:.3g}"
        cells = str(option.split), goodput, *times, f"{load.prefill_busy:.0%}", f"{load.decode_busy:.0%}"
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def chart(plan: Plan) -> str:
    """SVG: share of requests whose promises are kept, over the rate of requests."""
    top = max((load.rate for option, _ in drawn(plan) for load in option.curve), default=1.0)
    inner = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(rate: float, share: float) -> tuple[float, float]:
        return LEFT + inner[0] * rate / top, TOP + inner[1] * (1 - share)

    parts = [_grid(at, top)]
    x1, y = at(0, plan.target)
    x2, _ = at(top, plan.target)
    parts.append(f'<path d="M{x1:.1f} {y:.1f}H{x2:.1f}" stroke="#c92a2a" stroke-dasharray="5 4"/>')
    parts.append(_text(x2 + 8, y + 4, f"{plan.target:.0%} wanted", "start", "#c92a2a"))
    for number, (option, colour) in enumerate(drawn(plan)):
        points = [at(load.rate, load.attainment) for load in option.curve]
        if points:
            line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        legend_y = HEIGHT - BOTTOM - 24 * (1 + number)
        parts.append(_text(WIDTH - RIGHT + 12, legend_y, _legend(option), "start", colour))
    namespace = 'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="13"'
    return f'<svg {namespace} viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">{"".join(parts)}</svg>'


def _legend(option: Option) -> str:
    return str(option.split) if option.goodput is None else f"{option.split}: {option.goodput:.3g}/s"


def _grid(at: Callable[[float, float], tuple[float, float]], top: float) -> str:
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x1, y), (x2, _) = at(0, share), at(top, share)
        parts.append(
            f'<path d="M{x1:.1f} {y:.1f}H{x2:.1f}" stroke="#e9ecef"/>{_text(x1 - 8, y + 4, f"{share:.0%}", "end")}'
        )
    for number in range(6):
        x, y = at(top * number / 5, 0.0)
        parts.append(_text(x, y + 20, f"{top * number / 5:.3g}", "middle"))
    x, y = at(top / 2, 0.0)
    parts.append(_text(x, y + 42, "requests per second", "middle"))
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#495057") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _write_png(plan: Plan, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        way_out = "pip install matplotlib, or --out plan.html, which needs nothing"
        raise ConfigError("--out", str(path), "PNG is drawn by matplotlib, which is not installed", way_out) from error
    figure = Figure(figsize=(8.2, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for option, colour in drawn(plan):
        rates, shares = [load.rate for load in option.curve], [load.attainment for load in option.curve]
        axes.plot(rates, shares, "o-", color=colour, label=_legend(option))
    axes.axhline(plan.target, color="#c92a2a", linestyle="--", linewidth=1)
    axes.set(
        xlabel="requests per second", ylabel="share whose promises are kept", title=f"{plan.trace.name}: {plan.slo}"
    )
    axes.set_ylim(-0.02, 1.02)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError("--out", str(path), f"cannot be written: {error.strerror}", "--out plan.html") from error
