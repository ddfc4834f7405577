"""Communication: collectives by size and ranks, messages, and compute beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.calibration.clock import Call, Clock, WallClock, measure, wall_clock
from autopar.calibration.effort import Effort
from autopar.calibration.samples import CollectiveSample, MessageSample, Timing
from autopar.ir.moves import Collective
from autopar.runtime.distributed_group import DistributedGroup, Pair
from autopar.solver.costs.comm import Group

_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Groups of which each rank is in at most one; all of them communicate at the same time.

    Attributes:
        shape: As the cost model sees each group.
        own: This rank's, or None if it has none.
    """

    shape: Group
    own: DistributedGroup | None


class Communication:
    """Measures communication among all ranks that run.

    Args:
        world: All ranks.
        per_node: Ranks of each node, which have consecutive numbers.
    """

    def __init__(
        self, world: DistributedGroup, device: torch.device, effort: Effort, *, per_node: int
    ) -> None:
        self.world, self.device, self.effort, self.per_node = world, device, effort, per_node
        self._clock: WallClock = wall_clock(device)
        self._paired: dict[int, tuple[tuple[Pair, ...], bool]] = {}  # by stride

    def agree(self, timing: Timing) -> Timing:
        """The mean over ranks; all meet here."""
        sums = self.world.all_reduce(self._seconds(timing.best_s, timing.median_s)).tolist()
        return replace(timing, best_s=sums[0] / self.world.size, median_s=sums[1] / self.world.size)

    def slowest(self, seconds: float) -> float:
        """The most of any rank; all meet here."""
        return self._slowest(seconds)[0]

    def collectives(self) -> Iterator[CollectiveSample]:
        """All collectives in groups of 2, 4, … ranks of a node, a whole node, across nodes."""
        for team in self._teams:
            for collective in Collective:
                if collective is Collective.NONE:
                    continue
                for num_bytes in self.effort.message_bytes:
                    yield self._collective(team, collective, num_bytes)

    @functools.cached_property
    def _teams(self) -> tuple[Team, ...]:
        """Made once: every rank makes all groups."""
        return tuple(self._made_teams())

    def _made_teams(self) -> Iterator[Team]:
        total, per_node = self.world.size, self.per_node
        sizes = [2**power for power in range(1, 12) if 2**power < per_node]
        for size in dict.fromkeys([*sizes, per_node]):
            if size > 1:
                starts = range(0, total, per_node)
                lines = [
                    tuple(range(start + first, start + first + size))
                    for start in starts
                    for first in range(0, per_node - size + 1, size)
                ]
                yield self._team(lines, Group(size=size, per_node=size, sharing=per_node // size))
        if total > per_node:
            lines = [tuple(range(first, total, per_node)) for first in range(per_node)]
            yield self._team(lines, Group(size=len(lines[0]), per_node=1, sharing=per_node))
            if per_node > 1:
                whole = [tuple(range(total))]
                yield self._team(whole, Group(size=total, per_node=per_node, sharing=1))

    def _team(self, lines: Sequence[tuple[int, ...]], shape: Group) -> Team:
        """Every rank makes all groups: their names are numbers that must agree."""
        own: DistributedGroup | None = None
        for ranks in lines:
            handle = dist.new_group(list(ranks), timeout=_TIMEOUT)
            if self.world.rank in ranks:
                assert isinstance(handle, dist.ProcessGroup)
                own = DistributedGroup(
                    name="calibrated",
                    rank=ranks.index(self.world.rank),
                    size=len(ranks),
                    handle=handle,
                )
        return Team(shape=shape, own=own)

    def _collective(self, team: Team, collective: Collective, num_bytes: int) -> CollectiveSample:
        size = team.shape.size
        numel = max(1, num_bytes // 4 // size**2) * size**2
        call = None
        if team.own is not None:
            call = _call_of(collective, team.own, torch.zeros(numel, device=self.device))
        return CollectiveSample(
            collective=collective,
            num_bytes=4 * numel,
            group=team.shape,
            timing=self._in_step(call),
        )

    def messages(self) -> Iterator[MessageSample]:
        """Messages there and back between neighbors, and between nodes."""
        for stride, sharing in ((1, self.per_node // 2), (self.per_node, self.per_node)):
            crosses = stride == self.per_node
            if stride * 2 > (self.world.size if crosses else self.per_node):
                continue
            if stride not in self._paired:
                self._paired[stride] = self._pairs(stride)
            pairs, ahead = self._paired[stride]
            for num_bytes in self.effort.message_bytes:
                buffer = torch.zeros(num_bytes // 4, device=self.device)
                call = _exchange(pairs, buffer, ahead=ahead) if pairs else None
                both = self._in_step(call)
                once = Timing(best_s=both.best_s / 2, median_s=both.median_s / 2)
                yield MessageSample(
                    num_bytes=num_bytes, crosses_nodes=crosses, sharing=max(1, sharing), timing=once
                )

    def _pairs(self, stride: int) -> tuple[tuple[Pair, ...], bool]:
        """This rank's pairs, there and back, with the rank ``stride`` ahead or behind."""
        found: tuple[Pair, ...] = ()
        ahead = False
        for first in range(self.world.size - stride):
            if first // stride % 2:
                continue
            if stride < self.per_node and (first % self.per_node) + stride >= self.per_node:
                continue
            other = first + stride
            handles = [dist.new_group([first, other], timeout=_TIMEOUT) for _ in range(2)]
            if self.world.rank in (first, other):
                ahead = self.world.rank == first
                there, back = handles
                assert isinstance(there, dist.ProcessGroup)
                assert isinstance(back, dist.ProcessGroup)
                found = (
                    Pair(source=first, target=other, handle=there),
                    Pair(source=other, target=first, handle=back),
                )
        return found, ahead

    def agreement(self) -> Timing:
        """What all ranks agree on at the end of a step: a few numbers, which the host reads."""
        numbers = torch.zeros(5, dtype=torch.float64, device=self.device)
        return self._together(lambda: self.world.all_reduce(numbers).tolist())

    def beside(self, compute: Call, clock: Clock) -> tuple[Timing, Timing, Timing]:
        """Compute alone, an all-reduce of all ranks alone, and both at once until both are done.

        Args:
            clock: Of compute, alone and beside the all-reduce.
        """
        tensor = torch.zeros(self.effort.beside_bytes // 4, device=self.device)
        start = self.world.start_all_reduce

        def both() -> None:
            work = start(tensor)
            compute()
            work.wait()

        alone = self._together(compute, clock)
        reduce = self._together(lambda: start(tensor).wait())
        return alone, reduce, self._together(both, clock)

    def _in_step(self, call: Call | None) -> Timing:
        """Seconds of what all ranks do at once, as a step has it. On a CPU that is what it adds to
        compute before it: caches are full of something else, and ranks that share cores come one
        after the other.
        """
        alone = self._together(call)
        if self.device.type != "cpu":
            return alone
        compute = _layer()

        def both() -> None:
            compute()
            if call is not None:
                call()

        before = self._together(None if call is None else compute)
        after = self._together(None if call is None else both)
        return Timing(
            best_s=max(alone.best_s, after.best_s - before.best_s),
            median_s=max(alone.median_s, after.median_s - before.median_s),
        )

    def _together(self, call: Call | None, clock: Clock | None = None) -> Timing:
        """Seconds, by default of the wall clock, of what all ranks do at once, as often on each;
        the slowest counts.
        """
        if call is not None:
            call()
        once = self._slowest(0.0 if call is None else self._clock.elapsed_s(call, 2) / 2)[0]
        repeats = min(200, max(1, round(self.effort.target_s / max(once, 1e-6))))
        timing = Timing(best_s=0.0, median_s=0.0)
        if call is not None:
            timing = measure(
                clock or self._clock,
                call,
                target_s=0.0,
                samples=self.effort.samples,
                repeats=repeats,
            )
        best_s, median_s = self._slowest(timing.best_s, timing.median_s)
        return Timing(best_s=best_s, median_s=median_s)

    def _slowest(self, *seconds: float) -> list[float]:
        found: list[float] = self.world.all_reduce(self._seconds(*seconds), "max").tolist()
        return found

    def _seconds(self, *seconds: float) -> Tensor:
        return torch.tensor(seconds, dtype=torch.float64, device=self.device)


def _layer() -> Call:
    """Some compute of a small model's layer: about a millisecond."""
    rows, weight = torch.zeros(1024, 128), torch.zeros(128, 384)
    return lambda: torch.nn.functional.gelu(rows @ weight)


def _call_of(collective: Collective, group: DistributedGroup, whole: Tensor) -> Call:
    own = whole[: whole.numel() // group.size].clone()
    calls: dict[Collective, Callable[[], object]] = {
        Collective.ALL_REDUCE: lambda: group.start_all_reduce(whole).wait(),
        Collective.ALL_GATHER: lambda: group.start_all_gather(whole, own).wait(),
        Collective.REDUCE_SCATTER: lambda: group.start_reduce_scatter(own, whole).wait(),
        Collective.ALL_TO_ALL: lambda: group.all_to_all(own),
    }
    return calls[collective]


def _exchange(pairs: Sequence[Pair], buffer: Tensor, *, ahead: bool) -> Call:
    there, back = pairs

    def call() -> None:
        if ahead:
            there.start_send(buffer).wait()
            back.start_receive(buffer).wait()
        else:
            there.start_receive(buffer).wait()
            back.start_send(buffer).wait()

    return call
