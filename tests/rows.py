"""A row of ``autopar estimate`` for tests: what all of them leave as it is."""

from typing import Any

from autopar.estimation import EstimateRow, ModelShape


def estimate_row(shape: ModelShape, **given: Any) -> EstimateRow:
    """One rank of everything, micro-batches of one sequence and mixed precision, but for what is
    given; the size of the world and of the batch have to be.
    """
    fields: dict[str, Any] = {
        "row": 2,
        "id": "",
        "gpu": "a100-80gb",
        "micro_batch": 1,
        "tp": 1,
        "pp": 1,
        "dp": 1,
        "vpp": 1,
        "seq_parallel": False,
        "act_ckpt": "none",
        "zero_stage": 0,
        "zero_shard": 1,
        "kernel": "flash_attention2",
        "precision": "bf16",
        "comm_precision": "half",
        "grads_fp32": False,
        "node_net_gbps": None,
    }
    return EstimateRow(shape=shape, **{**fields, **given})
