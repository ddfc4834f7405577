"""The loss in chunks gives what the whole loss gives, and needs less memory (ranks are threads)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.chunked_loss import ChunkedLoss
from autopar.ir.errors import InputError, PlacementError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, bind_axes
from autopar.ir.randomness import Drawing
from autopar.passes import lower_plan
from autopar.runtime.segment_runner import SegmentRunner
from autopar.solver import Cluster
from autopar.solver.instance import make_instance
from tests.runtime.cases import Setup
from tests.runtime.harness import assert_parity, lowered, train_on_threads
from tests.runtime.laid_out import LaidOut, assert_equals_reference, laid_out

VOCABULARY, HIDDEN, SEQ = 96, 16, 12

EXACT = [
    Setup(loss_chunks=4, precision="float64", **settings)  # type: ignore[arg-type]
    for settings in (
        {"name": "llama", "num_micro_batches": 1},
        {"name": "gpt2", "mesh": Mesh(tp=2)},  # tied, and the vocabulary is shared
        {"name": "llama", "mesh": Mesh(tp=2), "sequence": True},
        {"name": "llama", "mesh": Mesh(dp_shard=2, tp=2), "zero_stage": 3},
        {"name": "gpt2", "mesh": Mesh(pp=2, dp_shard=2), "zero_stage": 2, "schedule": "layered"},
        {"name": "llama", "mesh": Mesh(cp=2)},
        {"name": "transformer", "mesh": Mesh(pp=2), "num_micro_batches": 4},
        {"name": "transformer", "mesh": Mesh(pp=2), "schedule": "zero_bubble"},
        {"name": "frozen", "mesh": Mesh(dp_replicate=2)},
        {"name": "llama", "mesh": Mesh(dp_shard=2), "zero_stage": 1, "recompute": "full"},
    )
]


def chunked(program: Program) -> list[ChunkedLoss]:
    """The losses in chunks of a program."""
    return [
        node.target
        for module in program.kinds.values()
        for node in module.graph.nodes
        if isinstance(node.target, ChunkedLoss)
    ]


@pytest.mark.parametrize("setup", EXACT, ids=str)
def test_training_equals_one_device_in_float64(setup: Setup) -> None:
    (call,) = chunked(lowered(setup)[0])
    assert call.num_chunks == 4
    for outcome in train_on_threads(setup, 2):
        assert_parity(setup, outcome, 2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_are_near_fp32(precision: Any) -> None:
    """Gradients of chunks are added up in fp32, and fp16 has its loss scaled."""
    setup = Setup(mesh=Mesh(dp_shard=2), zero_stage=1, precision=precision, loss_chunks=4)
    assert_parity(setup, train_on_threads(setup, 2)[0], 2)


class Head(nn.Module):
    """A layer and a head that is like none of the zoo: a bias, tied and scaled weights, capped
    logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.bias = nn.Parameter(torch.randn(VOCABULARY))
        self.scale = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        hidden = torch.relu(self.layer(self.tokens(tokens)))
        weight = self.tokens.weight * self.scale  # no parameter, and has a gradient
        logits = nn.functional.linear(hidden, weight, self.bias)
        return {"logits": 5 * torch.tanh(logits / 5)}


def smoothed(outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    logits, targets = outputs["logits"], batch["targets"]
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1, ignore_index=3
    )


def squared(outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return (outputs["logits"].square().sum(-1) * batch["targets"]).sum() * 1e-7


def squared_mean(outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """A mean over tokens of sums over the vocabulary: it can be cut along that."""
    return (outputs["logits"].square().sum(-1) * batch["targets"]).mean() * 1e-5


def log_of_sum(outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    return squared(outputs, batch).log()


def odd_case(
    loss_fn: Callable[..., Tensor], mesh: Mesh, chunks: int, *, size: int = 8, micro: int = 2
) -> tuple[LaidOut, dict[str, Tensor]]:
    """The odd head under a mesh, with its loss in chunks, and a batch."""
    torch.manual_seed(0)
    batch = {name: torch.randint(VOCABULARY, (size, SEQ)) for name in ("tokens", "targets")}
    case = laid_out(Head(), batch, Setup(mesh=mesh), micro_batch_size=micro, loss_fn=loss_fn)
    schedule = dataclasses.replace(case.plan.schedule, loss_chunks=chunks)
    return dataclasses.replace(case, plan=dataclasses.replace(case.plan, schedule=schedule)), batch


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2), Mesh(dp_shard=2)], ids=["1", "tp", "dp"])
def test_odd_heads_equal_the_reference(mesh: Mesh) -> None:
    case, batch = odd_case(smoothed, mesh, 3)
    assert chunked(lower_plan(case.model, case.plan))
    assert_equals_reference(case, batch)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2)], ids=["1", "tp"])
