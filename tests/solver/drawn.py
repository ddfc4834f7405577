"""Random small instances of the search: models of 2 to 4 blocks, and clusters of up to 16 GPUs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph
from autopar.ir.plan import TrainingPlan
from autopar.solver import Cluster
from autopar.solver.candidates import Candidate
from autopar.solver.hardware.spec import Overlap
from autopar.solver.instance import Instance, make_instance
from autopar.solver.layout.model_facts import ModelFacts, model_facts
from tests.solver.graphs import block_model
from tests.solver.small import TRAINING

Value = TypeVar("Value")
Draw = Callable[[st.SearchStrategy[Value]], Value]

FACTORS = (0.1, 1.0, 10.0, 1000.0)
STEPS = st.tuples(st.sampled_from(["linear", "relu", "add", "mul"]), st.integers(0, 3))
PINS: list[dict[str, int | str]] = [
    {},
    {"loss_chunks": 1},
    {"loss_chunks": 1, "zero_stages": "open"},
    {"loss_chunks": 1, "offload_optimizer": "open"},
    {"loss_chunks": 1, "offload_activations": "open"},
]
DECISIONS = ("pp", "tp", "zero_stage", "schedule", "micro_batch_size", "virtual_stages")


def bodies(*, max_kinds: int = 2, max_ops: int = 4) -> st.SearchStrategy[list[Any]]:
    """Ops of one or two kinds of block, by ``block_model``."""
    body = st.lists(STEPS, min_size=1, max_size=max_ops)
    return st.lists(body, min_size=1, max_size=max_kinds)


@st.composite
def models(draw: Draw[Any], *, max_ops: int = 4) -> ModelGraph:
    """2 to 4 blocks of one or two kinds between a first and a last one."""
    num_blocks = draw(st.integers(2, 4))
    max_kinds = draw(st.sampled_from([1, 1, 2]))
    return block_model(*draw(bodies(max_kinds=max_kinds, max_ops=max_ops)), num_blocks=num_blocks)


@st.composite
def clusters(draw: Draw[Any], *, max_gpus: int = 16) -> Cluster:
    """Up to so many GPUs, of CPU ranks or of GPUs whose links and overlap are fast or slow."""
    sizes = [
        (nodes, inside)
        for nodes in (1, 2, 3, 4)
        for inside in range(1, 17)
        if 1 < nodes * inside <= max_gpus
    ]
    nodes, inside = draw(st.sampled_from(sizes))
    cluster = Cluster(
        draw(st.sampled_from(["cpu-local", "a100-80gb"])), nodes=nodes, gpus_per_node=inside
    )
    cluster = cluster.scaled(
        compute=draw(st.sampled_from([1.0, 0.01])),
        memory=draw(st.sampled_from([1.0, 0.001])),
        node=draw(st.sampled_from(FACTORS)),
        network=draw(st.sampled_from(FACTORS)),
    )
    return changed(
        cluster,
        slowdown=draw(st.sampled_from([None, 0.0, 1.0])),
        latency=draw(st.sampled_from([1.0, 0.0, 0.01])),
        launch=draw(st.sampled_from([1.0, 0.0])),
        host=draw(st.sampled_from([1.0, 1e6])),
    )


@st.composite
def mixed_clusters(draw: Draw[Any], *, max_gpus: int = 12) -> Cluster:
    """Two or three groups of nodes of CPU ranks or of GPUs, each as fast and large as it is, with
    fast or slow links between them.
    """
    name = draw(st.sampled_from(["cpu-local", "a100-80gb"]))
    groups: list[Cluster] = []
    for left in range(draw(st.integers(2, 3)), 0, -1):
        most = max_gpus - sum(group.num_gpus for group in groups) - 2 * (left - 1)
        nodes, inside = draw(
            st.sampled_from([(n, g) for n in (1, 2, 3) for g in (1, 2, 3, 4, 8) if n * g <= most])
        )
        group = Cluster(name, nodes=nodes, gpus_per_node=inside).scaled(
            compute=draw(st.sampled_from([1.0, 0.5, 0.1])),
            memory=draw(st.sampled_from([1.0, 0.3, 0.001])),
            node=draw(st.sampled_from(FACTORS)),
            network=draw(st.sampled_from(FACTORS)),
        )
        groups.append(
            changed(
                group,
                slowdown=draw(st.sampled_from([None, 0.0, 1.0])),
                latency=draw(st.sampled_from([1.0, 0.01])),
                launch=draw(st.sampled_from([1.0, 0.0])),
            )
        )
    network = groups[0].hardware.network
    factor = draw(st.sampled_from(FACTORS))
    return Cluster.of_groups(
        groups,
        dataclasses.replace(network, node_bytes_per_s=factor * network.node_bytes_per_s),
    )


def changed(
    cluster: Cluster,
    *,
    slowdown: float | None = None,
    latency: float = 1,
    launch: float = 1,
    host: float = 1,
) -> Cluster:
    """With another slowdown by overlap, so many times the latency of links and of launches, and so
    many times the bandwidth to the host.
    """
    old = cluster.hardware
    hardware = dataclasses.replace(
        old,
        chip=dataclasses.replace(old.chip, launch_s=launch * old.chip.launch_s),
        overlap=old.overlap if slowdown is None else Overlap(slowdown=slowdown),
        node_link=dataclasses.replace(
            old.node_link,
            latency_s=latency * old.node_link.latency_s,
            latency_per_rank_s=latency * old.node_link.latency_per_rank_s,
        ),
        network=dataclasses.replace(old.network, latency_s=latency * old.network.latency_s),
        host_link=dataclasses.replace(
            old.host_link,
            bytes_per_s=host * old.host_link.bytes_per_s,
            node_bytes_per_s=host * old.host_link.node_bytes_per_s,
        ),
    )
    return cluster.with_hardware(hardware)


TRAININGS = st.sampled_from(
    [
        TRAINING,
        dataclasses.replace(TRAINING, optimizer="sgd"),
        dataclasses.replace(TRAINING, precision="bf16", gradient_dtype="bf16", reduce_dtype="bf16"),
    ]
)


def batches(cluster: Cluster) -> st.SearchStrategy[int]:
    """Batches that the GPUs can divide, or not."""
    return st.sampled_from(sorted({1, 2, 4, 6, 8, 12, cluster.num_gpus, 2 * cluster.num_gpus}))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Drawn:
    """An instance that prints as what makes it again."""

    instance: Instance

    def __repr__(self) -> str:
        made = self.instance
        ops = {
            kind.name: [node.name for node in kind.graph.nodes if node.op == "call_function"]
            for kind in made.facts.model.kinds.values()
        }
        nodes = " and ".join(map(_told, made.cluster.groups))
        return (
            f"{len(made.facts.model.blocks)} blocks {ops} on {nodes}, between "
            f"{made.cluster.between}; batch {made.global_batch_size}, {made.training.precision}, "
            f"{made.training.optimizer}, pins {dict(made.pin)}"
        )


def _told(cluster: Cluster) -> str:
    hardware = cluster.hardware
    link, chip = hardware.node_link, hardware.chip
    return (
        f"{cluster} with {cluster.usable_bytes} bytes, links {link.bytes_per_s:g} B/s "
        f"{link.latency_s:g} s, network {hardware.network.node_bytes_per_s:g} B/s, memory "
        f"{chip.hbm_bytes_per_s:g} B/s, fp32 {chip.peak_flops.fp32:g} FLOP/s, launches "
        f"{chip.launch_s:g} s, slowdown {hardware.overlap.slowdown:g}"
    )


@st.composite
def instances(
    draw: Draw[Any],
    *,
    max_gpus: int = 16,
    max_ops: int = 4,
    max_candidates: int = 100,
    mixed: bool = False,
) -> Drawn:
    """An instance with memory for all that its fastest plan keeps, or for a part of it; ``mixed``:
    on several groups of nodes.

    What has more candidates has decisions pinned to those of one of them.
    """
    model = model_facts(draw(models(max_ops=max_ops)))
    cluster = draw(mixed_clusters() if mixed else clusters(max_gpus=max_gpus))
    training, batch = draw(TRAININGS), draw(batches(cluster))
    shares = st.sampled_from([None, None, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    share, *others = [draw(shares) for _ in cluster.groups]
    pin: dict[str, int | str] = draw(st.sampled_from(PINS))
    found = made(model, cluster, batch, training, pin)
    names = draw(st.permutations(DECISIONS))
    like = draw(st.integers(0, 2**16))
    found = narrowed(found, names, like, max_candidates)
    if share is not None:
        less = tighter_cluster(model, cluster, batch, training, share, found.pin, others)
        found = made(model, less, batch, training, found.pin)
    return Drawn(instance=found)


def made(
    model: ModelFacts,
    cluster: Cluster,
    batch: int,
    training: TrainingPlan,
    pin: Mapping[str, int | str] | None = None,
) -> Instance:
    """The instance, with the batch that it needs to have a mesh at all."""
    try:
        return make_instance(model, cluster, global_batch_size=batch, training=training, pin=pin)
    except InputError:
        batch *= cluster.num_gpus
        return make_instance(model, cluster, global_batch_size=batch, training=training, pin=pin)


def narrowed(instance: Instance, names: Sequence[str], like: int, max_candidates: int) -> Instance:
    """With decisions pinned one after the other, until few candidates are left."""
    chosen: Candidate = instance.candidates[like % len(instance.candidates)]
    pin = dict(instance.pin)
    for name in names:
        if len(instance.candidates) <= max_candidates:
            break
        pin[name] = getattr(chosen, name)
        if pin.get("zero_stage") == 0:  # then blocks have no others
            pin.pop("zero_stages", None)
        instance = instance.on(instance.cluster, pin=pin)
    return instance


def tighter_cluster(
    model: ModelFacts,
    cluster: Cluster,
    batch: int,
    training: TrainingPlan,
    share: float,
    pin: Mapping[str, int | str] | None = None,
    others: Sequence[float | None] = (),
) -> Cluster:
    """The cluster with so much of the memory that the fastest plan fills, context apart; groups of
    nodes after the first one with ``others``, None for what they have.
    """
    instance = made(model, cluster, batch, training, pin)
    best = instance.search.run(instance.candidates).best
    assert best is not None
    context = max(group.hardware.memory.context_bytes for group in cluster.groups)
    peak = max(best.stager.peak_bytes(best.cuts)) - context
    groups = [
        group if share is None else group.with_memory(max(1, math.floor(context + share * peak)))
        for group, share in zip(cluster.groups, (share, *others), strict=True)
    ]
    return Cluster.of_groups(groups, cluster.between) if cluster.between else groups[0]
