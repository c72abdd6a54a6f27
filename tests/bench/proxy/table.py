"""The Markdown tables of run.py: the median of all rounds."""

from __future__ import annotations

import statistics

import load


def middle(results: list[dict], *keys: str) -> float | None:
    """The median over the rounds of one (nested) value."""
    values = []
    for result in results:
        value = result
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            values.append(value)
    return statistics.median(values) if values else None


def show(value: float | None, digits: int = 2) -> str:
    """A number for a table cell."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def table(scenario: load.Scenario, results: dict[str, list[dict]]) -> str:
    """The Markdown table of one scenario."""
    rate = "events_s" if scenario.stream else "req_s"
    per = "cpu_s_per_1m_events" if scenario.stream else "cpu_s_per_1k_req"
    unit = "CPU s / 1M events" if scenario.stream else "CPU s / 1k req"
    heads = [
        "router",
        "events/s" if scenario.stream else "req/s",
        "x direct",
        unit,
        "CPU x nginx",
        "p50 ms",
        "p99 ms",
        "RSS MB",
        "threads",
        "proxy cores",
        "other cores",
        "errors",
    ]
    if scenario.stream:
        heads[5:7] = ["TTFT p50 ms", "TTFT p99 ms", "added TTFT p50 ms"]
    if scenario.stamps:
        heads[8:8] = ["router TTFT p50 ms", "there", "back", "relay p50 ms", "relay p99 ms", "gap p99 ms"]
    direct = middle(results.get("direct", []), rate)
    nginx = middle(results.get("nginx", []), per)
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, rounds in results.items():
        if not rounds:
            continue
        value, cpu = middle(rounds, rate), middle(rounds, per)
        errors: dict[str, int] = {}
        for result in rounds:
            for kind, count in result["errors"].items():
                errors[kind] = errors.get(kind, 0) + count
        latency = "first_ms" if scenario.stream else "latency_ms"
        cells = [
            name,
            show(value, 0),
            show(value / direct if direct and value else None),
            show(cpu, 3),
            show(cpu / nginx if nginx and cpu else None),
            show(middle(rounds, latency, "p50")),
            show(middle(rounds, latency, "p99")),
            show(middle(rounds, "rss_mb"), 0),
            show(middle(rounds, "threads"), 0),
            show(middle(rounds, "proxy_cpu")),
            show(middle(rounds, "other_cpu")),
            " ".join(f"{k}:{v}" for k, v in errors.items()) or "0",
        ]
        if scenario.stream:
            cells[7:7] = [show(middle(rounds, "added_ms", "p50"))]
        if scenario.stamps:
            cells[8:8] = [
                show(middle(rounds, "router_ms", "p50")),
                show(middle(rounds, "way_there_ms", "p50")),
                show(middle(rounds, "way_back_ms", "p50")),
                show(middle(rounds, "relay_ms", "p50")),
                show(middle(rounds, "relay_ms", "p99")),
                show(middle(rounds, "gap_ms", "p99")),
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
