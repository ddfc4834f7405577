"""Shared, frozen and unused parameters, and values that stages hand on, under every storage."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.initialize import InitialWeights
from autopar.capture.meta import meta_parameters
from autopar.ir.graph import Role
from autopar.ir.mesh import Mesh
from autopar.ir.plan import RecomputeName, ScheduleName
from autopar.passes import lower_plan
from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.threads import ThreadCommunicator, run_mesh
from tests.runtime.cases import Setup
from tests.runtime.laid_out import assert_equals_reference, laid_out

VOCAB, HIDDEN, SEQ = 16, 8, 4
Batch = dict[str, Tensor]


def token_batch(size: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (size, SEQ), generator=generator)
    return {"ids": ids, "labels": ids.roll(-1, 1)}


class Adapted(nn.Module):
    """A frozen linear with a trained product of low rank beside it."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(HIDDEN, HIDDEN)
        self.base.requires_grad_(False)
        self.down = nn.Linear(HIDDEN, rank, bias=False)
        self.up = nn.Linear(rank, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class Plain(nn.Module):
    """The same without the product."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x))


class Stack(nn.Module):
    """Embedding, layers, head, and cross-entropy."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def seeded(module: nn.Module) -> nn.Module:
    """Weights of a seed, the same for every test."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4, generator=generator)
    return module


def lora() -> nn.Module:
    model = Stack([Adapted() for _ in range(4)])
    model.embed.requires_grad_(False)
    model.head.requires_grad_(False)
    return seeded(model)


RECOMPUTES: tuple[RecomputeName, ...] = ("none", "full")
SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "layered")


@pytest.mark.parametrize(("zero_stage", "recompute"), list(itertools.product(range(4), RECOMPUTES)))
def test_lora_trains_its_adapters_at_every_zero_stage(
    zero_stage: int, recompute: RecomputeName
) -> None:
    mesh = Mesh(pp=2, dp_shard=2) if zero_stage else Mesh(pp=2, dp_replicate=2)
    setup = Setup(mesh=mesh, zero_stage=zero_stage, recompute=recompute)
    case = laid_out(lora(), token_batch(), setup, micro_batch_size=2)
    assert_equals_reference(case, token_batch())


def frozen_beginning() -> nn.Module:
    """The embedding and two layers are frozen: no gradient flows into them."""
    model = Stack([Plain() for _ in range(4)])
    for part in (model.embed, model.layers[0], model.layers[1]):
        part.requires_grad_(False)
    return seeded(model)


FROZEN_STAGES = (0, 0, 0, 1, 1, 1)
"""Stages of blocks: what is frozen, and the rest."""


@pytest.mark.parametrize(
    ("schedule", "zero_stage", "recompute"),
    [("1f1b", 0, "none"), ("layered", 3, "full"), ("1f1b", 3, "full"), ("1f1b", 1, "none")],
)
def test_a_fully_frozen_first_stage_gets_no_gradients(
    schedule: ScheduleName, zero_stage: int, recompute: RecomputeName
) -> None:
    mesh = Mesh(pp=2, dp_shard=2) if zero_stage else Mesh(pp=2)
    setup = Setup(mesh=mesh, zero_stage=zero_stage, recompute=recompute, schedule=schedule)
    batch = token_batch()
    case = laid_out(frozen_beginning(), batch, setup, micro_batch_size=1, stages=FROZEN_STAGES)
    assert_equals_reference(case, batch)


def test_no_gradient_messages_go_to_a_frozen_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bool] = []
    send = ThreadCommunicator.start_send

    def counted(self: ThreadCommunicator, tensor: Tensor, channel: tuple[int, int, bool]):
        sent.append(channel[2])
        return send(self, tensor, channel)

    monkeypatch.setattr(ThreadCommunicator, "start_send", counted)
    setup = Setup(mesh=Mesh(pp=2))
    case = laid_out(
        frozen_beginning(), token_batch(), setup, micro_batch_size=2, stages=FROZEN_STAGES
    )
    case.engines(token_batch())
    assert sent == [True] * 4  # activations of four micro-batches, and nothing back


class Tied(Stack):
    """The head is the embedding, and the last layer's weights are those of the first."""

    def __init__(self) -> None:
        super().__init__([Plain() for _ in range(3)])
        self.head.weight = self.embed.weight
        first, last = self.layers[0], self.layers[2]
        assert isinstance(first, Plain)
        assert isinstance(last, Plain)
        last.base.weight, last.base.bias = first.base.weight, first.base.bias


TIED = [
    Setup(mesh=Mesh()),
    Setup(mesh=Mesh(pp=2)),
    Setup(mesh=Mesh(pp=3), schedule="layered"),
    Setup(mesh=Mesh(pp=2, dp_shard=2), zero_stage=3, recompute="full"),
    Setup(mesh=Mesh(pp=2, dp_replicate=2, tp=2)),
    Setup(mesh=Mesh(pp=2, dp_shard=2), zero_stage=2, schedule="layered"),
]


@pytest.mark.parametrize("setup", TIED, ids=str)
def test_tied_weights_are_one_parameter(setup: Setup) -> None:
    case = laid_out(seeded(Tied()), token_batch(), setup, micro_batch_size=2)
    assert {"embed.weight", "head.weight"} == set(case.model.parameters["embed.weight"].names)
    assert_equals_reference(case, token_batch())


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pp=2), Mesh(pp=2, dp_shard=2)], ids=str)
def test_tied_weights_have_one_optimizer_state_and_stay_tied(mesh: Mesh) -> None:
    setup = Setup(mesh=mesh, optimizer="adamw", zero_stage=1 if mesh.dp_shard > 1 else 0)
    case = laid_out(seeded(Tied()), token_batch(), setup, micro_batch_size=2)
    program = lower_plan(case.model, case.plan)

    def run(communicator: Communicator) -> tuple[dict[str, Tensor], list[Tensor]]:
        engine = Engine(program, case.model, case.plan, communicator)
        engine.load_parameters(case.weights)
        for _ in range(2):
            engine.train_step(token_batch())
        own = engine.store.parameters.get("embed.weight")
        return engine.state_dict(), [] if own is None else [own.detach().clone()]

    found = run_mesh(mesh, run)
    for state, _ in found:
        keys = {key.rpartition("/")[2] for key in state if key.startswith("optimizer/exp_avg/")}
        assert keys == set(case.model.parameters)
        assert "head.weight" not in keys
    if mesh.dp_shard == 1:  # else ranks hold other rows
        copies = [copy for _, held in found for copy in held]
        assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_weights_tied_on_the_meta_device_stay_tied() -> None:
    weights = InitialWeights(tied_on_meta(), 0)
    setup = Setup(mesh=Mesh(pp=2))
    case = laid_out(seeded(Tied()), token_batch(), setup, micro_batch_size=2)
    case = replace(case, weights={name: weights[name] for name in weights})
    assert torch.equal(case.weights["head.weight"], case.weights["embed.weight"])
    assert_equals_reference(case, token_batch())


