"""Batches of any size and content weigh as on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture, run_reference
from autopar.ir.errors import InputError, PlacementError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import BatchPlan, Plan
from autopar.passes import lower_plan
from autopar.runtime.batches import checksum
from autopar.runtime.communicator import Communicator
from autopar.runtime.engine import Engine
from autopar.runtime.results import StepResult
from autopar.runtime.threads import run_mesh
from tests.models import VOCAB, tiny_llama
from tests.runtime.cases import Setup, initial_parameters, make_batch, make_model, make_plan
from tests.runtime.harness import assert_close, make_engine
from tests.runtime.laid_out import assert_equals_reference, laid_out

Batch = dict[str, Tensor]


def with_micro_batches(plan: Plan, size: int) -> Plan:
    own = plan.batch.global_batch_size // plan.device_mesh().batch_ranks
    batch = BatchPlan(
        global_batch_size=plan.batch.global_batch_size,
        micro_batch_size=size,
        num_micro_batches=-(-own // size),
    )
    return replace(plan, batch=batch)


SHORT = [
    (Setup(), 3),  # 3, 3 and 2 sequences
    (Setup(mesh=Mesh(dp_shard=2), zero_stage=3, recompute="full"), 3),  # 3 and 1
    (Setup(mesh=Mesh(pp=2), schedule="layered"), 5),
    (Setup(mesh=Mesh(pp=2, tp=2), sequence=True), 3),
    (Setup(mesh=Mesh(pp=4), layers=3), 7),
    (Setup(name="dropout", mesh=Mesh(dp_replicate=2), recompute="full"), 3),
    (Setup(mesh=Mesh(pp=2), offloaded_blocks=(0, 1, 2)), 3),
]


@pytest.mark.parametrize(("setup", "size"), SHORT, ids=str)
def test_a_shorter_last_micro_batch_changes_nothing(setup: Setup, size: int) -> None:
    model = make_model(setup.name, setup.layers, setup.precision)
    plan = with_micro_batches(make_plan(setup), size)
    program = lower_plan(model, plan)
    assert program.rest is not None
    weights = initial_parameters(setup.name, setup.layers, setup.precision)
    batch = make_batch(setup.name, seed=0)

    def run(communicator: Communicator) -> tuple[StepResult, Mapping[str, Tensor]]:
        engine = Engine(program, model, plan, communicator, keep_gradients=True)
        engine.load_parameters(weights)
        return engine.train_step(batch), engine.full_gradients()

    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    total, weight = run_reference(model, leaves, batch)
    assert weight is not None
    (total / weight).backward()
    expected = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for result, gradients in run_mesh(setup.mesh, run):
        assert result.loss == pytest.approx((total / weight).item(), abs=1e-5)
        assert_close(gradients, expected, 1e-4)


def test_a_layout_that_a_shorter_micro_batch_does_not_divide_is_refused() -> None:
    """Here dropout splits sequences over the tensor axis: 4 of them, and then 1."""
    setup = Setup(name="dropout", mesh=Mesh(dp_replicate=2, tp=2), num_micro_batches=1)
    plan = with_micro_batches(make_plan(setup), 3)
    with pytest.raises(PlacementError, match="does not divide"):
        lower_plan(make_model("dropout", 2, "fp32"), plan)


class MeanOfSquares(nn.Module):
    """A loss that is no sum over tokens: the mean over the sequences of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).square().mean()


def test_a_shorter_micro_batch_counts_by_its_sequences() -> None:
    batch = {"x": torch.arange(20.0).view(5, 4)}
    case = laid_out(MeanOfSquares(), batch, Setup(num_micro_batches=1), micro_batch_size=2)
    assert_equals_reference(case, batch)


def labelled(counts: tuple[int, ...]) -> Batch:
    """A Llama batch of 8 sequences of which each has so many valid labels, the first ones."""
    batch = make_batch("llama", seed=0)
    labels = torch.full_like(batch["labels"], -100)
    for row, count in enumerate(counts):
        # HF shifts labels by one: the first is nobody's target
        labels[row, 1 : count + 1] = torch.arange(count) % VOCAB
    return {**batch, "labels": labels}


