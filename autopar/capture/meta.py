"""Modules without weights: parameters on the meta device, buffers with their real values.

Buffers are small and often computed in ``__init__`` (RoPE frequencies, masks); capture needs their
values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autopar.capture.host import HOST
from autopar.ir.errors import CaptureError


@contextmanager
def meta_parameters() -> Iterator[None]:
    """While active, every parameter that a module registers is put on the meta device.

    A weight is never written to: it exists, untouched, until it is registered. Buffers and all
    other tensors are real. Tied parameters stay tied.
    """
    register = nn.Module.register_parameter
    moved: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.is_meta:
            return
        if param not in moved:
            moved[param] = _meta_parameter(param, param.dtype)
        module._parameters[name] = moved[param]  # pyright: ignore[reportPrivateUsage]

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class MetaClone:
    """A copy of a module on the meta device, and the values of the tensors that are no parameters.

    ``values`` has, by the ``id`` of each meta tensor, that tensor and its value on the CPU.
    """

    module: nn.Module
    values: dict[int, tuple[Tensor, Tensor]]

    def value_of(self, on_meta: Tensor) -> Tensor | None:
        """The value of a buffer of the clone; None if the original module does not have it
        either.
        """
        found = self.values.get(id(on_meta))
        return None if found is None else found[1]


def clone_to_meta(module: nn.Module, dtype: torch.dtype, *, training: bool = True) -> MetaClone:
    """Copy ``module`` to the meta device in train or eval mode, floats in ``dtype``, without
    reading its weights.

    Buffers are cast as ``module.to(dtype)`` would, but the non-persistent float32 buffers of a
    Hugging Face model keep their type unless ``dtype`` is wider: that is how
    ``from_pretrained(dtype=…)`` treats them.

    Raises:
        CaptureError: The module cannot be copied, or a parameter is complex, quantized or sparse.
    """
    memo: dict[int, object] = {}
    values: dict[int, tuple[Tensor, Tensor]] = {}
    for name, parameter in module.named_parameters():
        _check_parameter(name, parameter)
        if id(parameter) not in memo:
            memo[id(parameter)] = _meta_parameter(parameter, _cast(parameter.dtype, dtype))
    keep_narrow = _is_hugging_face(module)
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if id(buffer) in memo:
                continue
            target = _cast(buffer.dtype, dtype)
            narrower = target.itemsize < buffer.dtype.itemsize
            if keep_narrow and narrower and name not in owner.state_dict():
                target = buffer.dtype
            _add_tensor(buffer, target, memo, values)
        for attribute in vars(owner).values():
            if type(attribute) is Tensor and id(attribute) not in memo:
                _add_tensor(attribute, attribute.dtype, memo, values)
    try:
        clone = copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"the model cannot be copied to the meta device: {error}",
            where=type(module).__qualname__,
            hint="keep locks, files and process groups out of it, or give it a __deepcopy__",
        ) from error
    clone.train(training)
    for inner in clone.modules():  # encoder and decoder have configs of their own
        config = vars(inner).get("config")
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
    return MetaClone(clone, values)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if parameter.is_complex() or parameter.is_quantized or parameter.layout is not torch.strided:
        kind = parameter.dtype if parameter.layout is torch.strided else parameter.layout
        raise CaptureError(
            f"parameter {name} is {kind}, which cannot be sharded and trained",
            hint="keep it as real, dense parameters: a complex one as torch.view_as_real of it",
        )


def _add_tensor(
    tensor: Tensor,
    dtype: torch.dtype,
    memo: dict[int, object],
    values: dict[int, tuple[Tensor, Tensor]],
) -> None:
    on_meta = torch.empty_like(tensor, dtype=dtype, device="meta")
    memo[id(tensor)] = on_meta
    if not tensor.is_meta:
        values[id(on_meta)] = (on_meta, tensor.detach().to(device=HOST, dtype=dtype))


def _meta_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    on_meta = torch.empty_like(parameter, dtype=dtype, device="meta")
    return nn.Parameter(on_meta, requires_grad=parameter.requires_grad)


def _cast(dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
    return compute_dtype if dtype.is_floating_point else dtype


def _is_hugging_face(module: nn.Module) -> bool:
    return any(cls.__module__.startswith("transformers.") for cls in type(module).__mro__)
