"""Makes the Grafana dashboard beside it: `python -m baton.deploy.grafana.dashboard > deploy/grafana/baton.json`.

Owns: which panels there are, and their queries. Never: metrics (docs/OBSERVABILITY.md explains them).
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

RATE = "[$__rate_interval]"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


class Panel(NamedTuple):
    """`queries`: (legend, PromQL)."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""


def total(metric: str, by: str = "", where: str = "") -> str:
    """Per second, added up over all other labels."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{where}{RATE}))"


def quantiles(metric: str, where: str = "") -> tuple[tuple[str, str], ...]:
    buckets = total(f"{metric}_bucket", "le", where)
    return tuple((f"p{share * 100:.0f}", f"histogram_quantile({share}, {buckets})") for share in (0.5, 0.9, 0.99))


RECEIVED, SENT = '{direction="in"}', '{direction="out"}'

ROWS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel("Ended, by outcome", "reqps", (("{{outcome}}", total("baton_requests_total", "outcome")),)),
        Panel("Time to first token", "s", quantiles("baton_time_to_first_token_seconds")),
        Panel("Between two tokens", "s", quantiles("baton_inter_token_latency_seconds")),
        Panel("Whole answers", "s", quantiles("baton_request_seconds")),
        Panel("Output tokens", "short", (("tokens/s", total("baton_output_tokens_total")),)),
        Panel(
            "Prompt tokens, by where their KV came from", "short",
            (("{{source}}", total("baton_prompt_tokens_total", "source")),),
            "local: computed where it decodes; cached: found there; restored: from a tier; transferred: handed over.",
        ),
        Panel("In flight", "short", (("admitted and not ended", "sum(baton_requests_in_flight)"),)),
        Panel(
            "Waiting at gateways, by API key", "short",
            (("{{key}}", "sum by (key) (baton_waiting_requests)"),),
            "Workers have all that they can run. Keys share by weight (docs/ADMISSION.md).",
        ),
        Panel(
            "HTTP responses, by status", "reqps",
            (("{{status}}", total("baton_http_responses_total", "status")),),
        ),
    ),
    "Workers": (
        Panel("Live and silent", "short", (("{{role}} {{state}}", "sum by (role, state) (baton_workers)"),)),
        Panel(
            "Running and queued requests", "short",
            (("{{worker}} running", "baton_worker_running"), ("{{worker}} queued", "baton_worker_queued")),
        ),
        Panel("Tokens that wait to be computed", "short", (("{{worker}}", "baton_worker_queued_tokens"),)),
        Panel(
            "KV pages in use", "percentunit",
            (("{{worker}}", "1 - baton_worker_available_pages / (baton_worker_pages > 0)"),),
            "What is cached and can be had counts as free.",
        ),
        Panel("Steps", "ops", (("{{worker}}", f"rate(baton_worker_steps_total{RATE})"),)),
        Panel("Age of the current step", "s", (("{{worker}}", "baton_worker_step_age_seconds"),)),
        Panel(
            "What a step spends outside of the model", "s",
            ((
                "{{worker}}",
                f"rate(baton_worker_step_overhead_seconds_total{RATE}) / rate(baton_worker_steps_total{RATE})",
            ),),
            "Events, planning, telling. It grows with the running requests, and should stay small beside a step.",
        ),
    ),
    "Hand-offs": (
        Panel(
            "What requests wait for the transfer alone", "s", quantiles("baton_transfer_tail_seconds"),
            "All computed until committed: the number to keep small.",
        ),
        Panel("Asked for until committed", "s", quantiles("baton_transfer_handoff_seconds", RECEIVED)),
        Panel(
            "Speed of each lane while it had work", "Bps",
            ((
                "{{lane}}",
                total("baton_transfer_bytes_total", "lane", RECEIVED)
                + " / "
                + total("baton_transfer_busy_seconds_total", "lane", RECEIVED),
            ),),
        ),
        Panel(
            "KV moved", "Bps",
            (("{{peer}} to {{worker}}, {{lane}}", f"rate(baton_transfer_bytes_total{RECEIVED}{RATE})"),),
        ),
        Panel(
            "What went wrong", "ops",
            (
                ("failed", total("baton_transfer_failed_handoffs_total")),
                ("lane broke", total("baton_transfer_lane_failures_total")),
                ("lane changed", total("baton_transfer_lane_changes_total")),
                ("regions asked for again", total("baton_transfer_damaged_regions_total")),
                ("frames said again", total("baton_transfer_resent_frames_total")),
            ),
        ),
        Panel(
            "Senders without credit", "percentunit",
            (("{{worker}}", total("baton_transfer_credit_stall_seconds_total", "worker", SENT)),),
            "More staging (transfer.staging_ring_bytes, credit_regions) would help.",
        ),
        Panel("Staging slots", "short", (("{{worker}} {{ring}} {{state}}", "baton_staging_slots"),)),
    ),
    "Tiers": (
        Panel("Pages found below the pools", "short", (("{{tier}}", total("baton_tier_hits_total", "tier")),)),
        Panel("Used", "bytes", (("{{worker}} {{tier}}", "baton_tier_used_bytes"),)),
        Panel(
            "Damaged, or not written", "ops",
            (
                ("damaged", total("baton_tier_damaged_total")),
                ("not written", total("baton_tier_failed_writes_total")),
            ),
        ),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        position = {"x": 0, "y": y, "w": WIDTH * COLUMNS, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": position})
        y += 1
        for place, panel in enumerate(row):
            x = WIDTH * (place % COLUMNS)
            position = {"x": x, "y": y + HEIGHT * (place // COLUMNS), "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, position))
        y += HEIGHT * -(-len(row) // COLUMNS)
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "title": "Baton", "uid": "baton", "tags": ["baton", "llm"], "schemaVersion": 39, "version": 1, "editable": True,
        "refresh": "10s", "time": {"from": "now-30m", "to": "now"}, "templating": {"list": [source]}, "panels": panels,
    }  # fmt: skip


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    targets = [
        {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend, "datasource": source}
        for place, (legend, query) in enumerate(panel.queries)
    ]
    defaults = {"unit": panel.unit, "min": 0, "custom": {"lineWidth": 1, "fillOpacity": 8, "showPoints": "never"}}
    return {
        "id": number, "type": "timeseries", "title": panel.title, "description": panel.about, "gridPos": position,
        "datasource": source, "targets": targets, "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }  # fmt: skip


def text() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    print(text(), end="")
