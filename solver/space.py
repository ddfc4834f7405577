"""The space of the search: all candidates that the pins allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from autopar.ir.errors import InputError
from autopar.ir.kernels import DEFAULT_KERNELS, parse_kernels
from autopar.ir.mesh import Mesh
from autopar.ir.plan import RecomputeName, ScheduleName
from autopar.ir.schedules import DEEPENED
from autopar.ir.zero_stages import parse_zero_stages, with_exceptions
from autopar.solver.candidates import Candidate, CutsName, Divisible
from autopar.solver.hardware import Cluster
from autopar.solver.pins import (
    KERNEL_PIN,
    OPEN,
    ZERO_PIN,
    Pins,
    check_model,
    check_pins,
    fixes_gpus,
    pinned_degrees,
    pinned_order,
)
from autopar.solver.placements import placements, undominated
from autopar.solver.shares import unequal_shares

LONG_SEQUENCE = 32768
"""Sequences of so many tokens are searched for a context axis."""

VIRTUAL_STAGES = (2, 3, 4, 8)
"""Numbers of virtual stages on each stage that are searched; others can be pinned."""

MOST_PERMUTED = 3
"""Groups of nodes of which all orders are searched."""

MAX_CONTEXT = 64
"""The largest context axis that is searched; larger ones can be pinned."""


def candidates(
    cluster: Cluster, *, global_batch_size: int, model: Divisible, pin: Pins
) -> tuple[Candidate, ...]:
    """All candidates that the pins allow.

    Raises:
        InputError: A pin cannot hold, or the pins together leave nothing.
    """
    check_pins(pin, cluster, global_batch_size)
    check_model(pin, model)
    found = tuple(_all(cluster, global_batch_size, model, pin))
    if not found:
        pinned = ", ".join(f"{name}={value}" for name, value in pin.items()) or "nothing"
        in_the_way = [
            f"leave {name}={value} open"
            for name, value in pin.items()
            if any(_all(cluster, global_batch_size, model, _without(pin, name)))
        ]
        raise InputError(
            f"no mesh of {cluster.num_gpus} GPUs and no micro-batches divide a global batch of "
            f"{global_batch_size} sequences with {pinned} pinned",
            hint="; or ".join(in_the_way)
            or "a batch size that is a multiple of the data-parallel ranks, or fewer pins",
        )
    return found


def _all(
    cluster: Cluster, global_batch_size: int, model: Divisible, pin: Pins
) -> Iterator[Candidate]:
    for mesh in _meshes(cluster, model, pin):
        for order in _group_orders(cluster, mesh, pin):
            yield from _of_mesh(cluster, mesh, order, global_batch_size, model, pin)


def _without(pin: Pins, name: str) -> Pins:
    return {other: value for other, value in pin.items() if other != name}


def _meshes(cluster: Cluster, model: Divisible, pin: Pins) -> Iterator[Mesh]:
    """All meshes; of those that shard over data ranks the one that shards over most."""
    degrees = pinned_degrees(pin)
    gpus = cluster.num_gpus
    if fixes_gpus(degrees):
        gpus = math.prod(degrees.values())
    virtual = int(pin.get("virtual_stages", 1))
    for pp in _degree("pp", gpus, degrees):
        if pp * virtual > model.num_blocks or (virtual > 1 and pp == 1):
            continue
        for tp in _degree("tp", gpus // pp, degrees):
            if "tp" not in degrees and tp > cluster.gpus_per_node:
                continue
            if any(group.num_gpus % tp for group in cluster.groups):
                continue  # the ranks of a tensor axis are in one group of nodes
            for cp in _context_degrees(gpus // pp // tp, degrees, model):
                for ep in _expert_degrees(gpus // pp // tp // cp, degrees, model):
                    dp = gpus // pp // tp // cp // ep
                    for replicate, shard in _data_degrees(dp, degrees):
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
    if model.seq_len is None or model.seq_len < LONG_SEQUENCE or fixes_gpus(degrees):
        return (1,)
    return tuple(cp for cp in divisors(gpus) if cp <= MAX_CONTEXT and model.seq_len % cp == 0)


def _expert_degrees(gpus: int, degrees: Mapping[str, int], model: Divisible) -> tuple[int, ...]:
    if "ep" in degrees:
        return _degree("ep", gpus, degrees)
    if not model.num_experts or fixes_gpus(degrees):
        return (1,)
    return tuple(ep for ep in divisors(gpus) if model.num_experts % ep == 0)


def _data_degrees(dp: int, degrees: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """(dp_replicate, dp_shard): sharded over none of the data ranks, or over all of them, which
    ``placements`` splits; unless they are pinned.
    """
    if "dp_replicate" in degrees or "dp_shard" in degrees:
        replicate = degrees.get("dp_replicate") or dp // degrees["dp_shard"] or 1
        shard = degrees.get("dp_shard") or dp // replicate
        if replicate * shard == dp:
            yield replicate, shard
        return
    for shard in sorted({1, dp}):
        yield dp // shard, shard


def _group_orders(cluster: Cluster, mesh: Mesh, pin: Pins) -> Iterator[tuple[int, ...]]:
    """Orders of the groups of nodes along the pipeline, of groups that are alike only one; of many
    groups only that of the file and the reverse.
    """
    groups = range(len(cluster.groups))
    if not cluster.is_mixed:
        yield ()
        return
    pinned = pinned_order(pin, cluster)
    found: Iterable[tuple[int, ...]] = [pinned or tuple(groups)]
    if mesh.pp > 1 and pinned is None:
        few = len(groups) <= MOST_PERMUTED
        found = itertools.permutations(groups) if few else [*found, tuple(reversed(groups))]
    seen: set[tuple[str, ...]] = set()
    for order in found:
        kinds = tuple(cluster.groups[place].fingerprint for place in order)
        if kinds not in seen:
            seen.add(kinds)
            yield order


def _of_mesh(
    cluster: Cluster,
    mesh: Mesh,
    order: tuple[int, ...],
    global_batch_size: int,
    model: Divisible,
    pin: Pins,
) -> Iterator[Candidate]:
    recompute = cast("RecomputeName", pin.get("recompute", "blocks"))
    sharded = pin.get("sequence_parallel")
    gather_again = None if recompute == "blocks" else False
    if "gather_again" in pin:
        gather_again = bool(pin["gather_again"])
    in_order, found = cluster.reordered(order), placements(cluster, mesh, pin)
    placed_of = {
        is_sharded: undominated(in_order, mesh, found, is_sharded=is_sharded)
        for is_sharded in (False, True)
    }
    offloads = tuple(_offloads(pin, most=model.num_blocks // mesh.pp))
    for micro_batch_size, number, shares in _divisions(in_order, mesh, global_batch_size, pin):
        for zero_stage, zero_stages, zero_open in _zero_choices(mesh, model, pin, shares):
            placed = placed_of[zero_stage > 0]
            first = placed[0]  # split over most ranks
            schedules = _schedules(mesh.pp, model, pin, is_mixed=bool(order))
            for (schedule, virtual), (state, away) in itertools.product(schedules, offloads):
                depths = _depths(mesh.pp, schedule, number * virtual, pin)
                candidate = Candidate(
                    pp=mesh.pp,
                    dp_replicate=first.dp_replicate,
                    dp_shard=first.dp_shard,
                    axis_order=first.axis_order,
                    placements=placed if len(placed) > 1 else (),
                    cp=mesh.cp,
                    ep=mesh.ep,
                    tp=mesh.tp,
                    micro_batch_size=micro_batch_size,
                    num_micro_batches=number,
                    zero_stage=zero_stage,
                    recompute=recompute,
                    gather_again=gather_again,
                    schedule=schedule,
                    virtual_stages=virtual,
                    kernels=str(parse_kernels(str(pin.get(KERNEL_PIN, DEFAULT_KERNELS)))),
                    sequence_parallel=None if sharded is None else bool(sharded),
                    loss_parallel=bool(pin.get("loss_parallel", 1)),
                    cuts=cast("CutsName", pin.get("cuts", "balanced")),
                    extra_in_flight=depths[0],
                    depths=depths if len(depths) > 1 else (),
                    loss_chunks=int(pin.get("loss_chunks", 1)),
                    chunks_open="loss_chunks" not in pin and not shares,
                    offload_optimizer=state,
                    offload_activations=away,
                    group_order=order,
                    shares=shares,
                    zero_stages=zero_stages,
                    zero_open=zero_open,
                )
                if _holds(candidate, pin) and _shares_tokens(candidate, model):
                    yield candidate


def _divisions(
    cluster: Cluster, mesh: Mesh, global_batch_size: int, pin: Pins
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """How the batch is divided: micro-batch size, micro-batches of the data ranks that have most,
    and of those of each group of nodes where they are not all alike.
    """
    if global_batch_size % mesh.batch_ranks == 0:
        share = global_batch_size // mesh.batch_ranks
        for size in _micro_batch_sizes(share, pin):
            yield size, -(-share // size), ()
    if not cluster.is_mixed or mesh.pp > 1 or pin.get("shares") == "equal":
        return
    sizes = divisors(global_batch_size // mesh.ep)
    if "micro_batch_size" in pin:
        sizes = (int(pin["micro_batch_size"]),)
    for size in sizes:
        for shares in unequal_shares(cluster, mesh, global_batch_size, size):
            yield size, max(shares), shares


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


def _zero_choices(
    mesh: Mesh, model: Divisible, pin: Pins, shares: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...], bool]]:
    """ZeRO stages: that of blocks, those of each where they differ, and whether lower ones are open
    to each block.
    """
    stages = [zero for zero in _zero_stages(mesh, pin) if pin.get("zero_stage", zero) == zero]
    choice = str(pin.get(ZERO_PIN, "equal"))
    if choice == "equal" or (choice == "open" and shares):
        yield from ((zero, (), False) for zero in stages)
    elif choice == "open":
        yield from ((zero, (), False) for zero in stages if zero == 0)
        if max(stages, default=0) > 0:
            yield max(stages), (), max(stages) > 1
    elif not shares:
        exceptions = parse_zero_stages(choice)
        for zero in filter(None, stages):
            own = with_exceptions(zero, exceptions, model.block_kinds)
            if len(set(own)) > 1:
                yield zero, own, False
            elif own[0] == zero:
                yield zero, (), False


def _schedules(
    pp: int, model: Divisible, pin: Pins, *, is_mixed: bool
) -> Iterator[tuple[ScheduleName, int]]:
    """Schedules with numbers of virtual stages: over several, 1F1B is interleaved, and the layered
    order makes the modular pipeline. On several kinds of nodes stages have no virtual ones; one
    stage waits for no others, so that nothing fills a bubble.
    """
    pinned = pin.get("schedule")
    if "virtual_stages" in pin or is_mixed:
        numbers: tuple[int, ...] = (int(pin.get("virtual_stages", 1)),)
    else:
        most = model.num_blocks // pp if pp > 1 else 1
        numbers = (1, *(number for number in VIRTUAL_STAGES if number <= most))
    for number in numbers:
        names: tuple[ScheduleName, ...] = ("1f1b", "layered")
        if number > 1:
            names = ("interleaved", "layered")
        if pp > 1:
            names = (*names, "zero_bubble")
        if pin.get("extra_in_flight"):
            names = tuple(name for name in names if name in DEEPENED)
        for name in names:
            wanted = pinned is None or pinned == name
            if wanted or (pinned == "1f1b" and "virtual_stages" in pin and name == "interleaved"):
                yield name, number


def _depths(pp: int, schedule: ScheduleName, num_forwards: int, pin: Pins) -> tuple[int, ...]:
    """Micro-batches that are in flight beyond what 1F1B needs: none, some and all that change the
    order. A schedule that is pinned has none, unless more are pinned, too.
    """
    if "extra_in_flight" in pin or "schedule" in pin or schedule not in DEEPENED:
        return (int(pin.get("extra_in_flight", 0)),)
    most = min(pp - 1, max(0, num_forwards - 1) // 2)  # stage p − 2 − k has all from 2k + 2 on
    some = (2**power - 1 for power in range(most.bit_length()))
    return (*(depth for depth in some if depth < most), most)


def _holds(candidate: Candidate, pin: Pins) -> bool:
    names = ("micro_batch_size", "recompute")
    if any(name in pin and pin[name] != getattr(candidate, name) for name in names):
        return False
    if candidate.zero_stages and not candidate.per_block:
        return False  # a virtual stage is one segment, which has one ZeRO stage
    if candidate.offload_activations and not _may_offload(candidate):
        return False
    if candidate.shares and candidate.zero_stage > 1 and candidate.schedule != "layered":
        return False  # gathers or reductions of each micro-batch, which some ranks do not have
    if candidate.num_micro_batches == 1 and "schedule" not in pin:
        # Its forwards have only one order; the layered one keeps its gathers further apart.
        return candidate.schedule != "layered" and (
            "virtual_stages" in pin or candidate.virtual_stages == 1
        )
    # Interleaved, fewer micro-batches than stages leave stages waiting as if there were no others.
    is_short = candidate.num_micro_batches < candidate.pp and candidate.schedule != "layered"
    is_short = is_short and candidate.virtual_stages > 1
    return not is_short or "virtual_stages" in pin


def _may_offload(candidate: Candidate) -> bool:
    """Whether what is chosen beside offloaded activations goes with them: their blocks are segments
    of which nothing is computed again.
    """
    if not candidate.per_block or candidate.shares or candidate.zero_open:
        return False
    return candidate.recompute in ("none", "blocks")


def _offloads(pin: Pins, *, most: int) -> Iterator[tuple[bool, int]]:
    """Whether optimizer state is offloaded, and of how many blocks of each stage activations are:
    where that is open, of none, of powers of two, and of as many as stages have.
    """
    state, num = pin.get("offload_optimizer", 0), pin.get("offload_activations", 0)
    numbers = [0, *(2**n for n in range(most.bit_length())), most] if num == OPEN else [int(num)]
    for offload in (False, True) if state == OPEN else (bool(state),):
        for number in dict.fromkeys(numbers):
            yield offload, number


def _shares_tokens(candidate: Candidate, model: Divisible) -> bool:
    """Whether chunks of the loss can have as many sequences each, or as many positions."""
    chunks, positions = candidate.loss_chunks, model.seq_len or 1
    by_position = positions % (candidate.cp * chunks) == 0
    return candidate.micro_batch_size % chunks == 0 or by_position


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, from 1 upward."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(dict.fromkeys([*small, *(number // d for d in reversed(small))]))
