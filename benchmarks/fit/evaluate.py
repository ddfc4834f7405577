"""Steps of runs under other hardware, by the planner's own code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.calibration.hardware import on, with_values
from autopar.solver import Cluster
from autopar.solver.costs.comm import Links
from autopar.solver.costs.kernels import Kernels
from autopar.solver.facts import BlockCosts, Floats
from autopar.solver.hardware import Hardware
from autopar.solver.simulate import SegmentTimes, simulate
from autopar.solver.solved import optimizer_s, segment_times
from autopar.solver.stages import Stager
from benchmarks.fit.runs import Blocks, Run
from benchmarks.fit.terms import Piece, Terms

Values = Mapping[str, float]
"""Numbers of a hardware file by their dotted paths."""


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    """Terms of a sum as indices into a list of pieces."""

    indices: np.ndarray
    times: Floats

    def seconds(self, pieces: Floats) -> float:
        return float(pieces[self.indices] @ self.times)


class _Pieces:
    """Pieces that occur on one kind of GPU and network, each costed once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.number: dict[Piece, int] = {}

    def sum(self, terms: Terms) -> _Sum:
        indices = [self.number.setdefault(piece, len(self.number)) for piece in terms]
        return _Sum(np.array(indices, dtype=int), np.array(list(terms.values()), dtype=float))

    def seconds(self, hardware: Hardware) -> Floats:
        kernels, links = Kernels(hardware), Links(on(self.cluster, hardware))
        return np.array([piece.seconds(kernels, links) for piece in self.number])


@dataclass(frozen=True, slots=True, eq=False)
class _Compiled:
    """Blocks whose sums are compiled."""

    blocks: Blocks
    kinds: tuple[tuple[_Sum, _Sum, _Sum], ...]
    step: tuple[tuple[_Sum, Floats], ...]

    def costs(self, pieces: Floats, launch_s: float) -> BlockCosts:
        """As ``autopar.solver.facts`` makes them: the host's launches are a floor."""
        forward, backward = [], []
        for kind, sums in zip(self.blocks.kinds, self.kinds, strict=True):
            forward.append(max(sums[0].seconds(pieces), kind.forward_kernels * launch_s))
            once = max(sums[1].seconds(pieces), kind.backward_kernels * launch_s)
            backward.append(once + max(sums[2].seconds(pieces), kind.again_kernels * launch_s))
        kind_of, old = list(self.blocks.kind_of), self.blocks.costs
        step_s = np.zeros(old.num_blocks)
        for sums_of_one, times in self.step:
            step_s = step_s + sums_of_one.seconds(pieces) * times
        return dataclasses.replace(
            old,
            forward_s=np.array(forward)[kind_of],
            backward_s=np.array(backward)[kind_of],
            step_s=step_s,
        )


_Inputs = tuple[SegmentTimes, tuple[float, ...], float]
"""What ``simulate`` is told beside the schedule."""


class Evaluator:
    """Predicts ``runs`` under changed numbers of their hardware files."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self._pieces: dict[tuple[str, float], _Pieces] = {}
        self._compiled: dict[int, _Compiled] = {}
        self._known: dict[int, tuple[_Inputs, float]] = {}
        for run in self.runs:
            key = id(run.blocks)
            if key not in self._compiled:
                self._compiled[key] = self._compile(run)

    def _compile(self, run: Run) -> _Compiled:
        pieces = self._pieces.setdefault(_place(run), _Pieces(run.cluster))
        return _Compiled(
            run.blocks,
            tuple(
                (pieces.sum(k.forward), pieces.sum(k.backward), pieces.sum(k.again))
                for k in run.blocks.kinds
            ),
            tuple((pieces.sum({piece: 1.0}), times) for piece, times in run.blocks.step),
        )

    def step_seconds(self, values: Values, which: Iterable[int] | None = None) -> Floats:
        """Predicted seconds of a step of the runs at these places (default: of all)."""
        places = list(range(len(self.runs)) if which is None else which)
        needed = {_place(self.runs[place]) for place in places}
        hardware = {
            key: with_values(pieces.cluster.hardware, values)
            for key, pieces in self._pieces.items()
            if key in needed
        }
        seconds = {key: self._pieces[key].seconds(found) for key, found in hardware.items()}
        costs: dict[int, BlockCosts] = {}
        steps = []
        for place in places:
            run = self.runs[place]
            key = _place(run)
            if id(run.blocks) not in costs:
                compiled = self._compiled[id(run.blocks)]
                launch_s = hardware[key].chip.launch_s
                costs[id(run.blocks)] = compiled.costs(seconds[key], launch_s)
            cluster = on(run.cluster, hardware[key])
            stager = Stager(cluster, run.candidate, costs[id(run.blocks)], run.sizes)
            steps.append(self._simulated(place, stager))
        return np.array(steps)

    def _simulated(self, place: int, stager: Stager) -> float:
        """A step; what is asked again with the same segments is remembered."""
        run = self.runs[place]
        inputs = (
            segment_times(stager, run.segments),
            optimizer_s(stager, run.segments),
            stager.cluster.hardware.overlap.slowdown,
        )
        known = self._known.get(place)
        if known is not None and known[0] == inputs:
            return known[1]
        times, optimizer, slowdown = inputs
        step = simulate(run.schedule, times, optimizer_s=optimizer, slowdown=slowdown).step_s
        self._known.setdefault(place, (inputs, step))
        return step

    def remember(self, values: Values) -> Floats:
        """``step_seconds`` of all runs; those that a change leaves alone are then known."""
        self._known = {}
        return self.step_seconds(values)


def _place(run: Run) -> tuple[str, float]:
    hardware = run.cluster.hardware
    return hardware.name, hardware.network.node_bytes_per_s
