"""Ways of computing: positions and loss on the tensor axis, ops that backward computes again."""

import dataclasses
import itertools

import pytest

from autopar.capture import capture
from autopar.ir.errors import InputError
from autopar.ir.families import Family, family_of
from autopar.ir.graph import info
from autopar.ir.placement import REPLICATED, sharded
from autopar.solver.candidates import Way
from autopar.solver.cuts import layer_cuts
from autopar.solver.hardware import Cluster
from autopar.solver.layout.check import kind_costs
from autopar.solver.layout.frame import ClassRole
from autopar.solver.layout.model_facts import ModelFacts, model_facts
from autopar.solver.layout.stream import residual_stream
from autopar.solver.settings import Setting, make_setting
from autopar.solver.typed_axes import TypedAxes
from tests.models import tiny_llama

PLAIN = Way(
    kernels="flash_attention2", sequence_parallel=None, loss_parallel=True, recompute="none"
)


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    module, inputs = tiny_llama()
    return model_facts(capture(module, inputs))


def setting(facts: ModelFacts, **changes) -> Setting:
    cluster = Cluster("a100-80gb")
    return make_setting(
        facts,
        cluster,
        TypedAxes(facts=facts, cluster=cluster),
        cp=1,
        ep=1,
        tp=2,
        micro_batch_size=2,
        reduce_itemsize=4,
        way=dataclasses.replace(PLAIN, **changes),
    )


def chosen(made: Setting):
    """(kind, node, option) of every op."""
    solution = made.solution("none")
    for op, choice in zip(made.problem.ops, solution.choices, strict=True):
        yield made.problem.kinds[op.kind], op.node, op.options[choice].option


def test_without_sequence_parallelism_the_stream_is_whole(facts):
    streams = {
        name: {node.name for node in residual_stream(kind)}
        for name, kind in facts.model.kinds.items()
    }
    in_stream = 0
    for kind, node, option in chosen(setting(facts, sequence_parallel=False)):
        states = (*option.operands, *option.results)
        if node in streams[kind]:
            in_stream += 1
            assert not any(state.is_sharded for state in states), node
    assert in_stream > 10


def borders(made: Setting):
    """States of what blocks hand on."""
    solution = made.solution("none")
    return [
        state_class.states[state]
        for state_class, state in zip(made.problem.classes, solution.states, strict=True)
        if state_class.role is ClassRole.BOUNDARY
    ]


def test_with_sequence_parallelism_blocks_hand_on_positions(facts):
    found = borders(setting(facts, sequence_parallel=True))
    assert any(state.is_sharded and state.dim == 1 for state in found), found


def test_without_sequence_parallelism_messages_are_divided(facts):
    """Tensor ranks have all of what they send alike, and its gradient, so that each sends a part;
    together they send as much as with sequence parallelism, and gather it.
    """
    made = setting(facts, sequence_parallel=False)
    costs = made.costs(made.solution("none"))
    inner = slice(2, -1)  # between layers
    gathered, border = costs.gathered_bytes[inner], costs.border_bytes[inner]
    assert (gathered > 0.5 * border).all()
    assert (costs.sent_bytes[inner] == border - gathered / 2).all()
    split = setting(facts, sequence_parallel=True)
    other = split.costs(split.solution("none"))
    assert (costs.sent_bytes[inner] <= other.sent_bytes[inner]).all()
    assert not other.gathered_bytes[inner].any()


def test_the_free_layout_is_as_fast_as_the_better_of_both(facts):
    free, with_it, without = (
        setting(facts, sequence_parallel=value).solution("none").objective
        for value in (None, True, False)
    )
    assert free <= min(with_it, without) * (1 + 1e-9)


def test_whole_logits(facts):
    for kind, node, option in chosen(setting(facts, loss_parallel=False)):
        found = next(n for n in facts.model.kinds[kind].graph.nodes if n.name == node)
        if family_of(found) is Family.LOSS:
            assert not any(state.is_sharded for state in option.operands)


def test_what_is_computed_again_is_not_kept_and_takes_time(facts):
    counts = facts.model.multiplicity()
    layer = max(counts, key=lambda name: counts[name])
    kept, backward = {}, {}
    for recompute in ("none", "selective", "selective_op"):
        made = setting(facts, kernels="eager", sequence_parallel=False, recompute=recompute)
        cost = kind_costs(made.problem, made.solution("none"))[made.problem.kinds.index(layer)]
        kept[recompute], backward[recompute] = cost.held_bytes, cost.backward_s
    assert kept["none"] > kept["selective"] > kept["selective_op"] > 0
    assert backward["none"] < backward["selective"] < backward["selective_op"]


def test_layers_are_spread_evenly(facts):
    layers = max(facts.model.multiplicity().values())
    num = len(facts.model.blocks)
    assert layer_cuts(facts.model, 1) == (0, num)
    cuts = layer_cuts(facts.model, 2)
    assert cuts == (0, 1 + layers // 2, num)
    uneven = layer_cuts(facts.model, num - 1)
    assert len(uneven) == num
    assert all(b - a in (1, 2) for a, b in itertools.pairwise(uneven))


@pytest.mark.parametrize("gbps", [0, -1.0, float("inf"), float("nan")])
def test_a_network_has_a_positive_speed(gbps):
    from autopar.ir.errors import ClusterError

    with pytest.raises(ClusterError, match="node_gbps"):
        Cluster("a100-80gb", nodes=2).with_network(gbps)


def test_another_network_is_another_cluster():
    cluster = Cluster("a100-80gb", nodes=2)
    other = cluster.with_network(100)
    assert other.hardware.network.node_bytes_per_s == 12.5e9
    assert other.fingerprint != cluster.fingerprint
    assert cluster.hardware.network.node_bytes_per_s == 200e9


def test_kernels_are_checked_before_the_model_is_captured():
    from autopar.solver.pins import check_pins

    with pytest.raises(InputError, match="no kernels are called"):
        check_pins({"kernel": "magic"}, Cluster("a100-80gb"), 8)


def test_what_ranks_gathered_of_a_recomputed_value_is_kept(facts):
    """Both norms of a layer are computed again; that their results are gathered is not, unless
    that is done again, too.
    """
    made = setting(facts, sequence_parallel=True, gather_again=None)
    solution, layer = made.solution("none"), made.main_kind
    kept, gathering = (
        kind_costs(made.part_solvers()[True, gathers].problem, solution)[layer]
        for gathers in (False, True)
    )
    whole = next(iter(facts.model.kind_of(facts.model.blocks[1]).placeholders))
    both = 2 * made.coster.bytes(info(whole).tensor, REPLICATED)
    assert kept.held_bytes - gathering.held_bytes == both
    assert gathering.rebuilt_bytes - kept.rebuilt_bytes == both
    assert gathering.again_s > kept.again_s


def test_what_is_gathered_again_is_kept_as_it_was_made(facts):
    """Of each norm the shards, once for all who need them."""
    made = setting(facts, sequence_parallel=True, gather_again=None)
    solution, layer = made.solution("none"), made.main_kind
    once = kind_costs(made.problem, solution)[layer]
    again = kind_costs(made.part_solvers()[False, True].problem, solution)[layer]
    whole = next(iter(facts.model.kind_of(facts.model.blocks[1]).placeholders))
    both = 2 * made.coster.bytes(info(whole).tensor, REPLICATED)
    shards = both // made.tp
    assert once.held_bytes - again.held_bytes == both - shards
    assert again.rebuilt_bytes == both
    moves = made.coster.move(info(whole).tensor, sharded(1), REPLICATED)
    assert again.backward_s - once.backward_s == pytest.approx(2 * moves.forward_s)
