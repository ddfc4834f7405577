"""What only real processes can show: gloo's collectives and messages, ranks that fail or die."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.processes import Ended, run_processes

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def assert_all_succeed(ended: list[Ended]) -> None:
    for rank, end in enumerate(ended):
        assert end.code == 0, f"rank {rank}:\n{end.output[-3000:]}"


def test_gloo_ranks_compute_what_one_device_computes():
    """Slow: 32 setups on 4 processes, in one start because each costs seconds."""
    assert_all_succeed(run_processes(4, "parity"))


def test_gloo_ranks_go_on_from_another_plans_checkpoint(tmp_path: Path):
    """Slow: starts processes."""
    assert_all_succeed(run_processes(4, "checkpoint", str(tmp_path)))


def test_gloo_ranks_send_each_other_the_tokens_of_their_experts(tmp_path: Path):
    """Slow: starts processes."""
    assert_all_succeed(run_processes(2, "dispatch", str(tmp_path)))


@pytest.mark.parametrize("degrees", ["2,2,1", "1,2,2"])
def test_an_exception_on_one_rank_ends_all_within_seconds(degrees: str):
    """Slow: starts processes. Ranks may wait for 60 s, and must not."""
    ended = run_processes(4, "failing", "raises", "3", degrees)
    stage = 0 if degrees.startswith("1") else 1
    for end in ended:
        assert end.code == 3, end.output[-3000:]
        assert f"rank 3, stage {stage}, action F" in end.output
        assert "broken on purpose" in end.output
        assert end.after_s < 15


@pytest.mark.parametrize("rank", ["0", "3"])
def test_a_killed_rank_ends_the_others_within_seconds(rank: str):
    """Slow: starts processes. Rank 0 holds the rendezvous store, which dies with it."""
    ended = run_processes(4, "failing", "dies", rank, "2,2,1")
    for index, end in enumerate(ended):
        if index == int(rank):
            assert end.code == -9
            continue
        assert end.code == 3, end.output[-3000:]
        assert "lost the others" in end.output or "rendezvous store is gone" in end.output
        assert end.after_s < 30