@pytest.mark.parametrize("loss_fn", [squared, squared_mean], ids=["squared", "mean"])
def test_other_losses_equal_the_reference(loss_fn: Callable[..., Tensor], mesh: Mesh) -> None:
    """These are defined for one micro-batch."""
    case, batch = odd_case(loss_fn, mesh, 4, micro=8)
    assert chunked(lower_plan(case.model, case.plan))
    assert_equals_reference(case, batch)


def test_a_shorter_last_micro_batch_has_fewer_chunks() -> None:
    """Micro-batches of 4 sequences in 8 chunks (of half a sequence), and a last one of 2."""
    case, batch = odd_case(smoothed, Mesh(), 4, size=6, micro=4)
    program = lower_plan(case.model, case.plan)
    assert program.rest is not None
    assert len(chunked(program)) == len(chunked(program.rest)) == 1
    assert_equals_reference(case, batch)


@pytest.mark.parametrize(
    ("loss_fn", "chunks", "reason"),
    [
        (log_of_sum, 2, "log_default"),
        (smoothed, 5, "no sum over 5 .* shares of tokens: token_loss"),
    ],
)
def test_what_is_no_sum_over_equal_shares_is_refused(
    loss_fn: Callable[..., Tensor], chunks: int, reason: str
) -> None:
    case, _ = odd_case(loss_fn, Mesh(), chunks)
    with pytest.raises(PlacementError, match=f"cannot be computed in {chunks} chunks: .*{reason}"):
        lower_plan(case.model, case.plan)


def test_pins_that_no_layout_can_have_are_refused() -> None:
    case, _ = odd_case(log_of_sum, Mesh(), 1)
    with pytest.raises(InputError, match="loss_chunks=2 is pinned, but the loss is no sum"):
        make_instance(
            case.model,
            Cluster("cpu-local"),
            global_batch_size=8,
            training=case.plan.training,
            pin={"loss_chunks": 2},
        )


class Peak(TorchDispatchMode):
    """The most bytes that tensors made by ops had at once, and those that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves((args, results)):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                self.made.setdefault(reference.cdata, (reference, storage.nbytes()))
        self.peak = max(self.peak, self.alive())
        return results

    def alive(self) -> int:
        gone = [key for key, (reference, _) in self.made.items() if reference.expired()]
        for key in gone:
            del self.made[key]
        return sum(size for _, size in self.made.values())


def peaks(chunks: int) -> tuple[int, int]:
    """Bytes beside arguments that the block with the loss keeps, and that it has at its peak."""
    setup = Setup(name="llama", num_micro_batches=1, loss_chunks=chunks)
    program, model, plan = lowered(setup)
    segment = bind_axes(program, {}).segments[-1]
    arguments = []
    for value in segment.arguments:
        local = program.values[value]
        if local.dtype.is_floating_point:
            arguments.append(torch.rand(local.shape).requires_grad_(local.requires_grad))
        else:
            arguments.append(torch.randint(100, local.shape))
    given = sum(tensor.untyped_storage().nbytes() for tensor in arguments)
    runner = SegmentRunner(segment, model, plan.schedule)
    with Peak() as seen:
        for argument in arguments:
            argument.detach()
        loss, _ = runner(arguments, Drawing(seed=0, step=0, sequences=()))
        held = seen.alive()
        loss.backward()
    return held - given, seen.peak - given


def test_the_more_chunks_the_less_memory() -> None:
    """As the cost model says; what it leaves out are sums of rows, and gradients of weights."""
    setup = Setup(name="llama", num_micro_batches=1)
    _, model, plan = lowered(setup)
    instance = make_instance(
        model,
        Cluster("cpu-local", gpus_per_node=1),
        global_batch_size=8,
        training=plan.training,
        pin={"micro_batch_size": 8, "recompute": "none", "kernel": "eager"},
    )
    search, candidate = instance.search, instance.candidates[0]
    local = search.pricer.setting(candidate)
    solution = local.solution("none")
    choice = search.pricer.chunk_choice(candidate, local, solution)
    found: list[int] = []
    for number in (1, 2, 4, 8):
        stager = choice.stager(number)
        assert stager is not None
        held, peak = peaks(number)
        weights = 4 * float(stager.costs.numel[-1])
        predicted = stager.costs.held_bytes[-1] + stager.costs.temporary_bytes[-1] + weights
        inputs = float(stager.costs.input_bytes[-1])  # kept as arguments, which are not counted
        assert held == pytest.approx(stager.costs.held_bytes[-1] - inputs, abs=0.02 * peak + 2048)
        assert 0.6 * (predicted - inputs) <= peak <= 1.1 * (predicted - inputs)
        found.append(peak)
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0] / 2
