"""The captured model: blocks in order, each an instance of a kind that has one ``torch.fx`` graph.

``node.meta`` is read and written only through ``info`` and ``set_info``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import sympy
import torch
from torch import fx

Size: TypeAlias = int | sympy.Expr
"""A tensor size: an int, or an expression of the batch symbol of the model graph."""

BATCH = sympy.Symbol("b", integer=True, positive=True)
"""Sequences in the (global) micro-batch that a graph processes."""


def evaluate(size: Size, batch: int) -> int:
    """``size`` at ``batch`` sequences."""
    return size if isinstance(size, int) else _evaluate(size, batch)


@functools.lru_cache(maxsize=4096)
def _evaluate(size: sympy.Expr, batch: int) -> int:
    return int(size.subs(BATCH, batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Global shape, dtype, and whether a gradient flows through this tensor."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    requires_grad: bool

    def shape_at(self, batch: int) -> tuple[int, ...]:
        """The shape at ``batch`` sequences."""
        return tuple(evaluate(size, batch) for size in self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """What a node produces, and where it comes from.

    ``tensors`` has one entry, or several for a node with a tuple value (``split``), whose elements
    are read by ``operator.getitem`` nodes. ``module`` is the path of the module
    (``model.layers.0.mlp``) and ``source`` the model's source line (``modeling_llama.py:123, in
    forward``).
    """

    tensors: tuple[TensorInfo, ...]
    is_tuple: bool = False
    module: str = ""
    source: str = ""

    @property
    def tensor(self) -> TensorInfo:
        """The only tensor of a node that has one value."""
        assert not self.is_tuple, "a node with a tuple value has no single tensor"
        return self.tensors[0]


_INFO_KEY = "autopar"


def info(node: fx.Node) -> NodeInfo:
    """The typed facts of ``node``."""
    found = node.meta[_INFO_KEY]
    assert isinstance(found, NodeInfo)
    return found


def set_info(node: fx.Node, node_info: NodeInfo) -> None:
    """Attach the typed facts of ``node``."""
    node.meta[_INFO_KEY] = node_info


class Role(Enum):
    """What a placeholder of a block's graph stands for."""

    PARAMETER = "parameter"
    INPUT = "input"  # an input of the model: every rank that needs it has its share of the batch
    CONSTANT = "constant"  # folded at capture: every rank holds it
    ACTIVATION = "activation"  # produced by an earlier block


@dataclass(frozen=True, slots=True)
class ValueId:
    """Name of a value of the whole model.

    ``name`` is a parameter, input or constant name, or ``<block index>:<output index>`` of an
    activation.
    """

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role.value}:{self.name}"


def activation(block: int, output: int) -> ValueId:
    """The ``output``-th result of block number ``block``."""
    return ValueId(Role.ACTIVATION, f"{block}:{output}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockKind:
    """One graph for all blocks that are alike.

    ``graph`` is pure: its placeholders are parameters, inputs, constants and activations
    (``roles``, in order), and its output node returns a flat tuple of tensors. Ops are ATen
    overloads and functions of ``autopar.ir.functional``. Shape arguments of ``reshape``, ``expand``
    and creation ops are meaningless where they depend on the batch: the shape is what
    ``info(node)`` says, and localizing writes the arguments anew.
    """

    name: str
    graph: fx.Graph
    roles: tuple[Role, ...]

    @property
    def placeholders(self) -> tuple[fx.Node, ...]:
        return tuple(node for node in self.graph.nodes if node.op == "placeholder")

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes that the output node returns, in order."""
        (returned,) = self.graph.output_node().args
        assert isinstance(returned, tuple | list)
        assert all(isinstance(node, fx.Node) for node in returned)
        return tuple(node for node in returned if isinstance(node, fx.Node))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """An instance of a kind. ``bindings`` say, placeholder by placeholder, which value of the model
    goes in.
    """

    index: int
    kind: str
    path: str
    bindings: tuple[ValueId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A logical parameter. ``names`` are all the names under which the model knows it (tied weights
    have several).
    """

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


class LossKind(Enum):
    """What the model's loss is."""

    TOKEN_SUM = "token_sum"  # sum over valid tokens ÷ their global number
    MICRO_BATCH_MEAN = (
        "micro_batch_mean"  # any other scalar: the mean over micro-batches, each defined by itself
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelGraph:
    """A captured model: forward pass with loss.

    ``loss`` is a scalar: a sum over tokens (then ``weight`` is the number of its valid tokens, a
    scalar) or, for ``MICRO_BATCH_MEAN``, the loss of a micro-batch (then ``weight`` is None and a
    micro-batch weighs by its sequences). The loss of a step is Σ loss / Σ weight.
    """

    name: str
    blocks: tuple[Block, ...]
    kinds: Mapping[str, BlockKind]
    parameters: Mapping[str, Parameter]
    inputs: Mapping[str, TensorInfo]
    constants: Mapping[str, torch.Tensor] = field(repr=False)
    loss: ValueId
    weight: ValueId | None
    loss_kind: LossKind
    compute_dtype: torch.dtype
    fingerprint: str

    def kind_of(self, block: Block) -> BlockKind:
        return self.kinds[block.kind]

    def producer(self, value: ValueId) -> tuple[int, int]:
        """Block index and output index of an activation."""
        assert value.role is Role.ACTIVATION, f"{value} is no activation"
        block, output = value.name.split(":")
        return int(block), int(output)

    def multiplicity(self) -> Mapping[str, int]:
        """Number of blocks of each kind."""
        counts = dict.fromkeys(self.kinds, 0)
        for block in self.blocks:
            counts[block.kind] += 1
        return counts
