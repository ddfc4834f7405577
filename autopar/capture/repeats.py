"""Repeated modules: siblings whose forward passes look alike, found by structure and never by
name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.ir.graph import info

_MIN_SHARE = 0.2
"""Alike siblings count as repeated blocks if they hold this share of all nodes, so two equal norms
do not.
"""

_MIN_COMMON = 0.5
"""Two modules of a list are similar if they share this part of the ops of the larger one."""


@dataclass(frozen=True, slots=True)
class Member:
    """One of several repeated modules: its path and the path of what contains it."""

    path: str
    container: str


def find_members(nodes: Sequence[fx.Node]) -> dict[fx.Node, Member]:
    """The repeated module that each node belongs to; nodes outside of all of them are missing.

    The outermost repetition counts. A module of a list that differs from its siblings (the dense
    first layer of a mixture of experts) is a member too.
    """
    found: dict[fx.Node, Member] = {}
    paths = {node: tuple(part for part in info(node).module.split(".") if part) for node in nodes}
    pending: list[tuple[tuple[str, ...], list[fx.Node]]] = [((), list(nodes))]
    while pending:
        prefix, inside = pending.pop()
        children: dict[str, list[fx.Node]] = {}
        for node in inside:
            if len(paths[node]) > len(prefix):
                children.setdefault(paths[node][len(prefix)], []).append(node)
        repeated = _repeated(children, len(nodes))
        for name, content in children.items():
            path = (*prefix, name)
            if name in repeated:
                member = Member(".".join(path), ".".join(prefix))
                found.update(dict.fromkeys(content, member))
            else:
                pending.append((path, content))
    return found


def _repeated(children: dict[str, list[fx.Node]], num_nodes: int) -> set[str]:
    looks = {name: _look(content) for name, content in children.items()}
    counts = Counter(looks.values())
    alike = {name for name, look in looks.items() if counts[look] > 1}
    if not alike:
        alike = _similar({name: look for name, look in looks.items() if _is_index(name)})
    if sum(len(children[name]) for name in alike) < _MIN_SHARE * num_nodes:
        return set()
    if any(_is_index(name) for name in alike):
        alike |= {name for name in children if _is_index(name)}
    return alike


def _is_index(name: str) -> bool:
    """True for the n-th module of a list; ``3@1`` is its second call."""
    return name.partition("@")[0].isdigit()


def _similar(looks: dict[str, tuple[int, ...]]) -> set[str]:
    """Modules of a list that share most ops with another one: two layers of which the first does
    something more.
    """
    ops = {name: Counter(look) for name, look in looks.items()}
    return {
        name
        for name, mine in ops.items()
        if any(
            (mine & theirs).total() >= _MIN_COMMON * max(mine.total(), theirs.total())
            for other, theirs in ops.items()
            if other != name
        )
    }


def _look(nodes: Sequence[fx.Node]) -> tuple[int, ...]:
    return tuple(
        hash((node.target, *((tensor.shape, tensor.dtype) for tensor in info(node).tensors)))
        for node in nodes
    )