@pytest.mark.parametrize(
    "counts",
    [
        (3, 0, 13, 0, 3, 0, 13, 0),
        (3, 13, 0, 0, 0, 0, 0, 0),
        (0, 0, 0, 0, 0, 0, 0, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("mesh", "precision"),
    [
        (Mesh(), "bf16"),
        (Mesh(dp_shard=2), "fp32"),
        (Mesh(pp=2), "fp32"),
        (Mesh(tp=2), "fp32"),
    ],
    ids=["one", "dp", "pp", "tp"],
)
def test_micro_batches_weigh_by_their_valid_tokens(
    counts: tuple[int, ...], mesh: Mesh, precision: str
) -> None:
    """Micro-batches with 3 and 13 valid labels, and such as have none: never NaN."""
    setup = Setup(mesh=mesh, num_micro_batches=4, precision=precision)  # type: ignore[arg-type]
    batch = labelled(counts)
    weights = initial_parameters("llama", 2, setup.precision)
    make_model("llama", 2, setup.precision)

    def run(communicator: Communicator) -> tuple[StepResult, Mapping[str, Tensor]]:
        engine = make_engine(setup, communicator)
        return engine.train_step(batch), engine.full_gradients()

    module, _ = tiny_llama(2)
    module.load_state_dict(weights, strict=False)
    loss = module(**batch).loss
    loss.backward()
    for result, gradients in run_mesh(mesh, run):
        assert result.num_tokens == sum(counts)
        tolerance = 1e-5 if precision == "fp32" else 5e-2
        assert result.loss == pytest.approx(loss.item(), abs=tolerance)
        assert all(gradient.isfinite().all() for gradient in gradients.values())
        if precision == "fp32":
            expected = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            assert_close(gradients, expected, 1e-4)


def test_a_batch_without_a_valid_token_changes_nothing_and_can_be_left_out() -> None:
    setup = Setup(mesh=Mesh(dp_shard=2), zero_stage=1, optimizer="adamw")
    make_model("llama", 2, "fp32")
    initial_parameters("llama", 2, "fp32")
    empty, good = labelled((0,) * 8), make_batch("llama", seed=1)

    def run(communicator: Communicator) -> tuple[bool, float, float]:
        engine, other = make_engine(setup, communicator), make_engine(setup, communicator)
        before = engine.full_parameters()
        with pytest.raises(InputError, match="no valid token"):
            engine.train_step(empty)
        after = engine.full_parameters()
        same = all(torch.equal(before[name], after[name]) for name in before)
        return same, engine.train_step(good).loss, other.train_step(good).loss

    for same, loss, expected in run_mesh(setup.mesh, run):
        assert same
        assert loss == expected


class Layer(nn.Module):
    """Attention under a mask, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        query, key, value = (
            part.view(batch, seq, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask[:, None]
        )
        return x + attended.transpose(1, 2).reshape(batch, seq, 16)


class Masked(nn.Module):
    """Position ids and any mask are inputs, and the loss is one over labels."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.positions = nn.Embedding(8, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor, position_ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def packed() -> Batch:
    """Sequences that are two documents each: positions start anew, and masks are block-diagonal."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(32, (8, 8), generator=generator)
    lengths = torch.tensor([3, 5, 1, 4, 2, 7, 6, 4])
    where = torch.arange(8)
    document = (where[None] >= lengths[:, None]).long()
    positions = where[None] - document * lengths[:, None]
    same = document[:, :, None] == document[:, None, :]
    mask = same & torch.ones(8, 8, dtype=torch.bool).tril()
    return {"ids": ids, "position_ids": positions, "mask": mask, "labels": ids.clone()}


def padded() -> Batch:
    """Sequences padded on the left: nobody sees padding, and padding sees nothing."""
    batch = packed()
    padding = torch.tensor([0, 1, 2, 3, 4, 5, 6, 8])
    is_real = torch.arange(8)[None] >= padding[:, None]
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    mask = causal & is_real[:, None, :] & is_real[:, :, None]
    labels = batch["ids"].masked_fill(~is_real, -100)
    return {**batch, "mask": mask, "labels": labels}


@pytest.mark.parametrize("make", [packed, padded])
@pytest.mark.parametrize("mesh", [Mesh(dp_shard=2), Mesh(tp=2), Mesh(pp=2)], ids=["dp", "tp", "pp"])
def test_masks_and_positions_are_inputs_like_others(make: Callable[[], Batch], mesh: Mesh) -> None:
    batch = make()
    torch.manual_seed(0)
    case = laid_out(Masked(), batch, Setup(mesh=mesh), micro_batch_size=2)
    assert_equals_reference(case, batch)


def test_ranks_that_were_given_different_batches_all_say_so() -> None:
    setup = Setup(mesh=Mesh(dp_shard=2, tp=2))
    make_model("llama", 2, "fp32")
    initial_parameters("llama", 2, "fp32")

    def run(communicator: Communicator) -> float:
        engine = make_engine(setup, communicator)
        with pytest.raises(InputError, match="different global batches"):
            engine.train_step(make_batch("llama", seed=communicator.rank // 3))
        return engine.train_step(make_batch("llama", seed=0)).loss

    assert len(set(run_mesh(setup.mesh, run))) == 1


def test_checksums_see_names_shapes_types_and_values() -> None:
    batch = make_batch("llama", seed=0)
    others: list[Mapping[str, Tensor]] = [
        make_batch("llama", seed=1),
        {**batch, "more": batch["labels"]},
        {name: tensor[:, :-1] for name, tensor in batch.items()},
        {**batch, "labels": batch["labels"].flip(0)},
    ]
    assert checksum(batch) == checksum({name: t.clone() for name, t in batch.items()})
    assert checksum(batch) not in {checksum(other) for other in others}


def test_captured_types_do_not_depend_on_the_masks_type() -> None:
    """A bool mask stays bool, whatever is computed in."""
    model = capture(Masked(), packed(), compute_dtype=torch.bfloat16)
    assert model.inputs["mask"].dtype == torch.bool


class WithExtras(nn.Module):
    """Takes an input that it never reads, and one of which only the result is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, ignored: Tensor, dropped: Tensor) -> Tensor:
        _ = self.linear(dropped)
        return self.linear(x).square().mean()


def test_inputs_that_nothing_reads_need_not_be_in_a_batch() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    extras = {"ignored": torch.randn(8, 3, 5), "dropped": torch.randn(8, 4)}
    setup = Setup(mesh=Mesh(dp_replicate=2))
    case = laid_out(WithExtras(), {"x": x, **extras}, setup, micro_batch_size=2)
    assert_equals_reference(case, {"x": x})
    assert_equals_reference(case, {"x": x, **extras})
    assert_equals_reference(case, {"x": x, "ignored": torch.zeros(1)})
