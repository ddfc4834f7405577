"""The discrete choices around the layout: degrees, micro-batches, ZeRO, recompute, schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.errors import InputError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import RecomputeName, ScheduleName
from autopar.solver.hardware import Cluster

INTEGER_PINS = ("tp", "pp", "dp_replicate", "dp_shard", "micro_batch_size", "zero_stage")
CHOICE_PINS: Mapping[str, tuple[str, ...]] = {
    "recompute": ("none", "full"),
    "schedule": ("1f1b", "layered"),
}
FUTURE_PINS = ("cp", "ep", "virtual_stages")

Pins = Mapping[str, int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One choice of everything but layout and stage cuts."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int = 1
    ep: int = 1
    tp: int
    micro_batch_size: int
    num_micro_batches: int
    zero_stage: int
    recompute: RecomputeName
    schedule: ScheduleName

    @property
    def dp(self) -> int:
        """Ranks of the data axes."""
        return self.dp_replicate * self.dp_shard

    def mesh(self) -> Mesh:
        """The mesh of these degrees."""
        return Mesh(
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            cp=self.cp,
            ep=self.ep,
            tp=self.tp,
        )

    @property
    def per_block(self) -> bool:
        """Whether each block is a segment: then its gathers and reductions overlap with others.

        Otherwise a stage is one segment. The layered order passes all micro-batches through a
        segment before the next: with several stages a stage has to be one segment, or it would
        wait for all but the last segment of the stage before.
        """
        if self.schedule == "layered" and self.pp > 1:
            return False
        return self.dp > 1 or self.recompute == "full" or self.schedule == "layered"

    def __str__(self) -> str:
        return (
            f"pp {self.pp} × dp {self.dp_replicate}·{self.dp_shard} × tp {self.tp}, micro-batch "
            f"{self.micro_batch_size} × {self.num_micro_batches}, ZeRO {self.zero_stage}, "
            f"recompute {self.recompute}, {self.schedule}"
        )


def check_pins(pin: Pins, cluster: Cluster, global_batch_size: int, num_blocks: int) -> None:
    """Raise ``InputError`` for a pin that cannot hold, naming it."""
    for name, value in pin.items():
        if name in FUTURE_PINS:
            if value != 1:
                raise InputError(f"{name}={value} is pinned, but only 1 is possible yet")
        elif name in CHOICE_PINS:
            if value not in CHOICE_PINS[name]:
                options = " or ".join(CHOICE_PINS[name])
                raise InputError(f"{name}={value!r} is pinned; it can be {options}")
        elif name not in INTEGER_PINS:
            known = ", ".join((*INTEGER_PINS, *CHOICE_PINS, *FUTURE_PINS))
            raise InputError(f"nothing is called {name!r}, so that it cannot be pinned", hint=known)
        else:
            _check_integer(name, value)
    gpus, degrees = cluster.num_gpus, _degrees(pin)
    product = 1
    for name, degree in degrees.items():
        product *= degree
        if gpus % degree and len(degrees) < 4:
            raise InputError(
                f"{name}={degree} is pinned, but it does not divide the {gpus} GPUs of the cluster"
            )
    pinned = " × ".join(f"{name}={degree}" for name, degree in degrees.items())
    if product > gpus:
        raise InputError(f"{pinned} needs {product} GPUs, but the cluster has {gpus}")
    if gpus % product and len(degrees) < 4:
        raise InputError(f"{pinned} is pinned: {product} ranks do not divide the {gpus} GPUs")
    if degrees.get("pp", 1) > num_blocks:
        raise InputError(f"pp={degrees['pp']} is pinned, but the model has {num_blocks} blocks")
    _check_batch(pin, global_batch_size)
    _check_zero(pin)


def _check_integer(name: str, value: object) -> None:
    lowest, highest = (0, 3) if name == "zero_stage" else (1, None)
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise InputError(f"{name}={value!r} is pinned; it must be a whole number ≥ {lowest}")
    if highest is not None and value > highest:
        raise InputError(f"{name}={value} is pinned; it can be 0, 1, 2 or 3")


def _degrees(pin: Pins) -> dict[str, int]:
    return {
        name: int(pin[name]) for name in ("pp", "dp_replicate", "dp_shard", "tp") if name in pin
    }


def _check_batch(pin: Pins, global_batch_size: int) -> None:
    product, names = 1, []
    for name in ("dp_replicate", "dp_shard", "micro_batch_size"):
        if name in pin:
            product *= int(pin[name])
            names.append(f"{name}={pin[name]}")
    if global_batch_size % product:
        raise InputError(
            f"{' × '.join(names)} is pinned, but {product} does not divide the global batch of "
            f"{global_batch_size} sequences"
        )


def _check_zero(pin: Pins) -> None:
    zero, shard = pin.get("zero_stage"), pin.get("dp_shard")
    if zero is not None and shard is not None and (zero == 0) != (shard == 1):
        raise InputError(
            f"zero_stage={zero} and dp_shard={shard} are pinned, but ZeRO 0 means dp_shard=1 and "
            "nothing else does"
        )


def candidates(
    cluster: Cluster, *, global_batch_size: int, num_blocks: int, pin: Pins
) -> tuple[Candidate, ...]:
    """All candidates that the pins allow.

    Raises:
        InputError: A pin cannot hold, or the pins together leave nothing.
    """
    check_pins(pin, cluster, global_batch_size, num_blocks)
    found = tuple(
        candidate
        for pp, tp, replicate, shard in _meshes(cluster, num_blocks, pin)
        for candidate in _of_mesh(pp, tp, replicate, shard, global_batch_size, pin)
    )
    if not found:
        pinned = ", ".join(f"{name}={value}" for name, value in pin.items()) or "nothing"
        raise InputError(
            f"no mesh of {cluster.num_gpus} GPUs divides a global batch of {global_batch_size} "
            f"sequences with {pinned} pinned",
            hint="a batch size that is a multiple of the data-parallel ranks, or fewer pins",
        )
    return found


def _meshes(cluster: Cluster, num_blocks: int, pin: Pins) -> Iterator[tuple[int, int, int, int]]:
    """(pp, tp, dp_replicate, dp_shard); ZeRO shards over all data ranks unless pinned otherwise."""
    degrees = _degrees(pin)
    gpus = cluster.num_gpus
    if len(degrees) == 4:
        gpus = degrees["pp"] * degrees["tp"] * degrees["dp_replicate"] * degrees["dp_shard"]
    for pp in divisors(gpus):
        for tp in divisors(gpus // pp):
            dp = gpus // pp // tp
            if degrees.get("pp", pp) != pp or degrees.get("tp", tp) != tp or pp > num_blocks:
                continue
            if "tp" not in degrees and tp > cluster.gpus_per_node:
                continue
            if "dp_replicate" in degrees or "dp_shard" in degrees:
                replicate = degrees.get("dp_replicate") or dp // degrees["dp_shard"] or 1
                shard = degrees.get("dp_shard") or dp // replicate
                if replicate * shard == dp:
                    yield pp, tp, replicate, shard
                continue
            yield pp, tp, dp, 1
            if dp > 1:
                yield pp, tp, 1, dp


def _of_mesh(
    pp: int, tp: int, replicate: int, shard: int, global_batch_size: int, pin: Pins
) -> Iterator[Candidate]:
    dp = replicate * shard
    if global_batch_size % dp:
        return
    share = global_batch_size // dp
    schedules: tuple[ScheduleName, ...] = ("1f1b", "layered")
    recomputes: tuple[RecomputeName, ...] = ("none", "full")
    for micro_batch_size in divisors(share):
        for zero_stage in (0,) if shard == 1 else (1, 2, 3):
            for recompute in recomputes:
                for schedule in schedules:
                    candidate = Candidate(
                        pp=pp,
                        dp_replicate=replicate,
                        dp_shard=shard,
                        tp=tp,
                        micro_batch_size=micro_batch_size,
                        num_micro_batches=share // micro_batch_size,
                        zero_stage=zero_stage,
                        recompute=recompute,
                        schedule=schedule,
                    )
                    if _holds(candidate, pin):
                        yield candidate


def _holds(candidate: Candidate, pin: Pins) -> bool:
    names = ("micro_batch_size", "zero_stage", "recompute", "schedule")
    if any(name in pin and pin[name] != getattr(candidate, name) for name in names):
        return False
    # One micro-batch has only one order; the layered one keeps its gathers further apart.
    if candidate.num_micro_batches == 1 and "schedule" not in pin:
        return candidate.schedule == "1f1b"
    return True


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, from 1 upward."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(dict.fromkeys([*small, *(number // d for d in reversed(small))]))
