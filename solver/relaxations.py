"""What would make an instance fit: pins that conflict, and changes, each verified by solving."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.ir.errors import InputError
from autopar.ir.precision import DTYPES
from autopar.ir.units import seconds_text
from autopar.solver.candidates import Candidate
from autopar.solver.hardware import Cluster
from autopar.solver.instance import Instance, make_instance
from autopar.solver.pins import GROUP_PIN, KERNEL_PIN, OFFLOAD_PINS, OPEN, Pins
from autopar.solver.solved import Solved

MOST_NODES = 4096
"""More nodes than this are not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change after which a plan was found, and the step of that plan: the best is no slower."""

    text: str
    step_s: float

    def __str__(self) -> str:
        return f"{self.text} (a step then takes at most {seconds_text(self.step_s)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxations:
    """Why an instance does not fit, as far as its pins go, and what helps.

    Attributes:
        conflict: A smallest set of pins that alone keep everything from fitting; empty where
            nothing fits without pins, either.
        changes: Each by itself makes something fit; those that cost least come first.
    """

    conflict: tuple[str, ...]
    changes: tuple[Change, ...]


def relaxations(instance: Instance) -> Relaxations:
    """Of an instance of which no candidate fits."""
    open_pins = _without(instance, instance.pin)
    helps = open_pins is not None and may_fit(open_pins)
    changes: list[Change] = []
    if helps and instance.pin:
        changes += _pins_left_open(instance)
    if not changes:
        changes += _more_nodes(instance)
        changes += _narrower_gradients(instance)
    return Relaxations(
        conflict=_conflict(instance) if helps and instance.pin else (), changes=tuple(changes)
    )


def may_fit(instance: Instance) -> bool:
    """Whether something may fit; False is a proof that nothing does.

    Larger micro-batches need more of everything, so that only the smallest are looked at.
    """
    smallest = min(candidate.micro_batch_size for candidate in instance.candidates)
    small = [found for found in instance.candidates if found.micro_batch_size == smallest]
    return any(map(instance.search.refiner.may_fit, sorted(small, key=_frugal)))


def _frugal(candidate: Candidate) -> tuple[bool, int, int]:
    """Candidates that need least memory come first."""
    return candidate.recompute == "none", -candidate.zero_stage, -candidate.pp * candidate.tp


def _solved(instance: Instance | None, *, best: bool = False) -> Solved | None:
    """The best plan, or the first that is found; None: there is none."""
    if instance is None or not may_fit(instance):
        return None
    stop_at_s = math.inf if best else -math.inf
    return instance.search.run(instance.candidates, stop_at_s=stop_at_s).best


def _without(instance: Instance, names: Collection[str]) -> Instance | None:
    """The instance without some pins; None where no mesh is left. Offloading is decided then."""
    rest = {name: value for name, value in instance.pin.items() if name not in names}
    rest |= {name: OPEN for name in names if name in OFFLOAD_PINS}
    try:
        return instance.on(instance.cluster, pin=rest)
    except InputError:
        return None


def _conflict(instance: Instance) -> tuple[str, ...]:
    """Pins of which each is needed for nothing to fit: the others are taken out one by one."""
    conflict = dict(instance.pin)
    for name in instance.pin:
        rest = {other: value for other, value in conflict.items() if other != name}
        smaller = _without(instance, set(instance.pin) - set(rest))
        if smaller is not None and not may_fit(smaller):
            conflict = rest
    return tuple(f"{name}={value}" for name, value in conflict.items())


def _pins_left_open(instance: Instance) -> list[Change]:
    """Single pins to leave open; where none helps, a smallest set of them."""
    found = [
        Change(text=_left_open(instance.pin, (name,), solved), step_s=solved.step_s)
        for name in instance.pin
        if (solved := _solved(_without(instance, (name,)), best=True)) is not None
    ]
    if found:
        return sorted(found, key=lambda change: change.step_s)
    left_open = list(instance.pin)
    for name in instance.pin:
        fewer = [other for other in left_open if other != name]
        kept = _without(instance, fewer)
        if kept is not None and may_fit(kept):
            left_open = fewer
    solved = _solved(_without(instance, left_open), best=True)
    if solved is None:
        return []
    return [Change(text=_left_open(instance.pin, left_open, solved), step_s=solved.step_s)]


def _left_open(pin: Pins, names: Sequence[str], solved: Solved) -> str:
    pinned = " and ".join(f"{name}={pin[name]}" for name in names)
    then = ", ".join(f"{name}={_value(solved.candidate, name)}" for name in names)
    return f"leave {pinned} open: {then}"


def _value(candidate: Candidate, name: str) -> object:
    if name == GROUP_PIN:
        return ", ".join(f"group {place + 1}" for place in candidate.group_order)
    value: object = candidate.kernels if name == KERNEL_PIN else getattr(candidate, name)
    return int(value) if isinstance(value, bool) else value


def _more_nodes(instance: Instance) -> Iterator[Change]:
    """So many nodes that fit, and, by bisection, as few as that; of several groups of nodes as many
    times those of each.
    """
    if instance.cluster.is_mixed:
        yield from _more_of_each_group(instance)
        return
    too_few, enough, solved = instance.cluster.nodes, instance.cluster.nodes, None
    while solved is None:
        too_few, enough = enough, 2 * enough
        if enough > MOST_NODES:
            return
        solved = _on_nodes(instance, enough)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        fewer = _on_nodes(instance, middle)
        if fewer is None:
            too_few = middle
        else:
            enough, solved = middle, fewer
    yield Change(text=f"{enough} nodes", step_s=solved.step_s)


def _more_of_each_group(instance: Instance) -> Iterator[Change]:
    times = 2
    while times * instance.cluster.nodes <= MOST_NODES:
        solved = _solved_on(instance, instance.cluster.repeated(times))
        if solved is not None:
            yield Change(text=f"{times} times the nodes of each group", step_s=solved.step_s)
            return
        times *= 2


def _on_nodes(instance: Instance, nodes: int) -> Solved | None:
    return _solved_on(instance, instance.cluster.with_nodes(nodes))


def _solved_on(instance: Instance, cluster: Cluster) -> Solved | None:
    try:
        return _solved(instance.on(cluster))
    except InputError:
        return None


def _narrower_gradients(instance: Instance) -> Iterator[Change]:
    """Gradients in 16 bits, where compute has 16 bits and they have more."""
    training = instance.training
    compute, gradient = DTYPES[training.precision], DTYPES[training.gradient_dtype]
    if compute.itemsize != 2 or gradient.itemsize == 2:
        return
    narrow = replace(training, gradient_dtype=training.precision, reduce_dtype=training.precision)
    solved = _solved(
        make_instance(
            instance.facts,
            instance.cluster,
            global_batch_size=instance.global_batch_size,
            training=narrow,
            seq_len=instance.seq_len,
            pin=instance.pin,
            progress=instance.search.progress,
        )
    )
    if solved is not None:
        yield Change(text=f"gradient_dtype={training.precision}", step_s=solved.step_s)
