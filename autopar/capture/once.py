"""Repeated modules are traced once: 80 equal layers cost the time of one.

While the model is traced, the first of several equal modules runs between two marks (ops ``enter``
and ``leave``), and each of the others is one opaque op (``again``). After the export, ``expand``
puts a copy of what is between the marks in place of every opaque op.

Two modules are equal if they have the same classes and parameters in the same places and are
called with arguments of the same shapes, and differ in no attribute *that the traced one read*: a
layer's own number may differ as long as nothing asks for it. What is between the marks must be
closed: read only its arguments and parameters, and be read only through its results. If it is not,
the model is traced in full.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

_library = torch.library.Library("autopar", "DEF")
_library.define("enter(Tensor[] arguments, int template) -> Tensor[]")
_library.define("leave(Tensor[] results, int template) -> Tensor[]")
_library.define("again(Tensor[] arguments, int template, int call) -> Tensor[]")

_ops = torch.ops.autopar


class NotClosedError(Exception):
    """What a repeated module computes is used, or comes, from outside of it."""


@dataclass(slots=True, eq=False)
class _Template:
    """A traced module: how it was called, what it read of its modules' attributes, and what it
    returned.
    """

    module: nn.Module
    path: str
    signature: object
    attributes: dict[tuple[str, str], object]
    read: set[tuple[int, str]] = field(default_factory=set)
    reusable: bool = True
    produced: list[Tensor] = field(default_factory=list)
    rebuild: Callable[[list[Tensor], list[Tensor]], Any] | None = None

    def fits(self, module: nn.Module) -> bool:
        """True if ``module`` differs in nothing that was read."""
        mine, other = self.attributes, _attributes(module)
        submodules = dict(self.module.named_modules())
        return mine.keys() == other.keys() and not any(
            (id(submodules[place]), name) in self.read
            for (place, name), value in mine.items()
            if value != other[place, name]
        )


class Once:
    """Traces the repeated modules of ``root``, which it changes, once each."""

    def __init__(self, root: nn.Module) -> None:
        self._templates: list[_Template] = []
        self._calls: list[tuple[nn.Module, str]] = []
        self._active: _Template | None = None
        self._seen: dict[int, int] = {}
        self._skeletons: dict[int, object] = {}
        for path, module in _candidates(root):
            self._skeletons[id(module)] = _skeleton(module)
            for submodule in module.modules():
                submodule.__class__ = _tracked(type(submodule))
            module.forward = self._wrap(module, path)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Answers for the opaque ops while the model is exported."""
        global _current
        _current = self
        try:
            yield
        finally:
            _current = None

    def read(self, module: nn.Module, name: str) -> None:
        if self._active is not None:
            self._active.read.add((id(module), name))

    def wrote(self) -> None:
        if self._active is not None:
            self._active.reusable = False

    def results_of(self, template: int) -> list[Tensor]:
        return self._templates[template].produced

    def _wrap(self, module: nn.Module, path: str) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            count = self._seen[id(module)] = self._seen.get(id(module), -1) + 1
            leaves, spec = pytree.tree_flatten((args, kwargs))
            if self._active is not None or not _is_plain(args, kwargs, leaves):
                return original(*args, **kwargs)
            skeleton = self._skeletons[id(module)]
            signature = (skeleton, spec, tuple(map(_leaf, leaves)), _sharing(leaves))
            arguments = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            for number, template in enumerate(self._templates):
                if template.reusable and template.signature == signature and template.fits(module):
                    self._calls.append((module, f"{path}@{count}" if count else path))
                    results = _ops.again(arguments, number, len(self._calls) - 1)
                    assert template.rebuild is not None
                    return template.rebuild(arguments, results)
            template = _Template(module, path, signature, _attributes(module))
            return self._trace(template, original, leaves, spec)

        return forward

    def _trace(
        self, template: _Template, original: Callable[..., Any], leaves: list[Any], spec: Any
    ) -> Any:
        number = len(self._templates)
        self._templates.append(template)
        arguments = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        fresh = _ops.enter(arguments, number)
        by_argument = {id(old): new for old, new in zip(arguments, fresh, strict=True)}
        args, kwargs = pytree.tree_unflatten(
            [by_argument.get(id(leaf), leaf) for leaf in leaves], spec
        )
        self._active = template
        try:
            output = original(*args, **kwargs)
        finally:
            self._active = None
        returned, output_spec = pytree.tree_flatten(output)
        places = {id(by_argument[id(old)]): index for index, old in enumerate(arguments)}
        template.produced = [
            leaf for leaf in returned if isinstance(leaf, Tensor) and id(leaf) not in places
        ]
        template.reusable &= all(_leaf(leaf) is not None for leaf in returned)
        template.reusable &= bool(template.produced)
        results = _ops.leave(template.produced, number) if template.produced else []

        def rebuild(given: list[Tensor], produced: list[Tensor]) -> Any:
            remaining = iter(produced)
            rebuilt = [
                leaf
                if not isinstance(leaf, Tensor)
                else given[places[id(leaf)]]
                if id(leaf) in places
                else next(remaining)
                for leaf in returned
            ]
            return pytree.tree_unflatten(rebuilt, output_spec)

        template.rebuild = rebuild
        return rebuild(arguments, results)

    def expand(self, graph: fx.Graph, placeholders: Mapping[int, fx.Node]) -> None:
        """Replace marks and opaque ops in the exported graph by what they stand for.

        Args:
            graph: Changed in place.
            placeholders: By the ``id`` of the parameter or buffer that they stand for.

        Raises:
            NotClosedError: A traced module is not closed. The graph is then of no use.
        """
        regions = {
            number: _Region(graph, number)
            for number in {
                node.args[1]
                for node in graph.nodes
                if node.target in (_ops.enter.default, _ops.leave.default)
            }
            if isinstance(number, int)
        }
        for node in list(graph.nodes):
            if node.target is _ops.again.default:
                _, number, call = node.args
                assert isinstance(number, int)
                assert isinstance(call, int)
                template, (module, path) = self._templates[number], self._calls[call]
                moved = _counterparts(template.module, module, placeholders)
                regions[number].check()
                regions[number].copy_to(node, moved, template.path, path)
        for region in regions.values():
            region.dissolve()


