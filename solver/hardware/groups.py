"""Cluster files: groups of nodes, each of one kind of hardware, and the links between groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.ir.errors import ClusterError
from autopar.solver.hardware.read import Reader, known_hardware, read_hardware
from autopar.solver.hardware.spec import Hardware, Network

_FIELDS = ("name", "hardware", "nodes", "gpus_per_node", "network")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of one kind, as a cluster file has them.

    Attributes:
        text: Bytes of what its numbers come from.
    """

    name: str
    hardware: Hardware
    nodes: int
    gpus_per_node: int
    text: bytes


def is_cluster_file(document: Mapping[str, object]) -> bool:
    """Whether a document describes a cluster of groups, and not hardware."""
    return "group" in document or "between" in document


def read_groups(
    document: Mapping[str, object], path: Path
) -> tuple[tuple[NodeGroup, ...], Network]:
    """The groups of nodes of a cluster file in its order, and the links out of a node towards other
    groups.

    Args:
        document: What the file says; paths in it are relative to the file.
        path: The file.

    Raises:
        ClusterError: An unknown or missing field, a value out of range, hardware that cannot be
            read, groups of the same name, or of different devices.
    """
    where = str(path)
    unknown = [name for name in document if name not in ("group", "between")]
    if unknown:
        raise ClusterError(f"unknown field {unknown[0]} in the cluster file", where=where)
    tables = document.get("group")
    if not isinstance(tables, list) or len(tables) < 2:
        raise ClusterError(
            "a cluster file has at least two groups of nodes",
            where=where,
            hint="[[group]] for each; nodes of one kind need no file, only a number of nodes",
        )
    if "between" not in document:
        raise ClusterError(
            "the cluster file does not say what links its groups",
            where=where,
            hint="[between] with node_bytes_per_s, efficiency and latency_s, each with its source",
        )
    between = Reader(where, {}).record(Network, document["between"], "between")
    assert isinstance(between, Network)
    groups = tuple(_group(table, number, path) for number, table in enumerate(tables, 1))
    _check(groups, where)
    return groups, between


def _group(table: object, number: int, path: Path) -> NodeGroup:
    where = f"{path}, group {number}"
    if not isinstance(table, dict):
        raise ClusterError("a group must be a table", where=where)
    unknown = [name for name in table if name not in _FIELDS]
    missing = [name for name in ("hardware", "nodes") if name not in table]
    if unknown or missing:
        what = f"unknown field {unknown[0]}" if unknown else f"missing field {missing[0]}"
        raise ClusterError(what, where=where, hint=f"a group has {', '.join(_FIELDS)}")
    hardware, text = read_hardware(_hardware_file(table["hardware"], path, where))
    name = table.get("name", hardware.name)
    if not isinstance(name, str) or not name:
        raise ClusterError("name must be a text", where=where)
    if "network" in table:
        network = Reader(where, {}).record(Network, table["network"], "network")
        assert isinstance(network, Network)
        hardware, text = replace(hardware, network=network), text + str(network).encode()
    return NodeGroup(
        name=name,
        hardware=hardware,
        nodes=_number(table["nodes"], "nodes", where),
        gpus_per_node=_number(
            table.get("gpus_per_node", hardware.gpus_per_node), "gpus_per_node", where
        ),
        text=text,
    )


def _hardware_file(name: object, path: Path, where: str) -> str | Path:
    if not isinstance(name, str) or not name:
        raise ClusterError("hardware must be a text", where=where)
    return name if name in known_hardware() or not name.endswith(".toml") else path.parent / name


def _number(found: object, name: str, where: str) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ClusterError(f"{name} is {found!r}; a group has at least 1", where=where)
    return found


def _check(groups: tuple[NodeGroup, ...], where: str) -> None:
    """Raise ``ClusterError`` for groups that cannot train together, or be told apart."""
    for number, group in enumerate(groups):
        if group.name in [other.name for other in groups[:number]]:
            raise ClusterError(
                f"two groups are called {group.name}",
                where=where,
                hint='give each a name: name = "east"',
            )
        for what in ("device", "backend", "precision"):
            values = [getattr(one.hardware, what) for one in (groups[0], group)]
            if values[0] != values[1]:
                raise ClusterError(
                    f"groups of one cluster have the same {what}, but {groups[0].name} has "
                    f"{values[0]} and {group.name} has {values[1]}",
                    where=where,
                )
