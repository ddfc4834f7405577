"""An optimizer whose state is in the host's memory: it comes to the device a bucket of parameters
at a time, is stepped there, and goes back, the next bucket on its way meanwhile.

The optimizer steps the parameters that have gradients. So it is called once for each bucket, which
is exact for every one that counts its steps by parameter, as those of ``torch.optim`` do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autopar.ir.offload import STATE_BUCKET_NUMEL, STATE_BUCKETS
from autopar.runtime.host_copies import Copy, HostCopies
from autopar.runtime.parameter_unit import ParameterUnit


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters ``[first, end)`` of a unit."""

    unit: ParameterUnit
    first: int
    end: int


def buckets_of(units: Sequence[ParameterUnit]) -> Iterator[Bucket]:
    """All parameters of ``units``: in each bucket so many as fill it."""
    for unit in units:
        first, numel = 0, 0
        for index, layout in enumerate(unit.layouts):
            numel += layout.chunk_numel
            if numel >= STATE_BUCKET_NUMEL or index + 1 == len(unit.layouts):
                yield Bucket(unit, first, index + 1)
                first, numel = index + 1, 0


class OffloadedOptimizer:
    """Steps ``optimizer``, whose parameters are those of ``units``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        units: Sequence[ParameterUnit],
        copies: HostCopies,
    ) -> None:
        self._optimizer, self._copies = optimizer, copies
        self._buckets = tuple(buckets_of(units))

    def step(self) -> None:
        """Update all parameters by the gradients of their units. Afterwards all state is on the
        host.
        """
        arriving, leaving = deque[_Visit](), deque[tuple[_Visit, Copy]]()
        for bucket in self._buckets:
            if len(arriving) + len(leaving) >= STATE_BUCKETS - 1:
                self._pass_through(arriving.popleft(), leaving)
            arriving.append(self._fetch(bucket))
        while arriving:
            self._pass_through(arriving.popleft(), leaving)
        for _, copy in leaving:
            copy.finish()

    def _pass_through(self, visit: _Visit, leaving: deque[tuple[_Visit, Copy]]) -> None:
        """Step a bucket and send it back, once the one before is gone."""
        self._update(visit)
        leaving.append((visit, self._put_back(visit)))
        if len(leaving) > 1:
            leaving.popleft()[1].finish()

    def _fetch(self, bucket: Bucket) -> _Visit:
        unit, state = bucket.unit, self._optimizer.state
        parameters = tuple(unit.parameters.values())[bucket.first : bucket.end]
        places = [
            (parameter, key)
            for parameter in parameters
            for key, value in state.get(parameter, {}).items()
            if _is_large(value)
        ]
        homes = [state[parameter][key] for parameter, key in places]
        master = unit.master_on_host(bucket.first, bucket.end)
        masters = [] if master is None else [master]
        copy = self._copies.bring([*masters, *homes])
        return _Visit(
            bucket=bucket,
            parameters=parameters,
            master=None if master is None else copy.tensors[0],
            homes=dict(zip(places, homes, strict=True)),
            state=dict(zip(places, copy.tensors[len(masters) :], strict=True)),
            copy=copy,
        )

    def _update(self, visit: _Visit) -> None:
        bucket, state = visit.bucket, self._optimizer.state
        visit.copy.wait()
        for (parameter, key), value in visit.state.items():
            state[parameter][key] = value
        for index, parameter in enumerate(visit.parameters, bucket.first):
            if visit.master is not None:
                parameter.data = bucket.unit.part_of(visit.master, index, bucket.first)
            parameter.grad = bucket.unit.gradient_view(index)
        self._optimizer.step()
        for parameter in visit.parameters:
            parameter.grad = None

    def _put_back(self, visit: _Visit) -> Copy:
        bucket, unit, copies = visit.bucket, visit.bucket.unit, self._copies
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        if visit.master is not None:
            unit.take_master(visit.master, bucket.first, bucket.end)
            master = unit.master_on_host(bucket.first, bucket.end)
            assert master is not None
            sources.append(visit.master)
            targets.append(master)
        for index, parameter in enumerate(visit.parameters, bucket.first):
            if visit.master is not None:
                parameter.data = unit.part_of(targets[0], index, bucket.first)
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if _is_large(value):
                    home = visit.homes.get((parameter, key))
                    if home is None or not copies.is_home(home):
                        home = copies.empty(value.shape, value.dtype)
                    sources.append(value)
                    targets.append(home)
                    state[key] = home
        visit.kept.extend(sources)
        return copies.send(sources, targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Visit:
    """A bucket on the device.

    Attributes:
        master: Its master weights, where those are on the host otherwise.
        homes, state: Tensors of the optimizer's state, on the host and here.
        copy: That brings it.
        kept: What has to live until it is back on the host.
    """

    bucket: Bucket
    parameters: tuple[nn.Parameter, ...]
    master: Tensor | None
    homes: dict[_Place, Tensor]
    state: dict[_Place, Tensor]
    copy: Copy
    kept: list[Tensor] = field(default_factory=list)


_Place = tuple[nn.Parameter, str]
"""A parameter, and what its state is called."""


def _is_large(value: object) -> bool:
    """Numbers, such as counts of steps, stay where they are."""
    return isinstance(value, Tensor) and value.dim() > 0
