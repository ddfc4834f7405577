"""The meaning of a model graph: its blocks interpreted in order on one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.host import HOST
from autopar.ir.errors import InputError
from autopar.ir.graph import BlockKind, ModelGraph, Role, ValueId, activation, info
from autopar.ir.randomness import Drawing, drawing
from autopar.ir.rules.random import is_random, random_call
from autopar.ir.shapes import call_at


def run_reference(
    model: ModelGraph,
    parameters: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    *,
    seed: int = 0,
    step: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Loss and weight of ``model`` (see ``ModelGraph``) on one device, differentiable by autograd.

    Args:
        model: A captured model.
        parameters: By any of their names; cast to the type that the graph computes in.
        inputs: By name, all with the same batch size; moved to the device of the parameters.
        seed, step: What dropout and the like draw by, beside the position of a number in the model
            (see ``autopar.ir.randomness``).

    Raises:
        InputError: A parameter or an input is missing.
    """
    values = _bind(model, parameters, inputs)
    batch = next(iter(inputs.values())).shape[0]
    device = next(iter(values.values())).device
    numbers = Drawing(seed=seed, step=step, sequences=tuple(range(batch)))
    with torch.device(device):
        for block in model.blocks:
            operands = [values[binding] for binding in block.bindings]
            with drawing(replace(numbers, block=block.index)):
                results = run_kind(model.kind_of(block), operands, batch)
            for index, result in enumerate(results):
                values[activation(block.index, index)] = result
    return values[model.loss], None if model.weight is None else values[model.weight]


def run_kind(kind: BlockKind, operands: list[Tensor], batch: int) -> tuple[Tensor, ...]:
    """The outputs of a block of this kind at ``batch`` sequences; ``operands`` in the order of its
    placeholders.
    """
    values: dict[fx.Node, Any] = dict(zip(kind.placeholders, operands, strict=True))
    for node in kind.graph.nodes:
        if node.op == "call_function":
            values[node] = _call(node, values, batch)
    return tuple(values[node] for node in kind.outputs)


def _call(node: fx.Node, values: Mapping[fx.Node, Any], batch: int) -> Any:
    if not is_random(node):
        return call_at(node, values.__getitem__, batch)
    target, args, kwargs = random_call(node, (), info(node).tensor.shape_at(batch))
    return target(*fx.map_arg(args, values.__getitem__), **fx.map_arg(kwargs, values.__getitem__))


def _bind(
    model: ModelGraph, parameters: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> dict[ValueId, Tensor]:
    values: dict[ValueId, Tensor] = {}
    for parameter in model.parameters.values():
        given = next((parameters[name] for name in parameter.names if name in parameters), None)
        if given is None:
            raise InputError(f"parameter {parameter.name} is missing", where=model.name)
        values[ValueId(Role.PARAMETER, parameter.name)] = given.to(parameter.dtype)
    device = next(iter(values.values())).device if values else torch.device(HOST)
    for name in model.inputs:
        if name not in inputs:
            raise InputError(f"input {name} is missing", where=model.name)
        values[ValueId(Role.INPUT, name)] = inputs[name].to(device)
    for name, constant in model.constants.items():
        values[ValueId(Role.CONSTANT, name)] = constant.to(device)
    return values
