"""An instance: a model, a cluster, a batch and pins, with the search over its candidates."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from autopar.ir.errors import InputError
from autopar.ir.graph import ModelGraph
from autopar.ir.plan import TrainingPlan
from autopar.solver.candidates import Candidate, Divisible
from autopar.solver.costs.memory import itemsizes
from autopar.solver.hardware import Cluster
from autopar.solver.hardware.spec import Hardware
from autopar.solver.layout.model_facts import ModelFacts, model_facts
from autopar.solver.loss_chunks import check_chunks
from autopar.solver.pins import Pins
from autopar.solver.search import Progress, Search
from autopar.solver.space import candidates


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Instance:
    """What is searched. Make it with ``make_instance``, and others like it with ``on``."""

    facts: ModelFacts
    cluster: Cluster
    global_batch_size: int
    training: TrainingPlan
    seq_len: int | None
    pin: Pins
    search: Search
    candidates: tuple[Candidate, ...]
    made_s: float  # seconds that it took to make

    def on(
        self,
        cluster: Cluster,
        *,
        global_batch_size: int | None = None,
        pin: Pins | None = None,
    ) -> Instance:
        """The same on another cluster, or with another batch or pins; what costs the same there is
        not worked out again.

        Raises:
            InputError: A pin cannot hold there, or no mesh divides the batch.
        """
        other = make_instance(
            self.facts,
            cluster,
            global_batch_size=global_batch_size or self.global_batch_size,
            training=self.training,
            seq_len=self.seq_len,
            pin=self.pin if pin is None else pin,
            progress=self.search.progress,
        )
        if self.cluster.is_mixed or cluster.is_mixed:
            return other
        if _without_links(self.cluster) != _without_links(cluster):
            return other
        known, ours = other.search.pricer.settings, self.search.pricer.settings
        if _links_alike(self.cluster, cluster):
            known.alone = ours.alone  # what either works out serves both
            return other
        inside = min(self.cluster.gpus_per_node, cluster.gpus_per_node)
        known.alone |= {
            key: setting
            for key, setting in ours.alone.items()
            if setting.cp * setting.ep == 1 and setting.tp * setting.strides[2] <= inside
        }
        return other


def make_instance(
    model: ModelGraph | ModelFacts,
    cluster: Cluster,
    *,
    global_batch_size: int,
    training: TrainingPlan,
    seq_len: int | None = None,
    pin: Pins | None = None,
    progress: Progress | None = None,
) -> Instance:
    """The instance; arguments are those of ``solve``.

    Raises:
        InputError: A pin that cannot hold, or no mesh that divides the batch.
    """
    started = time.perf_counter()
    if global_batch_size < 1:
        raise InputError(f"global_batch_size is {global_batch_size}; it must be at least 1")
    facts = model_facts(model) if isinstance(model, ModelGraph) else model
    seq_len = seq_len or sequence_length(facts.model)
    pin = dict(pin or {})
    check_chunks(facts, int(pin.get("loss_chunks", 1)))
    model_sizes = divisible(facts, seq_len)
    found = candidates(cluster, global_batch_size=global_batch_size, model=model_sizes, pin=pin)
    return Instance(
        facts=facts,
        cluster=cluster,
        global_batch_size=global_batch_size,
        training=training,
        seq_len=seq_len,
        pin=pin,
        search=Search(facts, cluster, itemsizes(training), progress=progress),
        candidates=found,
        made_s=time.perf_counter() - started,
    )


def divisible(facts: ModelFacts, seq_len: int | None) -> Divisible:
    """What of a model meshes have to divide."""
    return Divisible(
        num_blocks=len(facts.model.blocks),
        seq_len=seq_len,
        num_experts=facts.num_experts,
        kinds=tuple(block.kind for block in facts.model.blocks),
    )


def sequence_length(model: ModelGraph) -> int | None:
    """Dim 1 of the first input that has sequences; images and their like have none."""
    for tensor in model.inputs.values():
        if 1 < len(tensor.shape) < 4 and isinstance(tensor.shape[1], int):
            return tensor.shape[1]
    return None


def _links_alike(one: Cluster, other: Cluster) -> bool:
    """Whether groups of ranks see the same links, inside nodes and between them."""
    networks = one.hardware.network, other.hardware.network
    return one.gpus_per_node == other.gpus_per_node and networks[0] == networks[1]


def _without_links(cluster: Cluster) -> Hardware:
    """What costs inside a node depend on: neither memory that may be filled, nor the network."""
    hardware = cluster.hardware
    return replace(
        hardware,
        gpus_per_node=1,
        chip=replace(hardware.chip, usable_bytes=1),
        network=replace(hardware.network, node_bytes_per_s=1.0),
    )