_current: Once | None = None


# --- the ops -------------------------------------------------------------------------------------


def _fresh(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.new_empty_strided(tensor.size(), tensor.stride()) for tensor in tensors]


def _mark(tensors: list[Tensor], template: int) -> list[Tensor]:
    return _fresh(tensors)


def _again(arguments: list[Tensor], template: int, call: int) -> list[Tensor]:
    assert _current is not None, "the op stands for a module only while a model is traced"
    return _fresh(_current.results_of(template))


torch.library.register_fake("autopar::enter", _mark, lib=_library)
torch.library.register_fake("autopar::leave", _mark, lib=_library)
torch.library.register_fake("autopar::again", _again, lib=_library)


# --- which modules are alike ---------------------------------------------------------------------


def _candidates(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Members of the outermost lists that hold several modules of one skeleton."""
    pending: list[tuple[str, nn.Module]] = [("", root)]
    while pending:
        path, module = pending.pop()
        children = [(f"{path}.{name}" if path else name, m) for name, m in module.named_children()]
        chosen: set[str] = set()
        if isinstance(module, nn.ModuleList | nn.Sequential):
            counts: dict[object, int] = {}
            for _, child in children:
                key = _skeleton(child)
                counts[key] = counts.get(key, 0) + 1
            chosen = {
                place
                for place, child in children
                if counts[_skeleton(child)] > 1
                and any(True for _ in child.parameters())
                and not _hooked(child)
            }
        for place, child in children:
            if place in chosen:
                yield place, child
            else:
                pending.append((place, child))


def _skeleton(module: nn.Module) -> object:
    """Classes, parameters and buffers in their places; equal for modules that may be alike."""
    first: dict[int, int] = {}
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
    return (
        tuple((place, _plain_class(type(inner))) for place, inner in module.named_modules()),
        tuple(
            (
                place,
                first.setdefault(id(tensor), index),
                tuple(tensor.shape),
                tensor.dtype,
                tensor.requires_grad,
            )
            for index, (place, tensor) in enumerate(tensors)
        ),
    )


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hooked(module: nn.Module) -> bool:
    return any(getattr(inner, hooks) for inner in module.modules() for hooks in _HOOKS)


_INTERNAL = set(vars(nn.Module()))


def _attributes(module: nn.Module) -> dict[tuple[str, str], object]:
    """Own attributes of all submodules: plain values as they are, submodules by their place,
    anything else by identity.
    """
    places = {id(inner): place for place, inner in module.named_modules()}
    return {
        (place, name): _token(value, places)
        for place, inner in module.named_modules()
        for name, value in vars(inner).items()
        if name not in _INTERNAL and name != "forward"
    }


def _token(value: object, places: Mapping[int, str]) -> object:
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return (type(value), value)
    if isinstance(value, tuple | list):
        return (type(value), tuple(_token(item, places) for item in value))
    if isinstance(value, dict):
        return (dict, tuple((key, _token(item, places)) for key, item in value.items()))
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return (functools.partial, tuple(_token(part, places) for part in parts))
    if isinstance(value, MethodType):
        return (MethodType, id(value.__func__), _token(value.__self__, places))
    return (nn.Module, places[id(value)]) if id(value) in places else id(value)


_tracked_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _tracked(cls: type[nn.Module]) -> type[nn.Module]:
    """``cls``, telling the current trace which attributes are read and written."""
    if cls in _tracked_classes.values():
        return cls
    if cls not in _tracked_classes:

        def read(self: nn.Module, name: str) -> Any:
            if _current is not None:
                _current.read(self, name)
            return cls.__getattribute__(self, name)

        def write(self: nn.Module, name: str, value: Any) -> None:
            if _current is not None:
                _current.wrote()
            cls.__setattr__(self, name, value)

        methods = {
            "__getattribute__": read,
            "__setattr__": write,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        _tracked_classes[cls] = type(cls.__name__, (cls,), methods)
    return _tracked_classes[cls]


def _plain_class(cls: type) -> type:
    return next((plain for plain, tracked in _tracked_classes.items() if tracked is cls), cls)


# --- arguments -----------------------------------------------------------------------------------


def _is_plain(args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> bool:
    """True if a call is told by its tensors and a few immutable values, and can leave nothing in
    its arguments.
    """
    containers = [*args, *kwargs.values()]
    while containers:
        value = containers.pop()
        if isinstance(value, list | dict | set):
            return False
        if isinstance(value, tuple):
            containers += value
    return any(isinstance(leaf, Tensor) for leaf in leaves) and all(
        _leaf(leaf) is not None for leaf in leaves
    )


def _leaf(value: object) -> object:
    """What must agree between two calls; None for what is not understood."""
    if isinstance(value, Tensor):
        sizes = (*value.shape, *value.stride())
        return ("tensor", tuple(map(_size, sizes)), value.dtype)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return (type(value), value)
    return None


def _size(size: int | torch.SymInt) -> str:
    return str(size) if isinstance(size, int) else str(size.node.expr)


def _sharing(leaves: list[Any]) -> tuple[int, ...]:
    """Which arguments are the same tensor."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(leaf), index)
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor)
    )


