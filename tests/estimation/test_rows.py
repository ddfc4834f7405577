"""Tables of layouts: good rows are read, bad ones are named."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.estimation import EstimateRow, RowTable, cluster_of, pins_of, read_rows
from autopar.ir.errors import InputError
from autopar.solver import Cluster

REQUIRED: dict[str, Any] = {
    "id": "a",
    "hidden": 64,
    "layers": 4,
    "heads": 4,
    "vocab": 128,
    "seq": 32,
    "world_size": 16,
    "global_batch": 32,
    "micro_batch": 1,
}
FULL: dict[str, Any] = {
    **REQUIRED,
    "kv_heads": 2,
    "ffn": 176,
    "mlp": "swiglu",
    "tp": 2,
    "pp": 2,
    "dp": 4,
    "vpp": 2,
    "seq_parallel": 1,
    "act_ckpt": "selective_op",
    "zero_stage": 1,
    "zero_shard": 2,
    "kernel": "flash_attention2 + RMS kernel",
    "gpu": "a100_40gb",
    "precision": "fp16",
    "comm_precision": "fp32",
    "grads_fp32": 1,
    "node_net_gbps": 400,
}


def table(folder: Path, *rows: dict[str, Any], encoding: str = "utf-8") -> Path:
    """A file with ``rows``, and with the columns of the first."""
    path = folder / "rows.csv"
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(folder: Path, *rows: dict[str, Any]) -> RowTable:
    return read_rows(table(folder, *rows))


def only(folder: Path, **values: Any) -> EstimateRow:
    """The one row with ``values``, which is good."""
    found = read(folder, {**REQUIRED, **values})
    assert found.problems == ()
    return found.rows[0]


def test_a_full_row_becomes_pins(tmp_path: Path) -> None:
    row = only(tmp_path, **FULL)
    assert pins_of(row) == {
        "tp": 2,
        "pp": 2,
        "dp_replicate": 2,
        "dp_shard": 2,
        "micro_batch_size": 1,
        "zero_stage": 1,
        "recompute": "selective_op",
        "schedule": "interleaved",
        "virtual_stages": 2,
        "cuts": "even",
        "sequence_parallel": 1,
        "loss_parallel": 0,
        "loss_chunks": 1,
        "offload_optimizer": 0,
        "kernel": "flash_attention2 + fused norms",
        "precision": "fp16",
        "comm_precision": "fp32",
        "grads_fp32": 1,
    }
    cluster = cluster_of(row)
    assert (cluster.name, cluster.nodes, cluster.gpus_per_node) == ("a100-40gb", 2, 8)
    assert cluster.hardware.network.node_bytes_per_s == 50e9


def test_what_is_not_said_has_a_default(tmp_path: Path) -> None:
    row = only(tmp_path)
    assert pins_of(row) == {
        "tp": 1,
        "pp": 1,
        "dp_replicate": 16,
        "dp_shard": 1,
        "micro_batch_size": 1,
        "zero_stage": 0,
        "recompute": "none",
        "schedule": "1f1b",
        "virtual_stages": 1,
        "cuts": "even",
        "sequence_parallel": 0,
        "loss_parallel": 1,
        "loss_chunks": 1,
        "offload_optimizer": 0,
        "kernel": "flash_attention2",
        "precision": "bf16",
        "comm_precision": "half",
        "grads_fp32": 0,
    }
    assert (row.shape.ffn, row.shape.kv_heads, row.shape.mlp) == (256, 4, "gelu4h")
    assert row.node_net_gbps is None
    assert cluster_of(row).fingerprint == Cluster("a100-80gb", nodes=2).fingerprint
    emptied = only(tmp_path, **{n: "" for n in FULL if n not in REQUIRED})
    assert emptied == row


def test_gradients_are_sent_as_wide_as_compute_is_unless_told(tmp_path: Path) -> None:
    assert pins_of(only(tmp_path, precision="fp16"))["comm_precision"] == "half"
    assert pins_of(only(tmp_path, precision="fp32"))["comm_precision"] == "fp32"


def test_zero_shards_over_all_data_ranks_unless_told(tmp_path: Path) -> None:
    pins = pins_of(only(tmp_path, zero_stage=3, tp=2))
    assert (pins["dp_replicate"], pins["dp_shard"], pins["zero_stage"]) == (1, 8, 3)


def test_zero_over_one_rank_is_stage_0(tmp_path: Path) -> None:
    pins = pins_of(only(tmp_path, zero_stage=1, world_size=2, tp=2, zero_shard=1, dp=1))
    assert (pins["dp_replicate"], pins["dp_shard"], pins["zero_stage"]) == (1, 1, 0)


def test_stage_0_shards_nothing(tmp_path: Path) -> None:
    pins = pins_of(only(tmp_path, zero_stage=0, zero_shard=8))
    assert (pins["dp_replicate"], pins["dp_shard"]) == (16, 1)


def test_sequence_parallelism_needs_tensor_ranks(tmp_path: Path) -> None:
    assert pins_of(only(tmp_path, seq_parallel=1))["sequence_parallel"] == 0


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("torch", "eager"),
        ("fused", "fused_softmax"),
        ("flash_attentionv1.0.8", "flash_attention1"),
        ("fused_softmax", "fused_causal_softmax + fused pointwise"),
        ("flash_attention", "flash_attention2 + fused norms"),
        ("flash_triton", "flash_attention1 + fused norms"),
        ("eager", "eager"),
        ("flash_attention2+fused pointwise", "flash_attention2 + fused pointwise"),
    ],
)
def test_kernels_by_the_names_of_frameworks(tmp_path: Path, theirs: str, ours: str) -> None:
    assert only(tmp_path, kernel=theirs).kernel == ours


@pytest.mark.parametrize("name", ["a100_80gb", "A100-80GB", "h100_80gb"])
def test_hardware_by_its_name(tmp_path: Path, name: str) -> None:
    assert cluster_of(only(tmp_path, gpu=name)).name == name.lower().replace("_", "-")


@pytest.mark.parametrize("text", ["4", "4.0", " 4 ", "4e0"])
def test_whole_numbers_as_tables_write_them(tmp_path: Path, text: str) -> None:
    assert only(tmp_path, layers=text).shape.layers == 4


@pytest.mark.parametrize(
    ("column", "value", "allowed"),
    [
        ("hidden", "NaN", "a whole number from 1 on"),
        ("hidden", "", "a whole number from 1 on"),
        ("layers", "-4", "a whole number from 1 on"),
        ("layers", "0", "a whole number from 1 on"),
        ("layers", "4.5", "a whole number from 1 on"),
        ("layers", "1e400", "a whole number from 1 on"),
        ("layers", "9" * 5000, "a whole number from 1 on"),
        ("layers", "²", "a whole number from 1 on"),
        ("seq", "inf", "a whole number from 1 on"),
        ("tp", "two", "a whole number from 1 on"),
        ("zero_stage", "4", "a whole number from 0 to 3"),
        ("seq_parallel", "2", "0 or 1"),
        ("act_ckpt", "some", "none or selective or full or selective_layer or selective_op"),
        ("kernel", "flash_attention9", "or kernels as a plan names them"),
        ("gpu", "v100", "a100-40gb or a100-80gb"),
        ("mlp", "relu", "gelu4h or swiglu"),
        ("mlp", "swiglu", "a swiglu has no default"),
        ("precision", "int8", "bf16 or fp16 or fp32"),
        ("comm_precision", "bf16", "half or fp32"),
        ("node_net_gbps", "-1", "a number above 0"),
        ("node_net_gbps", "nan", "a number above 0"),
        ("heads", "7", "heads=7 does not divide hidden=64"),
        ("kv_heads", "3", "kv_heads=3 does not divide heads=4"),
        ("kv_heads", "2", "a GPT-2 has no grouped heads"),
        ("dp", "8", "world_size 16 / (tp 1 × pp 1) = 16"),
        ("tp", "3", "a multiple of tp 3 × pp 1"),
        ("world_size", "12", "up to 8 GPUs, or nodes of so many"),
        ("global_batch", "24", "a multiple of dp 16"),
        ("micro_batch", "3", "up to global_batch 32 / dp 16"),
        ("vpp", "2", "as there is one pipeline stage"),
    ],
)
def test_a_bad_cell_is_named_and_costs_no_other_row(
    tmp_path: Path, column: str, value: str, allowed: str
) -> None:
    bad = {**REQUIRED, "id": "bad", column: value}
    good = dict.fromkeys(bad, "") | REQUIRED
    found = read(tmp_path, bad, good)
    assert [row.id for row in found.rows] == ["a"]
    problem = found.problems[0]
    assert {(problem.row, problem.id) for problem in found.problems} == {(2, "bad")}
    assert "row 2 (bad)" in str(problem)
    assert allowed in str(problem)
    if problem.column:
        assert problem.column in str(problem)


def test_every_bad_cell_of_a_row_is_named(tmp_path: Path) -> None:
    found = read(tmp_path, {**FULL, "hidden": -1, "kernel": "?", "zero_shard": "x"})
    assert {problem.column for problem in found.problems} == {"hidden", "kernel", "zero_shard"}
    assert found.rows == ()


def test_a_shard_that_does_not_divide_the_data_ranks(tmp_path: Path) -> None:
    (problem,) = read(tmp_path, {**FULL, "zero_shard": 3}).problems
    assert problem.column == "zero_shard"
    assert problem.allowed == "a divisor of dp 4"


def test_an_odd_head_has_no_rotary_positions(tmp_path: Path) -> None:
    (problem,) = read(tmp_path, {**FULL, "hidden": 60}).problems
    assert "an even number" in str(problem)


def test_an_id_is_the_first_row_with_it(tmp_path: Path) -> None:
    found = read(tmp_path, REQUIRED, REQUIRED, {**REQUIRED, "id": "b"})
    assert [row.row for row in found.rows] == [2, 4]
    assert str(found.problems[0]) == "row 3 (a): id is 'a'; allowed: an id of its own: row 2 has it"


def test_rows_without_ids_are_called_by_their_number(tmp_path: Path) -> None:
    bare = {name: value for name, value in REQUIRED.items() if name != "id"}
    assert [row.id for row in read(tmp_path, bare, bare).rows] == ["2", "3"]


def test_a_byte_order_mark_quoted_commas_and_other_columns(tmp_path: Path) -> None:
    row = {**REQUIRED, "id": "a, b", "notes": 'a "quoted", note\nof two lines'}
    found = read_rows(table(tmp_path, row, encoding="utf-8-sig"))
    assert [row.id for row in found.rows] == ["a, b"]


def test_a_record_with_too_few_or_many_cells_is_named(tmp_path: Path) -> None:
    path = table(tmp_path, REQUIRED)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, "b,64,4", lines[1].replace("a", "c") + ",1", ""]))
    found = read_rows(path)
    assert [row.id for row in found.rows] == ["a"]
    assert [(p.row, p.id) for p in found.problems] == [(3, "b"), (4, "c")]
    assert "it has 3 cells, the header 9" in str(found.problems[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the table is empty"),
        (b"\n\n", "the table is empty"),
        (b"\xef\xbb\xbf", "the table is empty"),
        (b"id,hidden\n", "no column layers, heads, vocab"),
        (b"id,hidden,hidden\n", "columns stand twice in the header: hidden"),
        (b"\xff\xfe", "no UTF-8 text"),
        (b'id,"hidden\n', "row 1 is no CSV"),
        (",".join(REQUIRED).encode() + b"\n", "the table has no rows"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_rows(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the rows"):
        read_rows(tmp_path / "none.csv")
    with pytest.raises(InputError, match="cannot read the rows"):
        read_rows(tmp_path)


_cells = st.one_of(
    st.text(max_size=8),
    st.integers(-2, 40).map(str),
    st.sampled_from(["nan", "inf", "1e9", "swiglu", "full", "torch", "1.5", "0x1"]),
)


@given(rows=st.lists(st.fixed_dictionaries(dict.fromkeys(FULL, _cells)), min_size=1, max_size=3))
def test_each_row_is_good_or_named(
    rows: list[dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    path = table(folder, FULL, *rows, encoding="utf-8")
    try:
        found = read_rows(path)
    except InputError:  # cells that end the record, or that are no UTF-8
        return
    numbers = {row.row for row in found.rows} | {problem.row for problem in found.problems}
    blank = sum(not any(cell.strip() for cell in row.values()) for row in rows)
    assert len(numbers) + blank == 1 + len(rows)
    assert not {row.row for row in found.rows} & {problem.row for problem in found.problems}
    for row in found.rows:
        pins = pins_of(row)
        assert all(isinstance(value, int | str) for value in pins.values())
        assert cluster_of(row).num_gpus == row.world_size == row.tp * row.pp * row.dp
