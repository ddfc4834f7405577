"""Measured runs beside estimates: what is fastest, and what would be picked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.papers.measured import Run, picks, read_runs

HEAD = (
    "id,series,hidden,layers,heads,kv_heads,ffn,mlp,vocab,seq,world_size,global_batch,micro_batch,"
    "tp,pp,dp,seq_parallel,act_ckpt,kernel,gpu,vpp,zero_stage,precision,outcome,step_time_s\n"
)


def _line(name: str, recompute: str, outcome: str, seconds: str) -> str:
    return (
        f"{name},s,64,2,4,4,96,swiglu,256,32,2,4,1,1,1,2,0,{recompute},flash_attention2,"
        f"a100_80gb,1,1,bf16,{outcome},{seconds}\n"
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    path = tmp_path_factory.mktemp("runs") / "runs.csv"
    lines = [
        _line("a", "none", "ok", "2.0"),
        _line("b", "full", "ok", "1.0"),
        _line("c", "full", "oom", ""),
    ]
    path.write_text(HEAD + "".join(lines))
    return list(read_runs(path))


def test_runs_that_ended_are_estimated(runs: list[Run]) -> None:
    assert [run.row.id for run in runs] == ["a", "b"]
    assert runs[0].estimated_s < runs[1].estimated_s  # nothing is computed again
    assert all(run.fits for run in runs)


def test_the_pick_is_priced_by_its_measured_step(runs: list[Run]) -> None:
    (line,) = picks(runs).splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[3:5] == ["1, 1, 1 R", "1.0"]
    assert cells[6:] == ["1, 1, 1", "2.000"]
    does_not_fit = [replace(runs[0], fits=False), runs[1]]
    assert picks(does_not_fit).splitlines()[2].endswith("| 1, 1, 1 R | 1.000 |")
