"""Work of ops: the expressions of the batch hold at every batch, and shards share the work."""

import random
from typing import Any

import pytest
import torch
from torch import fx

from autopar.capture import capture
from autopar.ir.families import Family, family_of
from autopar.ir.graph import BlockKind, evaluate, info
from autopar.ir.layout import operands_of
from autopar.ir.randomness import Drawing, drawing
from autopar.ir.rules.random import random_call
from autopar.ir.shapes import call_at
from autopar.solver.costs.saved import own_bytes, saved_for_backward
from autopar.solver.costs.work import (
    backward_work,
    computing_nodes,
    forward_work,
    op_bytes,
    op_flops,
)
from autopar.testing.prove import Sample, sample_node
from tests.models import tiny_gpt2, tiny_llama, tiny_transformer


def captured(name: str):
    if name == "transformer":
        module, inputs, loss_fn = tiny_transformer()
        return capture(module, inputs, loss_fn=loss_fn)
    module, inputs = {"llama": tiny_llama, "gpt2": tiny_gpt2}[name]()
    return capture(module, inputs)


def shapes_when_run(kind: BlockKind, batch: int) -> dict[fx.Node, list[torch.Size]]:
    """Shapes of all results when the block really runs, on the meta device, at this batch."""
    values: dict[fx.Node, Any] = {}
    for node in kind.graph.nodes:
        if node.op == "placeholder":
            tensor = info(node).tensor
            values[node] = torch.empty(tensor.shape_at(batch), dtype=tensor.dtype, device="meta")
        elif node.op == "call_function":
            with torch.device("meta"):
                values[node] = call_at(node, values.__getitem__, batch)
    return {
        node: [t.shape for t in (value if isinstance(value, tuple | list) else [value])]
        for node, value in values.items()
    }


@pytest.mark.parametrize("name", ["llama", "gpt2", "transformer"])
def test_expressions_equal_a_run_at_that_size(name):
    model = captured(name)
    sizes = random.Random(0).sample(range(1, 500), 20)
    for kind in model.kinds.values():
        for batch in sizes:
            shapes = shapes_when_run(kind, batch)
            for node in computing_nodes(kind):
                operands = [shapes[operand][0] for operand in operands_of(node)]
                results = shapes[node]
                forward = forward_work(node, operands, results)
                backward = backward_work(node, operands, results)
                flops, num_bytes = op_flops(node), op_bytes(node)
                assert [evaluate(size, batch) for size in flops] == [forward.flops, backward.flops]
                assert [evaluate(size, batch) for size in num_bytes] == [
                    forward.bytes,
                    backward.bytes,
                ]


def test_flops_of_a_llama_are_six_per_weight_and_token():
    model = captured("llama")
    flops = {"forward": 0, "backward": 0}
    for block in model.blocks:
        for node in computing_nodes(model.kind_of(block)):
            if node.target is torch.ops.aten.linear.default:
                forward, backward = op_flops(node)
                flops["forward"] += evaluate(forward, 1)
                flops["backward"] += evaluate(backward, 1)
    tokens = next(iter(model.inputs.values())).shape[1]
    weights = sum(
        p.shape[0] * p.shape[1]
        for name, p in model.parameters.items()
        if len(p.shape) == 2 and "embed_tokens" not in name
    )
    assert flops == {"forward": 2 * weights * tokens, "backward": 4 * weights * tokens}


class Keeps(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of the storages that autograd keeps, parameters left out."""

    def __init__(self, parameters) -> None:
        self.storages: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []
        known = {p.untyped_storage().data_ptr() for p in parameters}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                self.storages[storage.data_ptr()] = storage.nbytes()
                self.alive.append(tensor)
            return tensor

        super().__init__(pack, lambda tensor: tensor)

    @property
    def num_bytes(self) -> int:
        return sum(self.storages.values())


@pytest.mark.parametrize("name", ["llama", "gpt2", "transformer"])
def test_kept_bytes_are_near_what_autograd_keeps(name):
    """Run each block and hold the table against the tensors that autograd packs.

    Attention keeps a little more on the CPU (log-sum-exp), norms their statistics, and inputs of
    the block may be counted or not: within an eighth.
    """
    model = captured(name)
    batch = 4
    for kind in model.kinds.values():
        values: dict[fx.Node, object] = {}
        parameters = []
        for node, role in zip(kind.placeholders, kind.roles, strict=True):
            tensor = info(node).tensor
            shape = tensor.shape_at(batch)
            made = torch.zeros(shape, dtype=tensor.dtype)
            values[node] = made.requires_grad_(tensor.requires_grad)
            if role.value in ("parameter", "constant", "input"):
                parameters.append(made)
        keeps = Keeps(parameters)
        with keeps:
            for node in kind.graph.nodes:
                if node.op == "call_function":
                    values[node] = call_at(node, values.__getitem__, batch)
        expected = table_bytes(kind, batch)
        assert expected == pytest.approx(keeps.num_bytes, rel=0.125, abs=4096), kind.name


def table_bytes(kind: BlockKind, batch: int) -> int:
    def root(node: fx.Node) -> fx.Node:
        while node.op == "call_function" and (
            family_of(node) is Family.VIEW or "getitem" in str(node.target)
        ):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            node = source
        return node

    roles = dict(zip(kind.placeholders, kind.roles, strict=True))
    kept: dict[object, int] = {}
    for node in computing_nodes(kind):
        saved = saved_for_backward(node)
        tensors = [root(operands_of(node)[i]) for i in saved.operands]
        for tensor in [*tensors, *([node] if saved.results else [])]:
            if tensor in roles and roles[tensor].value != "activation":
                continue
            kept[tensor] = _bytes(tensor, batch)
        if saved.own_bytes_per_element:
            operand = operands_of(node)[0]
            shape = info(operand).tensor.shape_at(batch)
            kept[node, "own"] = torch.Size(shape).numel() * saved.own_bytes_per_element
    return sum(kept.values())


def _bytes(node: fx.Node, batch: int) -> int:
    return sum(
        torch.Size(tensor.shape_at(batch)).numel() * tensor.dtype.itemsize
        for tensor in info(node).tensors
    )


def test_attention_with_dropout_keeps_its_scores() -> None:
    """What the unfused form keeps beside operands and result is what the cost model says."""
    query, key, value = torch.randn(3, 2, 3, 16, 8).unbind()
    tensors = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    sample = Sample(
        target=torch.ops.aten.scaled_dot_product_attention.default,
        args=(*tensors, None, 0.5, True),
    )
    node = sample_node(sample).node
    shapes = [tuple(tensor.shape) for tensor in tensors]
    target, args, kwargs = random_call(node, (), ())
    values = dict(zip(operands_of(node), tensors, strict=True))
    kept = Keeps(tensors)
    with drawing(Drawing(seed=0, step=0, sequences=())), kept:
        target(*fx.map_arg(args, values.__getitem__), **fx.map_arg(kwargs, values.__getitem__))
    assert kept.num_bytes == pytest.approx(own_bytes(node, shapes), rel=0.15)
    scores = 2 * 3 * 16 * 16
    assert forward_work(node, shapes, shapes[:1]).flops == 2 * 2 * 8 * scores
    assert forward_work(node, shapes, shapes[:1]).bytes > 4 * scores
