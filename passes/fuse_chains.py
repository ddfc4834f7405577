"""Fuse chains: small ops of a local graph that one kernel computes become one call.

Where a path leaves a chain through views and returns, the views become part of it. A chain that
anything else would have to come between, another chain for example, is left as it is.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Mapping

from torch import fx

from autopar.ir.chains import chains_of, is_linear
from autopar.ir.families import Family, family_of
from autopar.ir.fused_chain import FusedChain
from autopar.ir.graph import BlockKind, info, set_info
from autopar.ir.kernels import KernelSet
from autopar.ir.mesh import Mesh
from autopar.passes.base import with_graph
from autopar.passes.verify_shapes import verify_shapes


def fuse_chains(local: BlockKind, kernels: KernelSet, mesh: Mesh) -> BlockKind:
    """The local form of a kind, with each chain that ``kernels`` fuse as a ``FusedChain``."""
    chain_of: dict[fx.Node, set[fx.Node]] = {}
    for found in chains_of(local.graph, kernels):
        chain = _closed(found, chain_of)
        if chain is not None and chain_of.keys().isdisjoint(chain):
            chain_of.update(dict.fromkeys(chain, chain))
    if not chain_of:
        return local
    fused = with_graph(local, _with_calls(local.graph, chain_of))
    verify_shapes(fused, mesh)
    return fused


def _closed(
    chain: Collection[fx.Node], chain_of: Mapping[fx.Node, set[fx.Node]]
) -> set[fx.Node] | None:
    """The chain and what lies on paths between its nodes, where those of ``chain_of`` are one node
    each; None if that is more than views.
    """
    behind = _reached(chain, chain_of, lambda node: node.users)
    before = _reached(chain, chain_of, lambda node: node.all_input_nodes)
    between = (behind & before).difference(chain)
    if any(node.op != "call_function" or not _is_view(node) for node in between):
        return None
    return {*chain, *between}


def _is_view(node: fx.Node) -> bool:
    return family_of(node) is Family.VIEW and not info(node).is_tuple


def _reached(
    start: Iterable[fx.Node],
    chain_of: Mapping[fx.Node, set[fx.Node]],
    following: Callable[[fx.Node], Iterable[fx.Node]],
) -> set[fx.Node]:
    """What is reached from ``start``, itself only where a path leads back."""
    found: set[fx.Node] = set()
    todo = [other for node in start for other in following(node)]
    while todo:
        node = todo.pop()
        if node not in found:
            together = chain_of.get(node, {node})
            found |= together
            todo += [other for member in together for other in following(member)]
    return found


def _with_calls(graph: fx.Graph, chain_of: Mapping[fx.Node, set[fx.Node]]) -> fx.Graph:
    """``graph`` with each chain as a call, where all that it reads is made."""
    changed = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    order = {node: place for place, node in enumerate(graph.nodes)}

    def place(wanted: fx.Node) -> None:
        """Copy a node, after what it reads; of a chain all at once."""
        todo = [wanted]
        while todo:
            node = todo[-1]
            if node in copies:
                todo.pop()
                continue
            chain = chain_of.get(node, {node})
            reads = _reads(chain, order)
            missing = [other for other in reads if other not in copies]
            if missing:
                todo += reversed(missing)
            elif node in chain_of:
                _call(changed, sorted(chain, key=order.__getitem__), reads, copies)
            else:
                copies[node] = changed.node_copy(node, copies.__getitem__)

    for node in graph.nodes:
        place(node)
    return changed


def _reads(chain: Collection[fx.Node], order: dict[fx.Node, int]) -> list[fx.Node]:
    """What the chain reads from outside."""
    found = {other for node in chain for other in node.all_input_nodes if other not in chain}
    return sorted(found, key=order.__getitem__)


def _call(
    changed: fx.Graph,
    chain: list[fx.Node],
    reads: list[fx.Node],
    copies: dict[fx.Node, fx.Node],
) -> None:
    """Add the call of a chain, and note the elements of its result that others read."""
    members = set(chain)
    made = [node for node in chain if any(user not in members for user in node.users)]
    function = fx.Graph()
    inside = {node: function.placeholder(node.name) for node in reads}
    for node in chain:
        inside[node] = function.node_copy(node, inside.__getitem__)
    function.output(tuple(inside[node] for node in made))
    module = fx.GraphModule({}, function, class_name="Chain")
    tensors = tuple(info(node).tensor for node in made)
    learned = tuple(tensor.requires_grad for tensor in tensors)
    called = changed.call_function(
        FusedChain(module, is_linear=is_linear(chain), learned=learned),
        tuple(copies[node] for node in reads),
    )
    set_info(called, dataclasses.replace(info(chain[-1]), tensors=tensors, is_tuple=True))
    for index, node in enumerate(made):
        copies[node] = changed.call_function(operator.getitem, (called, index))
        set_info(copies[node], info(node))
    for node in members.difference(made):
        copies[node] = called  # nobody else reads it
