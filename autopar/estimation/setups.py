"""How a row is run: its cluster, and its layout as pins of the planner."""

from __future__ import annotations

from autopar.estimation.rows import GPUS_PER_NODE, EstimateRow
from autopar.solver import Cluster


def cluster_of(row: EstimateRow) -> Cluster:
    """The GPUs of a row, with its network or that of the hardware file."""
    nodes = -(-row.world_size // GPUS_PER_NODE)
    cluster = Cluster(row.gpu, nodes=nodes, gpus_per_node=row.world_size // nodes)
    return cluster if row.node_net_gbps is None else cluster.with_network(row.node_net_gbps)


def pins_of(row: EstimateRow) -> dict[str, int | str]:
    """All decisions of a row, by the names of pins.

    ZeRO over one rank shards nothing, and is stage 0; so are positions along a tensor axis of one
    rank not shared. Layers are spread evenly over stages, as frameworks do it. A head that is tied
    to Megatron-LM's sharded embedding shares its vocabulary in the loss, too; an untied one (of
    ``swiglu`` models) gives whole logits: without that, runs fit that ran out of memory. None
    of the frameworks computes its loss in chunks, or offloads anything.
    """
    return {
        "tp": row.tp,
        "pp": row.pp,
        "dp_replicate": row.dp // row.zero_shard,
        "dp_shard": row.zero_shard,
        "micro_batch_size": row.micro_batch,
        "zero_stage": row.zero_stage if row.zero_shard > 1 else 0,
        "recompute": row.act_ckpt,
        "schedule": "1f1b" if row.vpp == 1 else "interleaved",
        "virtual_stages": row.vpp,
        "cuts": "even",
        "sequence_parallel": int(row.seq_parallel and row.tp > 1),
        "loss_parallel": int(row.shape.mlp != "swiglu"),
        "loss_chunks": 1,
        "offload_optimizer": 0,
        "kernel": row.kernel,
        "precision": row.precision,
        "comm_precision": row.comm_precision,
        "grads_fp32": int(row.grads_fp32),
    }
