"""What the reviewers of Hagemann et al. asked for: other models, other GPUs, hardware to come, and
recommendations of the planner itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.api.plots import lines
from autopar.solver import Cluster
from benchmarks.papers import layout_tables as tables
from benchmarks.papers import trends
from benchmarks.papers.cases import LLAMAS, OTHERS
from benchmarks.papers.planned import recommendations
from benchmarks.papers.sweep import NARROW, PAPER, SHARDED


def main() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Parts and plots of the page."""
    others = [case.sweep(8192, PAPER, SHARDED) for case in OTHERS]
    hopper = [
        case.sweep(seq, NARROW, cluster=Cluster("h100-80gb", nodes=case.gpus // 8))
        for case in LLAMAS
        for seq in (2048, 8192)
    ]
    large = LLAMAS[-1]
    parts = {
        "architectures": tables.best_table(others),
        "architecture-prices": tables.price_table(others),
        "h100": tables.best_table(hopper, published=False),
        "trends": trends.trend_table(large, 2048),
        "trend-plot": "![Speed by the factor of each part](hagemann-trends.svg)",
        "recommendations": recommendations(),
    }
    plots = {
        "hagemann-trends": lines(
            f"Speed of {large.name} at 2k",
            "times as fast a part",
            "times as fast a step",
            trends.trend_lines(large, 2048),
        ),
    }
    return parts, plots
