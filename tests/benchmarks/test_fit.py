"""The fit of the cost model predicts as the planner does, and finds numbers that made its rows."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from autopar import Cluster
from autopar.api.planning import capture_request
from autopar.api.request import make_request
from autopar.calibration.fit import Free
from autopar.calibration.hardware import value_at
from autopar.estimation import EstimateRow, ModelShape, open_shape
from autopar.solver.facts import Floats
from autopar.solver.layout.model_facts import ModelFacts, model_facts
from autopar.solver.refiner import Refiner
from autopar.solver.solved import simulate_cuts
from benchmarks.fit.evaluate import Evaluator
from benchmarks.fit.least_errors import Found, decode, encode, fit_near, step_on
from benchmarks.fit.measured import Measured, read_measured
from benchmarks.fit.memory import RESERVE, fit_memory, memories
from benchmarks.fit.numbers import MEMORY, NUM_FITTED, TIMES, page_table
from benchmarks.fit.runs import Run, lay_out
from benchmarks.fit.workers import Fitter
from tests.rows import estimate_row

SHAPE = ModelShape(
    hidden=4096, layers=2, heads=32, kv_heads=32, ffn=11008, mlp="swiglu", vocab=32000, seq=2048
)
ROW = estimate_row(SHAPE, world_size=8, global_batch=64, micro_batch=4, dp=8)
LAYOUTS = (
    ROW,
    replace(ROW, tp=8, dp=1, seq_parallel=True),
    replace(ROW, tp=4, pp=2, dp=1, act_ckpt="full"),
    replace(ROW, world_size=32, dp=32, zero_stage=1, zero_shard=32, micro_batch=2),
    replace(ROW, world_size=32, dp=32, zero_stage=3, zero_shard=32, micro_batch=1),
    replace(ROW, world_size=16, pp=2, dp=8, kernel="eager", grads_fp32=True),
    replace(ROW, tp=2, dp=4, kernel="flash_attention2 + fused norms"),
)
TRUTH = {
    "efficiency.tile_256x128": 0.93,
    "efficiency.hbm": 0.7,
    "efficiency.eager": 0.4,
    "node_link.in_step": 0.55,
    "network.efficiency": 0.6,
}


def _measured(row: EstimateRow, number: int) -> Measured:
    return Measured(
        row=replace(row, id=str(number)),
        dataset="made",
        series=f"series {number % 2}",
        step_s=None,
        out_of_memory=None,
        used_gib=None,
    )


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    """Layouts of one model."""
    return lay_out([_measured(row, number) for number, row in enumerate(LAYOUTS)])


def _hardware_file(folder: Path, values: dict[str, float]) -> Path:
    """The file of the 80 GB A100 with other values."""
    text = (resources.files("autopar.solver.hardware") / "a100-80gb.toml").read_text()
    for number, value in values.items():
        section, name = number.split(".")
        head, tail = text.split(f"[{section}]\n")
        changed = re.sub(
            rf"\b{name} = {{ value = [^,]+", f"{name} = {{ value = {value}", tail, count=1
        )
        assert changed != tail
        text = f"{head}[{section}]\n{changed}"
    path = folder / "changed.toml"
    path.write_text(text)
    return path


def test_steps_are_the_planners(runs: list[Run]):
    assert Evaluator(runs).step_seconds({}) == pytest.approx([run.step_s for run in runs], 1e-12)


def test_steps_under_other_numbers_are_those_of_such_a_hardware_file(
    runs: list[Run], tmp_path: Path
):
    file = _hardware_file(tmp_path, TRUTH)
    some = (1, 4, 5)  # tensor parallelism, ZeRO 3 between nodes, an eager pipeline
    found = Evaluator(runs).step_seconds(TRUTH, some)
    for run, seconds in zip([runs[place] for place in some], found, strict=True):
        refiner, candidate = _refiner(run.cluster, run), run.candidate
        solved = refiner.solve_anyway(candidate)
        again = Cluster(file, nodes=run.cluster.nodes, gpus_per_node=run.cluster.gpus_per_node)
        pricer = _refiner(again, run).pricer
        setting = pricer.setting(candidate)
        stager = pricer.layout_stager(candidate, setting, solved.solution)
        same = simulate_cuts(candidate, setting, solved.solution, stager, solved.cuts)
        assert seconds == pytest.approx(same.step_s, rel=1e-9)
        assert max(stager.peak_bytes(solved.cuts)) == pytest.approx(_peak(run), rel=1e-6)


def _refiner(cluster: Cluster, run: Run) -> Refiner:
    return Refiner(_facts(), cluster, run.sizes)


def _peak(run: Run) -> float:
    hardware = run.cluster.hardware
    values = {number.path: value_at(hardware, number.path) for number in MEMORY}
    return float(memories([run]).peaks(values)[0])


@functools.cache
def _facts() -> ModelFacts:
    """Of the model of all rows, captured once more."""
    request = make_request(
        open_shape(SHAPE),
        Cluster("a100-80gb"),
        global_batch_size=8,
        seq_len=SHAPE.seq,
        pin={"precision": "bf16"},
    )
    return model_facts(capture_request(request))


def _timed(runs: list[Run], values: dict[str, float]) -> list[Run]:
    """The runs with the times that the model predicts under some numbers."""
    return [
        replace(run, measured=replace(run.measured, step_s=float(seconds)))
        for run, seconds in zip(runs, Evaluator(runs).step_seconds(values), strict=True)
    ]


def _fit(runs: list[Run], weights: Floats) -> dict[str, float]:
    free = [number.free for number in TIMES if number.path in TRUTH]
    fitter = Fitter(runs, free)
    x = encode(free, [value_at(runs[0].cluster.hardware, one.path) for one in free])
    found = Found(x=x, residuals=fitter.residuals(x))
    for _ in range(12):
        slopes = np.stack([fitter.slopes(found.x, n) for n in range(len(free))], axis=1)
        found = step_on(fitter.residuals, free, found, slopes, weights) or found
    return decode(free, found.x)


def test_numbers_that_made_the_times_are_found(runs: list[Run]):
    found = _fit(_timed(runs, TRUTH), np.ones(len(runs)))
    assert found == pytest.approx(TRUTH, rel=0.01)


def test_runs_without_a_weight_are_left_out(runs: list[Run]):
    timed = _timed(runs, TRUTH)
    timed[2] = replace(timed[2], measured=replace(timed[2].measured, step_s=1e-3))
    weights = np.ones(len(runs))
    weights[2] = 0
    assert _fit(timed, weights) == pytest.approx(TRUTH, rel=0.01)


def test_numbers_stay_in_their_range():
    free = [Free(path="a", low=0.5, high=1.0), Free(path="b", low=0.1, high=10.0)]

    def predict(x: Floats) -> Floats:
        return np.array([x[0] - np.log(2.0), x[0] + x[1] - np.log(6.0)])

    x = encode(free, [0.9, 1.0])
    slopes = np.array([[1.0, 0.0], [1.0, 1.0]])
    found = Found(x=x, residuals=predict(x))
    for _ in range(20):
        found = step_on(predict, free, found, slopes, np.ones(2)) or found
    # The first cannot be 2, and the second makes up for it where it can.
    assert decode(free, found.x) == pytest.approx({"a": 1.0, "b": 6.0}, rel=0.02)


def test_a_fit_near_another_finds_what_linear_residuals_say():
    free = [Free(path=name, low=0.01, high=100.0) for name in ("a", "b")]
    slopes = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    start = Found(x=encode(free, [1.0, 1.0]), residuals=np.array([-0.3, 0.2, 0.9]))
    found = decode(free, fit_near(free, start, slopes, np.array([1.0, 1.0, 0.0])))
    # The third run has no weight, so that the others are met.
    assert found == pytest.approx({"a": np.exp(0.3), "b": np.exp(-0.2)}, rel=1e-3)


def test_memory_numbers_are_right_of_runs_that_they_made(runs: list[Run]):
    truth = {
        "memory.context_bytes": 2.0 * 2**30,
        "memory.fragmentation": 0.1,
        "memory.overlap_fragmentation": 0.05,
        "memory.reserve": 0.2,
    }
    usable = np.full(len(runs), float(np.median(memories(runs).peaks(truth))))
    small = replace(memories(runs), usable=usable)
    ran_out = small.peaks(truth) > usable
    assert 0 < ran_out.sum() < len(runs)
    roomy = replace(small, usable=np.full(len(runs), 1e15))
    found = fit_memory(small, ran_out, roomy, roomy.shown(truth))
    assert np.array_equal(small.peaks(found) > small.usable, ran_out)
    errors = [
        np.abs(roomy.shown(found | {RESERVE: share}) / roomy.shown(truth) - 1).mean()
        for share in (0.0, found[RESERVE], 0.4)
    ]
    assert errors[1] == min(errors)


@pytest.mark.parametrize("name", ["a100-80gb", "a100-40gb"])
def test_hardware_files_name_the_fit_and_its_ranges(name: str):
    hardware = Cluster(name).hardware
    assert NUM_FITTED <= 30
    for number in (*TIMES, *MEMORY):
        assert number.low <= value_at(hardware, number.path) <= number.high, number.path
        source = hardware.sources[number.path]
        assert source.startswith("fit: ")
        assert source.endswith(f", benchmarks/fit; {number.plausible}"), number.path


def test_the_page_shows_the_fitted_numbers():
    """After a fit: `python -m benchmarks.fit.numbers` prints the table."""
    page = Path(__file__).parents[2] / "docs" / "concepts" / "costs.md"
    assert page_table(Cluster("a100-80gb").hardware) in page.read_text()


def test_doubtful_runs_are_not_read(tmp_path: Path):
    header = "id,hidden,layers,heads,vocab,seq,world_size,global_batch,micro_batch,series,outcome"
    more = "step_time_s,mem_gb,config_confidence,suspect"
    sizes = "64,2,4,128,32,8,8,1,sweep"
    lines = (
        f"a,{sizes},ok,1.5,10,exact,0",
        f"b,{sizes},oom,,,,",
        f"c,{sizes},ok,1.5,,LOW: guessed,",
        f"d,{sizes},ok,1.5,,,1",
        f"e,{sizes},other,1.5,,,",
    )
    (tmp_path / "runs.csv").write_text("\n".join((f"{header},{more}", *lines)))
    (tmp_path / "other.csv").write_text("gpus,bytes\n2,1024\n")
    found = read_measured(tmp_path)
    said = [(run.row.id, run.step_s, run.out_of_memory, run.used_gib) for run in found]
    assert said == [("a", 1.5, False, 10), ("b", None, True, None), ("e", None, None, None)]
    assert {(run.dataset, run.series) for run in found} == {("runs", "sweep")}
