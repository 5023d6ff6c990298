"""A plan as a picture: how many promises are kept at which rate, for the splits that were looked into.

Owns: what of a plan is drawn. Never: a number that is not in the plan, or how it is drawn (`charts`).
"""

from __future__ import annotations

from pathlib import Path

from baton.deploy.charts import Cells, Chart, Line, write
from baton.deploy.planner.outcome import told_s
from baton.deploy.planner.search import Option, Plan


def write_picture(plan: Plan, verdict: str, path: Path) -> None:
    """Raises ConfigError when it is asked for a kind of file that cannot be made here."""
    write(chart_of(plan), verdict, table_of(plan), path)


def chart_of(plan: Plan) -> Chart:
    lines = [Line(_legend(option), [(load.rate, load.attainment) for load in option.curve]) for option in _drawn(plan)]
    return Chart(f"{plan.trace.name}: {plan.slo}", lines, plan.target)


def table_of(plan: Plan) -> Cells:
    names = "split", "goodput, requests/s", "TTFT p50", "TTFT p99", "gaps p99", "prefill busy", "decode busy"
    rows = []
    for option in _drawn(plan):
        load = option.at_goodput
        times = [told_s(one) for one in (load.ttft_p50_s, load.ttft_p99_s, load.itl_p99_s)]
        goodput = "less" if option.goodput is None else f"{option.goodput:.3g}"
        prefill_busy = f"{load.prefill_busy:.0%}" if option.split.prefill else "—"
        rows.append([str(option.split), goodput, *times, prefill_busy, f"{load.decode_busy:.0%}"])
    return Cells(names, rows)


def _drawn(plan: Plan) -> list[Option]:
    return [plan.best, plan.colocated, *plan.others]


def _legend(option: Option) -> str:
    return str(option.split) if option.goodput is None else f"{option.split}: {option.goodput:.3g}/s"
