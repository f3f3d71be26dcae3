"""The picture of an iteration: model and non-model data per period against the budget."""

from pathlib import Path
from typing import TYPE_CHECKING

from hetero.errors import ConfigError
from hetero.files import check_writable
from hetero.report.stats import MemoryStats
from hetero.units import format_bytes, unit_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_stats", "plot_stats"]

# Times as much as the iteration a budget may be, and is still drawn: beside more, nothing of that can be seen.
_MOST_DRAWN = 20
_ENDINGS = (".png", ".svg", ".pdf")
_SHADES = {"forward": "#eef4fb", "backward": "#fbf1ee", "step": "#f0f6ee"}


def plot_stats(stats: MemoryStats, path: str | Path) -> None:
    """Write the picture of ``stats.periods`` to ``path``. Raises `ConfigError` if nothing was measured yet, for
    another ending than PNG's, SVG's or PDF's, and where nothing can be written."""
    if not stats.periods:
        raise ConfigError("nothing to plot yet: no iteration has been measured; run one training step first")
    if Path(path).suffix.lower() not in _ENDINGS:
        raise ConfigError(
            f"{str(path)!r}: the name's ending says which format; use one of {', '.join(_ENDINGS)}"
        )
    check_writable(path)
    draw_stats(stats).savefig(path, dpi=150)


def draw_stats(stats: MemoryStats) -> "Figure":
    """The picture of ``stats.periods``, of which there are some."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    top = max(period.device_peak_bytes for period in stats.periods)
    shows_budget = stats.device_budget <= _MOST_DRAWN * top
    scale, unit = unit_for(stats.device_budget if shows_budget else top)
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.add_subplot()
    edges = list(range(len(stats.periods) + 1))
    model = [period.device_model_bytes / scale for period in stats.periods]
    peak = [period.device_peak_bytes / scale for period in stats.periods]
    begin = 0
    for index, period in enumerate(stats.periods):
        last = index + 1 == len(stats.periods)
        if last or stats.periods[index + 1].phase != period.phase:
            axes.axvspan(begin, index + 1, color=_SHADES[period.phase], lw=0)
            axes.text(
                (begin + index + 1) / 2, 1.01, period.phase, ha="center", transform=axes.get_xaxis_transform()
            )
            begin = index + 1
    axes.stairs(model, edges, fill=True, color="#3b6fb6", label="model data")
    saved = [m + p.device_activation_bytes / scale for m, p in zip(model, stats.periods, strict=True)]
    axes.stairs(saved, edges, baseline=model, fill=True, color="#6aa56a", label="activations")
    axes.stairs(peak, edges, baseline=saved, fill=True, color="#e2a04a", label="non-model data (peak)")
    budget = f"budget {format_bytes(stats.device_budget)}"
    if shows_budget:
        axes.axhline(stats.device_budget / scale, color="#b03030", ls="--", label=budget)
    else:
        axes.plot([], [], color="#b03030", ls="--", label=f"{budget}, far above")
    axes.set(xlim=(0, len(stats.periods)), ylim=(0, None), xlabel="period", ylabel=f"{unit} on the device")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure
