"""The table and the chart of one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

GOOD, BAD, NEUTRAL = "#2a9d5c", "#c8452f", "#8a8f98"


def report(benchmarks: Path, results: Path) -> list[dict[str, Any]]:
    """Reads what pytest-benchmark wrote; prints the table; writes `ratios.json` and `ratios.png` into `results`."""
    run = json.loads(benchmarks.read_text())
    rows = [row for entry in run["benchmarks"] for row in entry["extra_info"]["rows"]]
    figures = {entry["name"]: entry["extra_info"]["figures"] for entry in run["benchmarks"]}
    notes = sorted({note for entry in run["benchmarks"] for note in entry["extra_info"].get("notes", [])})
    machine = {
        "cpu": run["machine_info"]["cpu"].get("brand_raw", "?"),
        "cores": run["machine_info"]["cpu"].get("count"),
    }
    document = {"when": run["datetime"], "machine": machine, "rows": rows, "notes": notes, "figures": figures}
    (results / "ratios.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    console = Console(width=150)
    console.print(table(rows))
    for note in notes:
        console.print(note)
    chart(rows, results / "ratios.png")
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(title="TensorLink against others, in one run; medians over rounds in which all take turns")
    for heading in ("group", "what", "figure", "against", "reference", "ratio", "target", "met"):
        made.add_column(heading, justify="right" if heading in ("figure", "reference", "ratio", "target") else "left")
    group = ""
    for row in rows:
        if row["group"] != group:
            made.add_section()
        made.add_row(
            "" if row["group"] == group else row["group"],
            row["what"],
            f"{row['figure']:.2f} {row['unit']}",
            row["against"],
            f"{row['reference']:.2f}",
            f"{row['ratio']:.2f}",
            wanted(row),
            {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[row["met"]],
        )
        group = row["group"]
    return made


def wanted(row: dict[str, Any]) -> str:
    """The target as text; empty where there is none."""
    if row["target"] is None:
        return ""
    return f"{'≤' if row['at_most'] else '≥'} {row['target']:g}"


def score(row: dict[str, Any]) -> float:
    """How good, on one scale: 1 is the target; without a target, 1 is as fast as the other."""
    goal = row["target"] or 1.0
    return float(goal / row["ratio"] if row["at_most"] else row["ratio"] / goal)


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """One bar a row, logarithmic, as a multiple of its target."""
    figure, axes = pyplot.subplots(figsize=(11, 0.34 * len(rows) + 1.6))
    labels = [f"{row['group']}: {row['what']} vs {row['against']}  {wanted(row)}" for row in rows]
    colours = [{None: NEUTRAL, True: GOOD, False: BAD}[row["met"]] for row in rows]
    scores = [score(row) for row in rows]
    axes.barh(range(len(rows)), [value - 1 for value in scores], left=1, color=colours, height=0.7)
    axes.set_xscale("log")
    low, high = min(0.5, *scores), max(2.0, *scores)
    axes.set_xlim(low / 1.5, high * 2)
    for at, (row, value) in enumerate(zip(rows, scores, strict=True)):
        text = f" {row['ratio']:.3g} " if row["target"] else f" {row['ratio']:.3g}x "
        axes.text(value, at, text, va="center", ha="left" if value >= 1 else "right", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("multiple of the target (grey: no target, multiple of the other's speed); right of 1 is better")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
