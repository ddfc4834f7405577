"""Initial weights by logical position: one parameter at a time, each from a seed of its own.

A model on the meta device says by its own functions how its parameters start: a Hugging Face model
by ``_init_weights`` for each of its modules, others by ``reset_parameters``. They are run for one
parameter at a time, which alone has memory; what they write to the others is lost on the meta
device. So a rank holds one whole parameter at most, and what it gets depends on the seed and the
parameter's name, not on which others are asked for.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.host import HOST
from autopar.ir.errors import InputError

_RESETS = ("reset_parameters", "_reset_parameters")


class NotSeparableError(InputError):
    """A parameter's start is known to the model's constructor only, or depends on another's."""


class InitialWeights(Mapping[str, Tensor]):
    """Initial values of the parameters of a model, by all of their names.

    The value of a parameter on the meta device is made when it is asked for, and not kept; others
    have theirs. Tied parameters are one, with one value.

    Args:
        model: Is not changed, but by ``fill``. Other threads must not use it at the same time.
        seed: Of all values.

    Raises:
        NotSeparableError: No function of the model says how some parameter starts.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._seed = model, seed
        self._groups = _groups(model)
        self._of = {name: group for group in self._groups for name in group.names}
        wanted = [group for group in self._groups if group.parameter.is_meta]
        self._hidden = [group for group in self._groups if not group.parameter.is_meta]
        if wanted:
            _find_calls(model, self._groups)
        for group in wanted:
            if not group.calls:
                raise NotSeparableError(
                    f"parameter {group.names[0]} is on the meta device, and nothing says how it "
                    "starts",
                    where=type(model).__name__,
                    hint="initialize the module, or give the parameter's module a "
                    "reset_parameters method",
                )

    def __getitem__(self, name: str) -> Tensor:
        group = self._of[name]
        return self._draw(group) if group.parameter.is_meta else group.parameter.detach()

    def __contains__(self, name: object) -> bool:
        return name in self._of

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def fill(self, device: str) -> nn.Module:
        """The model itself, now with its parameters on ``device``; ties stay."""
        values = [self[group.names[0]].to(device) for group in self._groups]
        for group, value in zip(self._groups, values, strict=True):
            group.parameter = _trainable(value, group)
            _put(self._model, group, group.parameter)
        return self._model

    def _draw(self, group: _Group) -> Tensor:
        real = _trainable(torch.empty_like(group.parameter, device=HOST), group)
        with (
            _generator,
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            _parameters(self._model, self._hidden, lambda other: other.on_meta),
            _parameters(self._model, [group], lambda _: real),
        ):
            try:
                for position, call in enumerate(group.calls):
                    torch.manual_seed(_seed_of(self._seed, group.names[0], position))
                    call()
            except (NotImplementedError, RuntimeError) as error:
                raise NotSeparableError(
                    f"parameter {group.names[0]} cannot be initialized by itself: {error}",
                    where=type(self._model).__name__,
                ) from error
        return real.detach()


_generator = threading.Lock()  # torch's default generator belongs to the process

_Call = Callable[[], object]


@dataclass(slots=True, kw_only=True)
class _Group:
    """One parameter under all its names, and the calls that initialize it, in order."""

    names: list[str]
    parameter: nn.Parameter
    on_meta: nn.Parameter
    calls: list[_Call]


def _groups(model: nn.Module) -> list[_Group]:
    found: dict[int, _Group] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in found:
            on_meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            found[id(parameter)] = _Group(names=[], parameter=parameter, on_meta=on_meta, calls=[])
        found[id(parameter)].names.append(name)
    return list(found.values())


def _find_calls(model: nn.Module, groups: list[_Group]) -> None:
    """Give each group the calls that write to it: they are tried on tensors that only look real.

    Hugging Face's override what a constructor did. A weight that is tied to another keeps the
    other's start: there models are initialized before weights are tied.
    """
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = {
            id(group): _trainable(torch.empty(group.parameter.shape, device=HOST), group)
            for group in groups
        }
        by_storage = {_storage(fakes[id(group)]): group for group in groups}
        with _parameters(model, groups, lambda group: fakes[id(group)]):
            for is_override in (True, False):
                missing = {id(group) for group in groups if not group.calls}
                for path, call in _calls(model, "", None, is_override=is_override):
                    for storage in _written_by(call):
                        group = by_storage.get(storage)
                        if group and id(group) in missing and _applies(path, group, ties):
                            group.calls.append(call)


def _applies(path: str, group: _Group, ties: Mapping[str, str]) -> bool:
    """False for what only reaches the parameter under a name that is tied to another."""
    through = {name for name in group.names if name.rpartition(".")[0] == path}
    return not through or bool(through - ties.keys())


def _written_by(call: _Call) -> list[int]:
    with _Writes() as writes:
        call()
    return writes.found


def _calls(
    module: nn.Module, path: str, owner: Any, *, is_override: bool
) -> Iterator[tuple[str, _Call]]:
    """Paths of modules and what initializes each, children first as constructors have it.

    Args:
        owner: The Hugging Face model that ``module`` belongs to, or None.
        is_override: What Hugging Face models do to their modules, else what modules do themselves.
    """
    owner = module if _is_hugging_face(module) else owner
    for name, child in module.named_children():
        yield from _calls(child, f"{path}.{name}" if path else name, owner, is_override=is_override)
    if is_override:
        if owner is not None:
            yield path, lambda: owner._init_weights(module)
        return
    for name in _RESETS:
        reset = getattr(module, name, None)
        if callable(reset):
            yield path, reset
            return


def _is_hugging_face(module: nn.Module) -> bool:
    return hasattr(module, "_init_weights") and any(
        cls.__module__.startswith("transformers.") for cls in type(module).__mro__
    )


class _Writes(TorchDispatchMode):
    """The storages that are written to while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0  # "redraw while any is outside": what looks real has no values
        for argument, value in zip(func._schema.arguments, args, strict=False):
            alias = argument.alias_info
            if alias is not None and alias.is_write and isinstance(value, Tensor):
                storage = _storage(value)
                if storage not in self.found:
                    self.found.append(storage)
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


@contextmanager
def _parameters(
    model: nn.Module, groups: list[_Group], other: Callable[[_Group], nn.Parameter]
) -> Iterator[None]:
    """Other parameters in place of the model's own."""
    for group in groups:
        _put(model, group, other(group))
    try:
        yield
    finally:
        for group in groups:
            _put(model, group, group.parameter)


def _put(model: nn.Module, group: _Group, parameter: nn.Parameter) -> None:
    for name in group.names:
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._parameters[attribute] = parameter  # pyright: ignore[reportPrivateUsage]


def _trainable(tensor: Tensor, group: _Group) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=group.parameter.requires_grad)


def _seed_of(seed: int, name: str, position: int) -> int:
    digest = hashlib.blake2b(repr((seed, name, position)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
