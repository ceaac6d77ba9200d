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
    """Time spent on weights at each step, seconds: the publish, and the slowest worker's pull from the moment there was
    something new. The two may overlap, so that this is the most that the sync can have cost."""
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
BLUE, TEAL, ORANGE, RED = "#2563c9", "#1a9a8a", "#c77a0a", "#c0392b"


def draw(series: Series, summary: dict[str, Any], path: Path) -> None:
    """Two panels over the steps: reward, and time spent on weights. Lines carry their names, so there is no legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, (top, bottom) = plt.subplots(2, 1, figsize=(9, 7), height_ratios=(3, 2), sharex=True, layout="constrained")
    _reward_panel(top, series, summary)
    _sync_panel(bottom, series, summary)
    for axes in (top, bottom):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GRID)
        axes.tick_params(which="both", length=0, colors=MUTED)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(x=0.01)
        for step, before, after in zip(series["step"][1:], series["restarts"], series["restarts"][1:], strict=False):
            if after > before:
                axes.axvline(step, color=RED, linewidth=1, linestyle=(0, (3, 2)))
                if axes is top:
                    side = "left" if step <= len(series["step"]) / 3 else "right"
                    note = " a worker was killed \n and started again "
                    axes.annotate(note, (step, 0.87), ha=side, va="top", color=RED, fontsize=9).set_in_layout(False)
    bottom.set_xlabel("training step", color=MUTED)
    bottom.xaxis.get_major_locator().set_params(integer=True)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def _reward_panel(axes: Any, series: Series, summary: dict[str, Any]) -> None:
    steps, workers = series["step"], len({name for names in series["workers"] for name in names})
    told = (
        f"one trainer, {workers} rollout worker{'s' if workers > 1 else ''}; mean over the answers sampled at each step"
    )
    axes.set_title("Learning to sort five digits from a reward alone", loc="left", color=INK, fontweight="bold", pad=24)
    axes.text(0, 1.03, told, transform=axes.transAxes, color=MUTED, fontsize=10)
    axes.axhline(summary["target"], color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
    axes.plot(steps, series["exact"], color=TEAL, linewidth=1.6)
    axes.plot(steps, series["reward"], color=BLUE, linewidth=1.8)
    low, high = summary["exact_last"], summary["reward_last"]
    low = min(low, high - 0.16)  # so that the two names don't touch
    _name(axes, max(high, 0.16), f"digits in place\n(reward) {summary['reward_last']:.2f}", BLUE)
    _name(axes, max(low, 0.0), f"answers all\nright {summary['exact_last']:.2f}", TEAL)
    axes.set_ylim(0, 1.02)


def _sync_panel(axes: Any, series: Series, summary: dict[str, Any]) -> None:
    title = f"Sync takes {summary['sync_share']:.1%} of a step: milliseconds, logarithmic"
    axes.set_title(title, loc="left", color=INK, fontweight="bold", fontsize=11)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    pull, publish = [1e3 * max(pulls) for pulls in series["pull_s"]], [1e3 * value for value in series["publish_s"]]
    middle = {"slowest pull": sorted(pull)[len(pull) // 2], "publish": sorted(publish)[len(publish) // 2]}
    for name, color, values in (("slowest pull", BLUE, pull), ("publish", ORANGE, publish)):
        axes.plot(series["step"], values, color=color, linewidth=1)
        text = f"{name}\n{middle[name]:.{2 if middle[name] < 10 else 0}f} ms median"
        _name(axes, middle[name], text, color, "bottom" if middle[name] == max(middle.values()) else "top")


def _name(axes: Any, y: float, text: str, color: str, side: str = "center") -> None:
    """Writes the name of a line at its right end."""
    at: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": side}
    axes.annotate(text, (1, y), xytext=(6, 0), color=color, fontsize=9, **at)
