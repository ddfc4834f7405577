"""What chooses the state of a value: an option of an op, or the state of a class.

Choices are numbered: the ops in order, then the classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.solver.layout.frame import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Chooser:
    """Who makes or takes a value: a choice, and for each of its options the index of the state that
    it gives to the value, or demands of it.
    """

    choice: int
    states: tuple[int, ...]


def makers(frame: Frame) -> list[Chooser]:
    """Who makes each value."""
    found: dict[int, Chooser] = {}
    for number, op in enumerate(frame.ops):
        for position, result in enumerate(op.results):
            states = frame.values[result].states
            found[result] = Chooser(
                choice=number,
                states=tuple(states.index(option.results[position]) for option in op.options),
            )
    for number, value in enumerate(frame.values):
        if value.state_class is not None:
            found[number] = Chooser(
                choice=len(frame.ops) + value.state_class, states=tuple(range(len(value.states)))
            )
    return [found[number] for number in range(len(frame.values))]


def takers(frame: Frame) -> list[list[Chooser]]:
    """All that take each value."""
    found: list[list[Chooser]] = [[] for _ in frame.values]
    for number, op in enumerate(frame.ops):
        for position, operand in enumerate(op.operands):
            demanded = frame.values[operand].demanded
            found[operand].append(
                Chooser(
                    choice=number,
                    states=tuple(
                        demanded.index(option.operands[position]) for option in op.options
                    ),
                )
            )
    for delivery in frame.deliveries:
        demanded = frame.values[delivery.value].demanded
        states = frame.classes[delivery.state_class].states
        found[delivery.value].append(
            Chooser(
                choice=len(frame.ops) + delivery.state_class,
                states=tuple(map(demanded.index, states)),
            )
        )
    return found


def keepers(frame: Frame) -> list[dict[int, list[int]]]:
    """For each tensor that may be kept, the ops that keep it, and under which options."""
    found: list[dict[int, list[int]]] = [{} for _ in frame.held]
    for number, op in enumerate(frame.ops):
        for option, kept in enumerate(op.held):
            for held in kept:
                found[held].setdefault(number, []).append(option)
    return found