class HandsOn(nn.Module):
    """What later layers read that earlier ones made: integers, a bool mask, a bias that is a
    parameter's, an output of a first half (as of an encoder), and a buffer that all share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.bias = nn.Embedding(3, HIDDEN)
        self.encoder = nn.ModuleList(Plain() for _ in range(2))
        self.decoder = nn.ModuleList(Reader() for _ in range(3))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, HIDDEN))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.encoder:
            x = layer(x)
        memory = x
        groups, is_odd = memory.argmax(-1) % 3, memory.sum(-1) > 0
        bias = self.bias(torch.arange(SEQ) % 3)  # of no sequence: shared by all
        y = self.embed(labels.clamp(min=0))
        for layer in self.decoder:
            y = layer(y, memory, groups, is_odd, bias, self.scale)
        return nn.functional.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(HIDDEN, HIDDEN)
        self.table = nn.Embedding(3, HIDDEN)

    def forward(
        self, y: Tensor, memory: Tensor, groups: Tensor, is_odd: Tensor, bias: Tensor, scale: Tensor
    ) -> Tensor:
        seen = memory.masked_fill(is_odd.unsqueeze(-1), 0) + self.table(groups)
        return y + torch.tanh(self.base(y) + seen * scale + bias)


HANDED = [
    Setup(mesh=Mesh(pp=2)),
    Setup(mesh=Mesh(pp=3), schedule="layered", recompute="full"),
    Setup(mesh=Mesh(pp=4, dp_shard=2), zero_stage=3, recompute="full"),
    Setup(mesh=Mesh(pp=3, tp=2)),
]


@pytest.mark.parametrize("setup", HANDED, ids=str)
def test_values_that_skip_stages_keep_value_and_gradient(setup: Setup) -> None:
    batch = token_batch()
    case = laid_out(seeded(HandsOn()), batch, setup, micro_batch_size=1)
    program = lower_plan(case.model, case.plan)
    handed = {value for segment in program.segments for value in segment.sent}
    dtypes = {program.values[value].dtype for value in handed}
    assert {torch.int64, torch.bool, torch.float32} <= dtypes
    assert_equals_reference(case, batch)


def test_stages_share_a_buffer() -> None:
    case = laid_out(seeded(HandsOn()), token_batch(), Setup(mesh=Mesh(pp=4)), micro_batch_size=2)
    program = lower_plan(case.model, case.plan)
    holders = {
        segment.stage
        for segment in program.segments
        for value in segment.arguments
        if value.role is Role.CONSTANT and value.name == "scale"
    }
    assert len(holders) > 1


class WithUnused(Stack):
    """Has a trained parameter and a frozen one that the loss does not read."""

    def __init__(self) -> None:
        super().__init__([Plain(), Plain()])
        self.spare = nn.Linear(5, 3)
        self.spare.bias.requires_grad_(False)


UNUSED = [
    Setup(mesh=Mesh()),
    Setup(mesh=Mesh(pp=2, dp_shard=2), zero_stage=3, optimizer="adamw"),
    Setup(mesh=Mesh(dp_replicate=2, tp=2), optimizer="adamw"),
]


@pytest.mark.parametrize("setup", UNUSED, ids=str)
def test_unused_parameters_are_kept_and_checkpointed(setup: Setup, tmp_path: Path) -> None:
    case = laid_out(seeded(WithUnused()), token_batch(), setup, micro_batch_size=2)
    program = lower_plan(case.model, case.plan)

    def run(communicator: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        engine = Engine(program, case.model, case.plan, communicator)
        engine.load_parameters(case.weights)
        engine.train_step(token_batch())
        engine.save(tmp_path / "checkpoint")
        other = Engine(program, case.model, case.plan, communicator)
        other.load(tmp_path / "checkpoint")
        return engine.state_dict(), other.state_dict()

    for written, read in run_mesh(setup.mesh, run):
        for name in ("spare.weight", "spare.bias"):
            assert torch.equal(written[f"parameters/{name}"], case.weights[name])
            assert not any(key.startswith("optimizer") and key.endswith(name) for key in written)
        assert written.keys() == read.keys()
        for key, value in written.items():
            torch.testing.assert_close(read[key], value, rtol=0, atol=0)


class Asked(InitialWeights):
    """Remembers what was drawn."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__(model, seed)
        self.names: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.names.append(name)
        return super().__getitem__(name)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(mesh=Mesh(tp=2)),
        Setup(mesh=Mesh(tp=4)),
        Setup(mesh=Mesh(pp=2)),
        Setup(mesh=Mesh(pp=3, dp_shard=2), zero_stage=3),
    ],
    ids=str,
)
def test_initial_weights_do_not_depend_on_the_layout(setup: Setup) -> None:
    """A rank draws each parameter of its stage once, and no other."""
    expected = dict(InitialWeights(tied_on_meta(), 7))
    case = laid_out(Tied(), token_batch(), setup, micro_batch_size=2)
    program = lower_plan(case.model, case.plan)
    drawn = [Asked(tied_on_meta(), 7) for _ in range(setup.mesh.num_ranks)]

    def run(communicator: Communicator) -> tuple[dict[str, Tensor], set[str]]:
        engine = Engine(program, case.model, case.plan, communicator)
        engine.load_parameters(drawn[communicator.rank])
        return engine.full_parameters(), set(engine.store.parameters)

    for rank, (parameters, held) in enumerate(run_mesh(setup.mesh, run)):
        assert sorted(drawn[rank].names) == sorted(held)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def tied_on_meta() -> nn.Module:
    with meta_parameters():
        module = Tied()
    assert module.head.weight is module.embed.weight
    return module
