"""Read a table of layouts: every good row, and what is wrong with each of the others."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from autopar.estimation.cells import (
    Column,
    any_text,
    choice,
    flag,
    hardware,
    kernel,
    positive,
    whole,
)
from autopar.estimation.models import MLPS, ModelShape
from autopar.ir.errors import InputError
from autopar.ir.plan import RecomputeName
from autopar.solver.hardware.read import known_hardware

Precision = Literal["bf16", "fp16", "fp32"]
CommPrecision = Literal["half", "fp32"]

GPUS_PER_NODE = 8
"""Of every node of a table; a world of fewer ranks is part of one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRow:
    """A run: which model, on which GPUs, and how it is laid out.

    Attributes:
        row: Where it stands: 1 is the header.
        gpu: Name of the hardware.
        zero_shard: Ranks that share what ZeRO shards; 1 at stage 0.
        kernel: As a plan names kernels.
        comm_precision: Of gradients and parameters that are sent.
        node_net_gbps: Network of a node, in 1e9 bit/s; None: that of the hardware file.
    """

    row: int
    id: str
    shape: ModelShape
    gpu: str
    world_size: int
    global_batch: int
    micro_batch: int
    tp: int
    pp: int
    dp: int
    vpp: int
    seq_parallel: bool
    act_ckpt: RecomputeName
    zero_stage: int
    zero_shard: int
    kernel: str
    precision: Precision
    comm_precision: CommPrecision
    grads_fp32: bool
    node_net_gbps: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProblem:
    """What is wrong with a row. ``column`` is empty where it concerns several."""

    row: int
    id: str
    column: str
    value: str
    allowed: str

    def __str__(self) -> str:
        where = f"row {self.row}" + (f" ({self.id})" if self.id else "")
        if not self.column:
            return f"{where}: {self.allowed}"
        said = f"{self.column} is {self.value!r}" if self.value else f"{self.column} is empty"
        return f"{where}: {said}; allowed: {self.allowed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """What a file says, in its order."""

    rows: tuple[EstimateRow, ...]
    problems: tuple[RowProblem, ...]


def columns() -> dict[str, Column]:
    """The columns that are read, by name; others are ignored."""
    required = {
        name: replace(whole(1), required=True)
        for name in (
            "hidden",
            "layers",
            "heads",
            "vocab",
            "seq",
            "world_size",
            "global_batch",
            "micro_batch",
        )
    }
    return required | {
        "id": any_text(),
        "kv_heads": whole(1),
        "ffn": whole(1),
        "mlp": choice(MLPS),
        "tp": whole(1),
        "pp": whole(1),
        "dp": whole(1),
        "vpp": whole(1),
        "seq_parallel": flag(),
        "act_ckpt": choice(("none", "selective", "full", "selective_layer", "selective_op")),
        "zero_stage": whole(0, 3),
        "zero_shard": whole(1),
        "kernel": kernel(),
        "gpu": hardware(known_hardware()),
        "precision": choice(("bf16", "fp16", "fp32")),
        "comm_precision": choice(("half", "fp32")),
        "grads_fp32": flag(),
        "node_net_gbps": positive(),
    }


def read_rows(path: str | Path) -> RowTable:
    """The rows of a CSV file with a header (UTF-8, with or without a byte order mark).

    Raises:
        InputError: The file cannot be read, is no table, or lacks a column that is needed.
    """
    where, known = str(path), columns()
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read the rows: {error.strerror}", where=where) from None
    except UnicodeDecodeError as error:
        raise InputError(f"the rows are no UTF-8 text: {error.reason}", where=where) from None
    records = _records(text, where)
    header = next(records, (1, []))[1]
    _check_header(header, known, where)
    rows: list[EstimateRow] = []
    problems: list[RowProblem] = []
    seen: dict[str, int] = {}
    for number, cells in records:
        read = _Row(number, header, cells, known)
        row = read.row()
        if read.id in seen:
            read.report("id", read.id, f"an id of its own: row {seen[read.id]} has it")
        elif read.id:
            seen[read.id] = number
        problems += read.problems
        if row is not None and not read.problems:
            rows.append(row)
    if not rows and not problems:
        raise InputError("the table has no rows", where=where)
    return RowTable(rows=tuple(rows), problems=tuple(problems))


def _records(text: str, where: str) -> Iterator[tuple[int, list[str]]]:
    """Records that are not blank, with their numbers."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    number = 0
    while True:
        number += 1
        try:
            cells = [cell.strip() for cell in next(reader)]
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(
                f"row {number} is no CSV: {error}", where=where, hint="quote cells with commas"
            ) from None
        if any(cells):
            yield number, cells


def _check_header(header: list[str], known: Mapping[str, Column], where: str) -> None:
    if not header:
        raise InputError("the table is empty", where=where, hint="a CSV file with a header")
    twice = sorted({name for name in header if name in known and header.count(name) > 1})
    if twice:
        raise InputError(f"columns stand twice in the header: {', '.join(twice)}", where=where)
    missing = [name for name, column in known.items() if column.required and name not in header]
    if missing:
        raise InputError(f"the table has no column {', '.join(missing)}", where=where)


