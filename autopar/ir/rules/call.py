"""The arguments of a node by name, and rules written over these names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._ops import OpOverload

from autopar.ir.graph import NodeInfo, Size, TensorInfo, info
from autopar.ir.layout import operands_of
from autopar.ir.rules.core import Option, Rule, TensorDims
from autopar.ir.rules.text import SizeTable, match_dims, parse_dims, whole_size


class Call:
    """A ``call_function`` node with its arguments bound to the names of the op's schema.

    Attributes:
        node: The node.
        info: Its facts.
        operands: Shape and dtype of the tensor operands, in the order of ``operands_of``.
        names: Names of all arguments of the schema, in order.
    """

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.info: NodeInfo = info(node)
        self.operands: tuple[TensorInfo, ...] = tuple(
            info(operand).tensor for operand in operands_of(node)
        )
        names, defaults = _signature(node.target)
        self.names = names
        self._arguments: dict[str, Any] = {**defaults}
        self._indices: dict[str, tuple[int, ...]] = {}
        count = 0
        for name, value in (*zip(names, node.args, strict=False), *node.kwargs.items()):
            self._arguments[name] = value
            num_nodes = _num_nodes(value)
            self._indices[name] = tuple(range(count, count + num_nodes))
            count += num_nodes
        assert count == len(self.operands), f"{node.target} has more arguments than its schema"

    def argument(self, name: str) -> Any:
        """The value of an argument, or its default."""
        return self._arguments[name]

    def argument_or(self, name: str, default: Any) -> Any:
        """The value of an argument that some overloads of the op lack."""
        return self._arguments.get(name, default)

    def integer(self, name: str) -> int:
        """The value of an argument that is an int."""
        value = self._arguments[name]
        assert isinstance(value, int), f"{self.node.target}: {name} is {value!r}, not an int"
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """The value of an argument that is a list of ints (or one int)."""
        value = self._arguments[name]
        return (value,) if isinstance(value, int) else tuple(value)

    def indices(self, *names: str) -> tuple[int, ...]:
        """Positions among the operands of the tensors that are given as these arguments."""
        return tuple(index for name in names for index in self._indices.get(name, ()))

    def tensor(self, name: str) -> TensorInfo | None:
        """The tensor given as an argument; None when it is absent or no tensor."""
        found = self.indices(name)
        return self.operands[found[0]] if found else None

    def shape(self, name: str) -> tuple[Size, ...]:
        """The shape of the tensor given as an argument."""
        found = self.tensor(name)
        assert found is not None, f"{self.node.target}: {name} is no tensor"
        return tuple(map(whole_size, found.shape))

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the arguments that are tensors or lists of them."""
        return tuple(name for name, found in self._indices.items() if found)

    @property
    def results(self) -> tuple[TensorInfo, ...]:
        return self.info.tensors

    def rule(
        self,
        operands: Mapping[str, TensorDims],
        results: Sequence[TensorDims],
        sizes: Mapping[str, Any],
        *,
        unsplittable: Iterable[str] = (),
        linear: Iterable[tuple[str, ...]] = (),
        additive: Iterable[str] = (),
        helpers: Mapping[str, str] | None = None,
        extra: Sequence[Option] = (),
        paddable: Iterable[str] = (),
    ) -> Rule:
        """A rule from dims by argument name; what is said of absent tensors is left out."""
        dims: list[TensorDims] = [()] * len(self.operands)
        for name, tensor_dims in operands.items():
            for index in self.indices(name):
                dims[index] = tensor_dims
        sets = (frozenset(self.indices(*names)) for names in linear)
        return Rule(
            operands=tuple(dims),
            results=tuple(results),
            sizes=dict(sizes),
            unsplittable=frozenset(unsplittable),
            linear=tuple(dict.fromkeys(found for found in sets if found)),
            additive=frozenset(self.indices(*additive)),
            helpers=helpers or {},
            extra=tuple(extra),
            paddable=frozenset(paddable),
        )

    def text_rule(
        self,
        operands: Mapping[str, str],
        results: Sequence[str],
        *,
        linear: Iterable[tuple[str, ...]] = (),
        additive: Iterable[str] = (),
        helpers: Mapping[str, str] | None = None,
        extra: Sequence[Option] = (),
        sizes: Mapping[str, Size] | None = None,
        paddable: Iterable[str] = (),
    ) -> Rule:
        """A rule from dims written as texts (see ``rules.text``), by argument name.

        ``sizes`` are those of factors that shapes alone do not tell.
        """
        terms = {name: parse_dims(text) for name, text in operands.items()}
        result_terms = tuple(map(parse_dims, results))
        pairs = [
            (name, terms[name], self.operands[index].shape)
            for name in terms
            for index in self.indices(name)
        ]
        result_pairs = [
            (found, tensor.shape) for found, tensor in zip(result_terms, self.results, strict=True)
        ]
        shapes = ((found, shape) for _, found, shape in pairs)
        table = SizeTable.of((*shapes, *result_pairs), sizes)
        return self.rule(
            {name: match_dims(found, shape, table) for name, found, shape in pairs},
            [match_dims(found, shape, table) for found, shape in result_pairs],
            table.sizes,
            unsplittable=table.unsplittable,
            linear=linear,
            additive=additive,
            helpers=helpers,
            extra=extra,
            paddable=paddable,
        )


def _num_nodes(value: Any) -> int:
    if isinstance(value, fx.Node):
        return 0 if value.op == "get_attr" else 1
    if isinstance(value, list | tuple):
        return sum(map(_num_nodes, value))
    return 0


@functools.lru_cache(maxsize=1024)
def _signature(target: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of the arguments of ``target``, and the defaults of those that have one."""
    if isinstance(target, OpOverload):
        arguments = target._schema.arguments  # pyright: ignore[reportPrivateUsage]
        names = tuple(argument.name for argument in arguments)
        return names, {
            argument.name: argument.default_value
            for argument in arguments
            if argument.has_default_value()
        }
    parameters = inspect.signature(target).parameters
    return tuple(parameters), {
        name: value.default
        for name, value in parameters.items()
        if value.default is not inspect.Parameter.empty
    }
