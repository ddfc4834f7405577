"""The discrete choices around the layout: degrees, micro-batches, ZeRO, recompute, schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from autopar.ir.errors import InputError
from autopar.ir.kernels import DEFAULT_KERNELS, parse_kernels
from autopar.ir.mesh import Mesh
from autopar.ir.plan import RecomputeName, ScheduleName
from autopar.ir.schedules import DEEPENED
from autopar.solver.hardware import Cluster

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
INTEGER_PINS = (
    *DEGREES,
    "micro_batch_size",
    "zero_stage",
    "virtual_stages",
    "extra_in_flight",
    "sequence_parallel",
    "loss_parallel",
)
CHOICE_PINS: Mapping[str, tuple[str, ...]] = {
    "recompute": get_args(RecomputeName),
    "schedule": get_args(ScheduleName),
    "cuts": ("balanced", "even"),
}
KERNEL_PIN = "kernel"
_RANGES: Mapping[str, tuple[int, int | None]] = {
    "zero_stage": (0, 3),
    "sequence_parallel": (0, 1),
    "loss_parallel": (0, 1),
    "extra_in_flight": (0, None),
}
LONG_SEQUENCE = 32768
"""Sequences of so many tokens are searched for a context axis."""

VIRTUAL_STAGES = (2, 3, 4, 8)
"""Numbers of virtual stages on each stage that are searched; others can be pinned."""

MAX_CONTEXT = 64
"""The largest context axis that is searched; larger ones can be pinned."""

_FIXING = ("pp", "dp_replicate", "dp_shard", "tp")
"""Degrees that say how many GPUs are used once all are pinned; ``cp`` and ``ep`` are 1 then, unless
they are pinned, too.
"""

Pins = Mapping[str, int | str]
CutsName = Literal["balanced", "even"]
"""Stage cuts for the fastest step, or with as many layers on each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divisible:
    """What of a model the mesh has to divide.

    Attributes:
        num_blocks: Blocks; a stage has at least one.
        seq_len: Positions, among which a context axis divides; None where nobody knows.
        num_experts: Routed experts, among which an expert axis divides; 0 without.
    """

    num_blocks: int
    seq_len: int | None = None
    num_experts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How blocks are computed, whatever the degrees.

    Attributes:
        kernels: By which kernels (``autopar.ir.kernels``).
        sequence_parallel: Whether the tensor axis shards positions between blocks; None: as is
            fastest.
        loss_parallel: Whether the tensor axis may share the vocabulary of a loss.
        recompute: ``selective`` or ``selective_op`` where backward computes some ops again.
    """

    kernels: str
    sequence_parallel: bool | None
    loss_parallel: bool
    recompute: RecomputeName


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One choice of everything but layout and stage cuts.

    A last micro-batch that is shorter counts as a full one: that bounds its costs from above.
    """

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
    virtual_stages: int = 1
    recomputed_blocks: tuple[int, ...] = ()  # of recompute "blocks", once they are chosen
    kernels: str = DEFAULT_KERNELS
    sequence_parallel: bool | None = None
    loss_parallel: bool = True
    cuts: CutsName = "balanced"
    extra_in_flight: int = 0  # beyond what 1F1B needs; see ``orders.most_forwards``

    @property
    def way(self) -> Way:
        """How its blocks are computed."""
        by_op = self.recompute in ("selective", "selective_op")
        return Way(
            kernels=self.kernels,
            sequence_parallel=self.sequence_parallel if self.tp > 1 else None,
            loss_parallel=self.loss_parallel or self.tp == 1,
            recompute=self.recompute if by_op else "none",
        )

    @property
    def dp(self) -> int:
        """Ranks of the data axes."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of a pipeline stage."""
        return self.dp * self.cp * self.ep * self.tp

    @property
    def batch_ranks(self) -> int:
        """Ranks among which the batch is divided."""
        return self.dp * self.ep

    @property
    def num_shards(self) -> int:
        """Ranks over which ZeRO shards parameters that all of them use whole."""
        return self.dp_shard * self.cp * self.ep

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

        Otherwise a virtual stage is one segment. The layered order passes all micro-batches through
        a segment before the next: with several stages a virtual stage has to be one segment, or it
        would wait for all but the last segment of the one before.
        """
        if self.schedule == "layered" and self.pp > 1:
            return False
        by_block = self.recompute in ("full", "selective_layer", "blocks")
        return self.dp > 1 or by_block or self.schedule == "layered"

    def _recompute_text(self) -> str:
        num = len(self.recomputed_blocks)
        return f"{num} block{'s' * (num > 1)}" if num else self.recompute

    def __str__(self) -> str:
        more = "".join(
            f" × {name} {size}" for name, size in (("cp", self.cp), ("ep", self.ep)) if size > 1
        )
        return (
            f"pp {self.pp} × dp {self.dp_replicate}·{self.dp_shard}{more} × tp {self.tp}, "
            f"micro-batch {self.micro_batch_size} × {self.num_micro_batches}, "
            f"ZeRO {self.zero_stage}, recompute {self._recompute_text()}, {self.schedule}"
            + (f" × {self.virtual_stages} virtual stages" if self.virtual_stages > 1 else "")
            + (f", {self.extra_in_flight} more in flight" if self.extra_in_flight else "")
        )


def check_pins(pin: Pins, cluster: Cluster, global_batch_size: int) -> None:
    """Raise ``InputError`` for a pin that cannot hold, naming it."""
    for name, value in pin.items():
        if name in CHOICE_PINS:
            if value not in CHOICE_PINS[name]:
                options = " or ".join(CHOICE_PINS[name])
                raise InputError(f"{name}={value!r} is pinned; it can be {options}")
        elif name == KERNEL_PIN:
            parse_kernels(str(value))
        elif name not in INTEGER_PINS:
            known = ", ".join((*INTEGER_PINS, *CHOICE_PINS, KERNEL_PIN))
            raise InputError(f"nothing is called {name!r}, so that it cannot be pinned", hint=known)
        else:
            _check_integer(name, value)
    gpus, degrees = cluster.num_gpus, _degrees(pin)
    product = 1
    for name, degree in degrees.items():
        product *= degree
        if gpus % degree and not _fixes_gpus(degrees):
            raise InputError(
                f"{name}={degree} is pinned, but it does not divide the {gpus} GPUs of the cluster"
            )
    pinned = " × ".join(f"{name}={degree}" for name, degree in degrees.items())
    if product > gpus:
        raise InputError(f"{pinned} needs {product} GPUs, but the cluster has {gpus}")
    if gpus % product and not _fixes_gpus(degrees):
        raise InputError(f"{pinned} is pinned: {product} ranks do not divide the {gpus} GPUs")
    _check_batch(pin, global_batch_size)
    _check_zero(pin)
    _check_virtual(pin)


def _check_integer(name: str, value: object) -> None:
    lowest, highest = _RANGES.get(name, (1, None))
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise InputError(f"{name}={value!r} is pinned; it must be a whole number ≥ {lowest}")
    if highest is not None and value > highest:
        options = [str(option) for option in range(lowest, highest + 1)]
        known = f"{', '.join(options[:-1])} or {options[-1]}"
        raise InputError(f"{name}={value} is pinned; it can be {known}")


def _check_model(pin: Pins, model: Divisible) -> None:
    """Raise ``InputError`` for a degree that the model cannot have."""
    degrees = _degrees(pin)
    blocks, virtual = model.num_blocks, int(pin.get("virtual_stages", 1))
    if degrees.get("pp", 1) > blocks:
        raise InputError(f"pp={degrees['pp']} is pinned, but the model has {blocks} blocks")
    if virtual > 1 and degrees.get("pp", 2) * virtual > blocks:
        pinned = f"pp={degrees['pp']} × " if "pp" in degrees else ""
        raise InputError(
            f"{pinned}virtual_stages={virtual} is pinned, but the model has {blocks} blocks"
        )
    _check_context(degrees.get("cp", 1), model)
    _check_experts(degrees.get("ep", 1), model)


def _check_context(cp: int, model: Divisible) -> None:
    if cp > 1 and (model.seq_len is None or model.seq_len % cp):
        length = "an unknown number of" if model.seq_len is None else model.seq_len
        raise InputError(f"cp={cp} is pinned, but it does not divide {length} positions")


def _check_experts(ep: int, model: Divisible) -> None:
    if ep > 1 and not model.num_experts:
        raise InputError(
            f"ep={ep} is pinned, but the model has no routed experts",
            hint="autopar.functional.routed_experts, or a Hugging Face mixture of experts",
        )
    if ep > 1 and model.num_experts % ep:
        raise InputError(f"ep={ep} is pinned, but it does not divide {model.num_experts} experts")


def _degrees(pin: Pins) -> dict[str, int]:
    return {name: int(pin[name]) for name in DEGREES if name in pin}


def _fixes_gpus(degrees: Mapping[str, int]) -> bool:
    return all(name in degrees for name in _FIXING)


def _check_batch(pin: Pins, global_batch_size: int) -> None:
    product, names = 1, []
    for name in ("dp_replicate", "dp_shard", "ep"):
        if name in pin:
            product *= int(pin[name])
            names.append(f"{name}={pin[name]}")
    if global_batch_size % product:
        raise InputError(
            f"{' × '.join(names)} is pinned, but {product} does not divide the global batch of "
            f"{global_batch_size} sequences"
        )
    largest = global_batch_size // product
    if int(pin.get("micro_batch_size", 1)) > largest:
        raise InputError(
            f"micro_batch_size={pin['micro_batch_size']} is pinned, but a data rank has at most "
            f"{largest} of the {global_batch_size} sequences"
        )


def _check_zero(pin: Pins) -> None:
    zero, shard = pin.get("zero_stage"), pin.get("dp_shard")
    if zero is None or shard is None:
        return
    if zero == 0 and shard != 1:
        raise InputError(
            f"zero_stage=0 and dp_shard={shard} are pinned, but ZeRO 0 shards nothing: dp_shard=1"
        )
    if zero != 0 and shard == 1 and pin.get("cp", 1) == pin.get("ep", 1) == 1:
        raise InputError(
            f"zero_stage={zero} and dp_shard=1 are pinned, but then there are no ranks to shard "
            "over"
        )


def _check_virtual(pin: Pins) -> None:
    virtual, pp = pin.get("virtual_stages"), pin.get("pp")
    if virtual not in (None, 1) and pp == 1:
        raise InputError(
            f"virtual_stages={virtual} and pp=1 are pinned, but one stage has nothing to interleave"
        )
    if pin.get("schedule") == "interleaved" and (virtual == 1 or pp == 1):
        alone = "virtual_stages=1" if virtual == 1 else "pp=1"
        raise InputError(
            f"schedule='interleaved' and {alone} are pinned, but it needs several virtual stages "
            "on each of several stages"
        )
    if pin.get("schedule") == "zero_bubble" and pp == 1:
        raise InputError(
            "schedule='zero_bubble' and pp=1 are pinned, but one stage waits for no others"
        )
    if pin.get("extra_in_flight") and pin.get("schedule", "1f1b") not in DEEPENED:
        raise InputError(
            f"extra_in_flight={pin['extra_in_flight']} and schedule={pin['schedule']!r} are "
            f"pinned; only {' and '.join(DEEPENED)} can have more micro-batches in flight"
        )


def candidates(
    cluster: Cluster, *, global_batch_size: int, model: Divisible, pin: Pins
) -> tuple[Candidate, ...]:
    """All candidates that the pins allow.

    Raises:
        InputError: A pin cannot hold, or the pins together leave nothing.
    """
    check_pins(pin, cluster, global_batch_size)
    _check_model(pin, model)
    found = tuple(
        candidate
        for mesh in _meshes(cluster, model, pin)
        for candidate in _of_mesh(mesh, global_batch_size, model, pin)
    )
    if not found:
        pinned = ", ".join(f"{name}={value}" for name, value in pin.items()) or "nothing"
        raise InputError(
            f"no mesh of {cluster.num_gpus} GPUs divides a global batch of {global_batch_size} "
            f"sequences with {pinned} pinned",
            hint="a batch size that is a multiple of the data-parallel ranks, or fewer pins",
        )
    return found


def _meshes(cluster: Cluster, model: Divisible, pin: Pins) -> Iterator[Mesh]:
    """All meshes; ZeRO shards over all data ranks unless pinned otherwise."""
    degrees = _degrees(pin)
    gpus = cluster.num_gpus
    if _fixes_gpus(degrees):
        gpus = math.prod(degrees.values())
    virtual = int(pin.get("virtual_stages", 1))
    for pp in _degree("pp", gpus, degrees):
        if pp * virtual > model.num_blocks or (virtual > 1 and pp == 1):
            continue
        for tp in _degree("tp", gpus // pp, degrees):
            if "tp" not in degrees and tp > cluster.gpus_per_node:
                continue
            for cp in _context_degrees(gpus // pp // tp, degrees, model):
                for ep in _expert_degrees(gpus // pp // tp // cp, degrees, model):
                    dp = gpus // pp // tp // cp // ep
                    in_node = max(1, cluster.gpus_per_node // (tp * cp * ep))
                    for replicate, shard in _data_degrees(dp, in_node, degrees):
                        yield Mesh(
                            pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, ep=ep, tp=tp
                        )


def _degree(name: str, gpus: int, degrees: Mapping[str, int]) -> tuple[int, ...]:
    if name in degrees:
        return (degrees[name],) if gpus % degrees[name] == 0 else ()
    return divisors(gpus)


def _context_degrees(gpus: int, degrees: Mapping[str, int], model: Divisible) -> tuple[int, ...]:
    """Context axes are searched for long sequences: short ones are cheaper split otherwise."""
    if "cp" in degrees:
        return _degree("cp", gpus, degrees)
    if model.seq_len is None or model.seq_len < LONG_SEQUENCE or _fixes_gpus(degrees):
        return (1,)
    return tuple(cp for cp in divisors(gpus) if cp <= MAX_CONTEXT and model.seq_len % cp == 0)


def _expert_degrees(gpus: int, degrees: Mapping[str, int], model: Divisible) -> tuple[int, ...]:
    if "ep" in degrees:
        return _degree("ep", gpus, degrees)
    if not model.num_experts or _fixes_gpus(degrees):
        return (1,)
    return tuple(ep for ep in divisors(gpus) if model.num_experts % ep == 0)


def _data_degrees(dp: int, in_node: int, degrees: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """(dp_replicate, dp_shard): sharded over none of the data ranks, over those of a node, or over
    all, unless they are pinned.
    """
    if "dp_replicate" in degrees or "dp_shard" in degrees:
        replicate = degrees.get("dp_replicate") or dp // degrees["dp_shard"] or 1
        shard = degrees.get("dp_shard") or dp // replicate
        if replicate * shard == dp:
            yield replicate, shard
        return
    for shard in sorted({1, math.gcd(dp, in_node), dp}):
        yield dp // shard, shard


def _of_mesh(
    mesh: Mesh, global_batch_size: int, model: Divisible, pin: Pins
) -> Iterator[Candidate]:
    if global_batch_size % mesh.batch_ranks:
        return
    share = global_batch_size // mesh.batch_ranks
    recomputes: tuple[RecomputeName, ...] = ("blocks",)
    if "recompute" in pin:
        recomputes = (cast("RecomputeName", pin["recompute"]),)
    sharded = pin.get("sequence_parallel")
    for micro_batch_size in _micro_batch_sizes(share, pin):
        for zero_stage in _zero_stages(mesh, pin):
            for recompute in recomputes:
                for schedule, virtual in _schedules(mesh.pp, model, pin):
                    candidate = Candidate(
                        pp=mesh.pp,
                        dp_replicate=mesh.dp_replicate,
                        dp_shard=mesh.dp_shard,
                        cp=mesh.cp,
                        ep=mesh.ep,
                        tp=mesh.tp,
                        micro_batch_size=micro_batch_size,
                        num_micro_batches=-(-share // micro_batch_size),
                        zero_stage=zero_stage,
                        recompute=recompute,
                        schedule=schedule,
                        virtual_stages=virtual,
                        kernels=str(parse_kernels(str(pin.get(KERNEL_PIN, DEFAULT_KERNELS)))),
                        sequence_parallel=None if sharded is None else bool(sharded),
                        loss_parallel=bool(pin.get("loss_parallel", 1)),
                        cuts=cast("CutsName", pin.get("cuts", "balanced")),
                        extra_in_flight=int(pin.get("extra_in_flight", 0)),
                    )
                    if _holds(candidate, pin):
                        yield candidate


def _micro_batch_sizes(share: int, pin: Pins) -> tuple[int, ...]:
    """Sizes that divide a data rank's share; a pinned one may leave a shorter last micro-batch."""
    if "micro_batch_size" not in pin:
        return divisors(share)
    size = int(pin["micro_batch_size"])
    return (size,) if size <= share else ()