class _Row:
    """One record, as it is read."""

    def __init__(
        self, number: int, header: list[str], cells: list[str], known: Mapping[str, Column]
    ) -> None:
        self.number = number
        self.id = dict(zip(header, cells, strict=False)).get("id", "")
        self.problems: list[RowProblem] = []
        self.values: dict[str, Any] = {}
        if len(cells) != len(header):
            self.report("", "", f"it has {len(cells)} cells, the header {len(header)}")
            return
        texts = dict(zip(header, cells, strict=True))
        for name, column in known.items():
            self.values[name] = self._value(name, texts.get(name, ""), column)

    def report(self, column: str, value: object, allowed: str) -> None:
        """Note what is wrong."""
        self.problems.append(
            RowProblem(
                row=self.number, id=self.id, column=column, value=str(value), allowed=allowed
            )
        )

    def _value(self, name: str, text: str, column: Column) -> object:
        if not text and not column.required:
            return None
        try:
            return column.parse(text)
        except (ValueError, OverflowError):
            self.report(name, text, column.allowed)
            return None

    def row(self) -> EstimateRow | None:
        """The row with its defaults, or None where something is wrong with it."""
        if self.problems:
            return None
        shape, data_ranks = self._shape(), self._data_ranks()
        if shape is None or data_ranks is None:
            return None
        stage, precision = self._or("zero_stage", 0), self._or("precision", "bf16")
        return EstimateRow(
            row=self.number,
            id=self.id or str(self.number),
            shape=shape,
            gpu=self._or("gpu", "a100-80gb"),
            world_size=self.values["world_size"],
            global_batch=self.values["global_batch"],
            micro_batch=self.values["micro_batch"],
            tp=self._or("tp", 1),
            pp=self._or("pp", 1),
            dp=data_ranks,
            vpp=self._or("vpp", 1),
            seq_parallel=self._or("seq_parallel", False),
            act_ckpt=self._or("act_ckpt", "none"),
            zero_stage=stage,
            zero_shard=self._or("zero_shard", data_ranks) if stage else 1,
            kernel=self._or("kernel", "flash_attention2"),
            precision=precision,
            comm_precision=self._or("comm_precision", "fp32" if precision == "fp32" else "half"),
            grads_fp32=self._or("grads_fp32", False),
            node_net_gbps=self.values["node_net_gbps"],
        )

    def _or(self, name: str, default: Any) -> Any:
        value = self.values[name]
        return default if value is None else value

    def _shape(self) -> ModelShape | None:
        """The model's sizes: by default as many key heads as heads, and 4 · hidden features of a
        feed-forward network that is not gated.
        """
        of, mlp = self.values, self._or("mlp", "gelu4h")
        if of["ffn"] is None and mlp == "swiglu":
            self.report("ffn", "", "a whole number from 1 on: a swiglu has no default")
            return None
        try:
            return ModelShape(
                hidden=of["hidden"],
                layers=of["layers"],
                heads=of["heads"],
                kv_heads=self._or("kv_heads", of["heads"]),
                ffn=self._or("ffn", 4 * of["hidden"]),
                mlp=mlp,
                vocab=of["vocab"],
                seq=of["seq"],
            )
        except InputError as error:
            self.report("", "", error.what)
            return None

    def _data_ranks(self) -> int | None:
        """``dp``, if all degrees fit to each other and to the batch."""
        before = len(self.problems)
        world, batch, size = (
            self.values[name] for name in ("world_size", "global_batch", "micro_batch")
        )
        tp, pp = self._or("tp", 1), self._or("pp", 1)
        if world > GPUS_PER_NODE and world % GPUS_PER_NODE:
            self.report("world_size", world, f"up to {GPUS_PER_NODE} GPUs, or nodes of so many")
        ranks, rest = divmod(world, tp * pp)
        if rest:
            self.report("world_size", world, f"a multiple of tp {tp} × pp {pp}")
            return None
        dp = self._or("dp", ranks)
        if dp != ranks:
            self.report("dp", dp, f"world_size {world} / (tp {tp} × pp {pp}) = {ranks}")
        elif batch % dp:
            self.report("global_batch", batch, f"a multiple of dp {dp}")
        elif size > batch // dp:
            self.report("micro_batch", size, f"up to global_batch {batch} / dp {dp}")
        shard = self._or("zero_shard", dp)
        if self._or("zero_stage", 0) and dp % shard:
            self.report("zero_shard", shard, f"a divisor of dp {dp}")
        if self._or("vpp", 1) > 1 and pp == 1:
            self.report("vpp", self.values["vpp"], "1, as there is one pipeline stage")
        return dp if len(self.problems) == before else None