# --- expansion -----------------------------------------------------------------------------------


def _counterparts(
    template: nn.Module, module: nn.Module, placeholders: Mapping[int, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Placeholders of the template's parameters and buffers, and those of the other module in
    their places.
    """
    pairs = [
        *zip(
            template.named_parameters(remove_duplicate=False),
            module.named_parameters(remove_duplicate=False),
            strict=True,
        ),
        *zip(template.named_buffers(), module.named_buffers(), strict=True),
    ]
    return {placeholders[id(old)]: placeholders[id(new)] for (_, old), (_, new) in pairs}


class _Region:
    """The calls between the marks of one traced module."""

    def __init__(self, graph: fx.Graph, number: int) -> None:
        self.enter = self._mark(graph, _ops.enter.default, number)
        self.leave = self._mark(graph, _ops.leave.default, number)
        self.calls: list[fx.Node] = []
        node = self.enter.next
        while node is not self.leave:
            if node not in self.enter.users and not _is_size(node):
                self.calls.append(node)
            node = node.next
        (results, _) = self.leave.args
        assert isinstance(results, list | tuple)
        self.results = list(results)
        self._checked = False

    @staticmethod
    def _mark(graph: fx.Graph, target: object, number: int) -> fx.Node:
        found = [n for n in graph.nodes if n.target is target and n.args[1] == number]
        if len(found) != 1:
            raise NotClosedError
        return found[0]

    def check(self) -> None:
        """Raises ``NotClosedError`` if the region reads or is read from outside."""
        if self._checked:
            return
        inside = {*self.calls, *self.enter.users}
        for node in self.calls:
            for source in node.all_input_nodes:
                if source not in inside and not (
                    source.op in ("placeholder", "get_attr") or _is_size(source)
                ):
                    raise NotClosedError
            for user in node.users:
                if user not in inside and user is not self.leave and not _is_size(user):
                    raise NotClosedError
        self._checked = True

    def copy_to(
        self, call: fx.Node, moved: Mapping[fx.Node, fx.Node], old_path: str, path: str
    ) -> None:
        """Put a copy of the region in the place of an opaque ``call``."""
        operands, *_ = call.args
        assert isinstance(operands, list | tuple)
        copies: dict[fx.Node, Any] = dict(moved)
        for item in self.enter.users:
            copies[item] = operands[item.args[1]]  # type: ignore[index]
        for node in self.calls:
            with call.graph.inserting_before(call):
                copy = call.graph.node_copy(node, lambda source: copies.get(source, source))
            copy.meta["nn_module_stack"] = _moved_stack(node, old_path, path)
            copies[node] = copy
        for item in list(call.users):
            result = self.results[item.args[1]]  # type: ignore[index]
            item.replace_all_uses_with(copies[result])
            call.graph.erase_node(item)
        call.graph.erase_node(call)

    def dissolve(self) -> None:
        """Take the marks away."""
        for mark in (self.leave, self.enter):
            values = mark.args[0]
            assert isinstance(values, list | tuple)
            for item in list(mark.users):
                item.replace_all_uses_with(values[item.args[1]])  # type: ignore[index,arg-type]
                mark.graph.erase_node(item)
            mark.graph.erase_node(mark)


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _moved_stack(node: fx.Node, old_path: str, path: str) -> dict[str, tuple[str, Any]]:
    stack = node.meta.get("nn_module_stack") or {}
    full, cls = next(reversed(stack.values())) if stack else (old_path, None)
    depth = len(old_path.split("."))
    below = full.split(".")[depth:]
    return {"": (".".join([path, *below]), cls)}
