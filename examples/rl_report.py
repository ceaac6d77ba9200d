"""What `rl_weight_sync.py` shows: live progress, the table at the end, the chart."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Series = dict[str, list[Any]]
"""What happened, one entry a step under each name; times in seconds, `pull_s`, `versions`, `workers` one a rollout."""

TAIL = 10  # a single step is noisy: the reward reached is the mean of this many


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def sync_s(series: Series) -> list[float]:
    """Time spent on weights at each step, seconds: the publish and the slowest worker's pull."""
    return [publish + max(pulls) for publish, pulls in zip(series["publish_s"], series["pull_s"], strict=True)]


def summarize(series: Series, target: float) -> dict[str, Any]:
    """The run in one line of numbers; `steps_to_target` is None where the mean of TAIL steps never reached `target`."""
    sync, reward = sync_s(series), series["reward"]
    versions = [version for used in series["versions"] for version in used]
    ages = [step - v for step, used in zip(series["step"], series["versions"], strict=True) for v in used]
    tails = (mean(reward[max(0, i - TAIL + 1) : i + 1]) for i in range(len(reward)))
    reached = next((i for i, tail in enumerate(tails) if tail >= target), None)
    return {
        "target": target,
        "reward_first": reward[0],
        "reward_last": mean(reward[-TAIL:]),
        "exact_last": mean(series["exact"][-TAIL:]),
        "steps_to_target": None if reached is None else series["step"][reached],
        "seconds_to_target": None if reached is None else sum(series["step_s"][: reached + 1]),
        "versions_used": len(set(versions)),
        "version_first": min(versions),
        "version_last": max(versions),
        "version_age_mean": mean(ages),
        "restarts": series["restarts"][-1],
        "weight_bytes": sum(series["weight_bytes"]),
        "rollout_bytes": sum(series["rollout_bytes"]),
        "sync_ms_median": 1e3 * sorted(sync)[len(sync) // 2],
        "sync_share": sum(sync) / sum(series["step_s"]),
        "seconds": sum(series["step_s"]),
    }


class Display:
    """Progress while it trains: one live line in a terminal, a plain line every ten steps elsewhere."""

    def __init__(self, steps: int) -> None:
        self.console = Console()
        self.steps = steps
        self.restarts = 0
        self.progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("", total=steps, text="starting the workers")

    def __enter__(self) -> Display:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.progress.stop()

    def show(self, series: Series) -> None:
        """Called after each step."""
        now = {key: values[-1] for key, values in series.items()}
        step, oldest, newest = now["step"], min(now["versions"]), max(now["versions"])
        if now["restarts"] > self.restarts:
            self.restarts = now["restarts"]
            self.console.print(f"step {step}: a worker died and is started again; training goes on with the others")
        used = f"v{oldest}" if oldest == newest else f"v{oldest}-{newest}"
        sync = sync_s(series)[-1]
        rate = 1e-6 * now["weight_bytes"] / sync
        score = f"reward {now['reward']:.2f}  exact {now['exact']:.2f}"
        rest = f"weights {used:<9} {rate:5,.0f} MB/s  sync {1e3 * sync:4.1f} ms"
        self.progress.update(self.task, completed=step, text=f"[bold green]{score}[/]  {rest}")
        if not self.console.is_terminal and (step % 10 == 0 or step in (1, self.steps)):
            print(f"step {step:4d}/{self.steps}  {score}  {rest}", flush=True)

    def table(self, summary: dict[str, Any]) -> None:
        """The run in one table."""
        s, reached = summary, "not reached"
        if s["steps_to_target"] is not None:
            reached = f"at step {s['steps_to_target']}, after {s['seconds_to_target']:.0f} s"
        table = Table(title="Learning to sort, with weights through TensorLink", show_header=False)
        for row in (
            ("reward, first step", f"{s['reward_first']:.3f}"),
            (f"reward, last {TAIL} steps", f"{s['reward_last']:.3f}  ({s['exact_last']:.0%} of answers all right)"),
            (f"reward of {s['target']}", reached),
            ("weight versions used", f"{s['versions_used']}  (v{s['version_first']} to v{s['version_last']})"),
            ("age of the weights, mean", f"{s['version_age_mean']:.2f} versions"),
            ("workers started again", f"{s['restarts']}"),
            ("bytes moved", f"{1e-6 * s['weight_bytes']:.1f} MB weights, {1e-6 * s['rollout_bytes']:.1f} MB rollouts"),
            ("sync time, median step", f"{s['sync_ms_median']:.2f} ms  (publish + slowest pull)"),
            ("sync share of a step", f"{s['sync_share']:.2%}"),
            ("training time", f"{s['seconds']:.1f} s"),
        ):
            table.add_row(*row)
        self.console.print(table)


INK, MUTED, GRID = "#1c2733", "#6b7785", "#e6e9ed"
BLUE, TEAL, ORANGE = "#2563c9", "#1a9a8a", "#d9651f"


def draw(series: Series, summary: dict[str, Any], path: Path) -> None:
    """Two panels over the steps: reward, and time spent on weights. Lines carry their names, so there is no legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = series["step"]
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(9, 7), height_ratios=(3, 2), sharex=True, layout="constrained")
    _reward_panel(top, series, summary["target"])
    _sync_panel(bottom, series)
    for axes in (top, bottom):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
        axes.tick_params(length=0, colors=MUTED)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
    for before, after, step in zip(series["restarts"], series["restarts"][1:], steps[1:], strict=False):
        if after > before:
            top.axvline(step, color=ORANGE, linewidth=1, linestyle=(0, (3, 2)))
            bottom.axvline(step, color=ORANGE, linewidth=1, linestyle=(0, (3, 2)))
            top.annotate(" worker killed,\n started again", (step, 0.04), color=ORANGE, fontsize=9)
    bottom.set_xlabel("training step (= version of the weights)", color=MUTED)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def _reward_panel(axes: Any, series: Series, target: float) -> None:
    steps, workers = series["step"], len({name for names in series["workers"] for name in names})
    axes.set_title("Learning to sort five digits from a reward alone", loc="left", color=INK, fontweight="bold", pad=24)
    axes.text(
        0,
        1.03,
        f"one trainer, {workers} rollout worker{'s' * (workers > 1)}; mean over the rollouts of each step",
        transform=axes.transAxes,
        color=MUTED,
        fontsize=10,
    )
    axes.axhline(target, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
    for name, key, color in (("digits in place (reward)", "reward", BLUE), ("answers all right", "exact", TEAL)):
        axes.plot(steps, series[key], color=color, linewidth=1.8)
        half = next((i for i, value in enumerate(series[key]) if value >= 0.5), len(steps) - 1)
        side = ("right", -8) if key == "reward" else ("left", 8)
        axes.annotate(
            name,
            (steps[half], series[key][half]),
            xytext=(side[1], 0),
            textcoords="offset points",
            ha=side[0],
            va="center",
            color=color,
            fontsize=10,
        )
    axes.set_ylim(0, 1.02)


def _sync_panel(axes: Any, series: Series) -> None:
    steps = series["step"]
    publish = [1e3 * value for value in series["publish_s"]]
    pull = [1e3 * max(values) for values in series["pull_s"]]
    share = sum(sync_s(series)) / sum(series["step_s"])
    axes.set_title(f"Sync time: {share:.2%} of a step", loc="left", color=INK, fontweight="bold", fontsize=11)
    axes.plot(steps, pull, color=BLUE, linewidth=1)
    axes.plot(steps, publish, color=ORANGE, linewidth=1)
    axes.set_yscale("log")
    axes.set_ylabel("ms", color=MUTED, rotation=0, labelpad=12)
    for name, values, color in (("slowest pull", pull, BLUE), ("publish", publish, ORANGE)):
        middle = sorted(values)[len(values) // 2]
        axes.annotate(
            f"{name}\n{middle:.2f} ms median",
            (1, middle),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=9,
        )
