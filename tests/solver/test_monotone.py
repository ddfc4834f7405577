"""*Up to* so many GPUs, more of them, more memory and faster links never make the best plan slower.

Plans are found within a gap, so that this is said of what is proved: the bound of the larger
cluster is not above the step that the smaller one's plan takes.
"""

from collections.abc import Callable, Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.errors import InfeasibleError, InputError
from autopar.ir.plan import TrainingPlan
from autopar.ir.plan_search import ObjectivePlan
from autopar.solver import Cluster
from autopar.solver.layout.model_facts import ModelFacts, model_facts
from autopar.solver.objectives import StepTime
from autopar.solver.ranges import gpu_counts, solve_range
from tests.solver.drawn import TRAININGS, batches, clusters, models, tighter_cluster

MORE: Mapping[str, Callable[[Cluster], Cluster]] = {
    "a node more": lambda cluster: cluster.with_nodes(cluster.nodes + 1),
    "twice the nodes": lambda cluster: cluster.with_nodes(2 * cluster.nodes),
    "a bit more memory": lambda cluster: cluster.with_memory(cluster.usable_bytes + 500),
    "twice the memory": lambda cluster: cluster.with_memory(2 * cluster.usable_bytes),
    "a faster network": lambda cluster: cluster.scaled(network=1.3),
    "a network 100 times as fast": lambda cluster: cluster.scaled(network=100),
    "faster links in a node": lambda cluster: cluster.scaled(node=1.3),
    "links in a node 100 times as fast": lambda cluster: cluster.scaled(node=100),
}


def best_up_to(
    facts: ModelFacts, cluster: Cluster, batch: int, training: TrainingPlan
) -> ObjectivePlan | None:
    """The best over all GPU counts of a cluster; None where nothing fits, or divides the batch."""
    counts = gpu_counts(cluster, 1, cluster.num_gpus)
    points = [(cluster.with_gpus(count), batch) for count in counts]
    try:
        return solve_range(facts, points, StepTime(), training=training).objective
    except (InfeasibleError, InputError):
        return None


@settings(max_examples=settings().max_examples // 4)
@given(
    model=models(max_ops=3),
    cluster=clusters(max_gpus=6),
    training=TRAININGS,
    share=st.sampled_from([None, 1.0, 0.8, 0.6]),
    name=st.sampled_from(sorted(MORE)),
    data=st.data(),
)
def test_more_of_anything_never_makes_the_best_plan_slower(
    model, cluster, training, share, name, data
):
    facts, batch = model_facts(model), data.draw(batches(cluster))
    if share is not None:
        cluster = tighter_cluster(facts, cluster, batch, training, share)
    less = best_up_to(facts, cluster, batch, training)
    more = best_up_to(facts, MORE[name](cluster), batch, training)
    if less is not None:
        assert more is not None, f"{name}: nothing fits any more"
        assert more.bound <= less.value * (1 + 1e-9), name