def _zero_stages(mesh: Mesh, pin: Pins) -> tuple[int, ...]:
    """Without ZeRO there is no shard axis; with it context and expert ranks shard, too."""
    if mesh.dp_shard > 1:
        return (1, 2, 3)
    if mesh.cp * mesh.ep == 1:
        return (0,)
    # With more than one data rank, sharding over context and expert ranks only has to be asked for.
    asked = mesh.dp_replicate == 1 or "dp_shard" in pin or "zero_stage" in pin
    return (0, 1, 2, 3) if asked else (0,)


def _schedules(pp: int, model: Divisible, pin: Pins) -> Iterator[tuple[ScheduleName, int]]:
    """Schedules with numbers of virtual stages: over several, 1F1B is interleaved, and the layered
    order makes the modular pipeline.
    """
    pinned = pin.get("schedule")
    if "virtual_stages" in pin:
        numbers: tuple[int, ...] = (int(pin["virtual_stages"]),)
    else:
        most = model.num_blocks // pp if pp > 1 else 1
        numbers = (1, *(number for number in VIRTUAL_STAGES if number <= most))
    for number in numbers:
        names: tuple[ScheduleName, ...] = ("1f1b", "layered")
        if number > 1:
            names = ("interleaved", "layered")
        if pinned == "zero_bubble":  # not searched otherwise
            names = ("zero_bubble",) if pp > 1 else ()
        if pin.get("extra_in_flight"):
            names = tuple(name for name in names if name in DEEPENED)
        for name in names:
            wanted = pinned is None or pinned == name
            if wanted or (pinned == "1f1b" and "virtual_stages" in pin and name == "interleaved"):
                yield name, number


def _holds(candidate: Candidate, pin: Pins) -> bool:
    names = ("micro_batch_size", "zero_stage", "recompute")
    if any(name in pin and pin[name] != getattr(candidate, name) for name in names):
        return False
    if candidate.num_micro_batches == 1 and "schedule" not in pin:
        # One has only one order; the layered one keeps its gathers further apart.
        return candidate.schedule != "layered" and (
            "virtual_stages" in pin or candidate.virtual_stages == 1
        )
    # Interleaved, fewer micro-batches than stages leave stages waiting as if there were no others.
    is_short = candidate.num_micro_batches < candidate.pp and candidate.schedule != "layered"
    is_short = is_short and candidate.virtual_stages > 1
    return not is_short or "virtual_stages" in pin


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, from 1 upward."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(dict.fromkeys([*small, *(number // d for d in reversed(small))]))
