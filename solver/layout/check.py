"""Costs of a given choice of options and states, by code that knows no solver."""

from __future__ import annotations

from autopar.solver.layout.problem import KindCost, Problem, Solution, Weights


def kind_costs(problem: Problem, solution: Solution) -> tuple[KindCost, ...]:
    """What a block of each kind costs when its ops and classes choose as in ``solution``."""
    num = len(problem.kinds)
    forward, backward = [0.0] * num, [0.0] * num
    forward_comm, backward_comm = [0.0] * num, [0.0] * num
    launches = [[0.0, 0.0] for _ in range(num)]
    again = [[0.0, 0.0] for _ in range(num)]
    transient, rebuilt = [0] * num, [0] * num
    demanded: set[tuple[int, int]] = set()
    produced: dict[int, int] = {}
    kept: dict[int, None] = {}
    weight, waiting = [0.0] * num, [0] * num
    awaited: set[tuple[int, int]] = set()  # values that ops keep for the gradients of weights
    for op, choice in zip(problem.ops, solution.choices, strict=True):
        option = op.options[choice]
        forward[op.kind] += option.forward_s
        backward[op.kind] += option.backward_s
        forward_comm[op.kind] += option.forward_comm_s
        backward_comm[op.kind] += option.backward_comm_s
        launches[op.kind][0] += option.forward_launch_s
        launches[op.kind][1] += option.backward_launch_s
        transient[op.kind] = max(transient[op.kind], option.transient_bytes)
        again[op.kind][0] += option.again_s
        again[op.kind][1] += option.again_launch_s
        rebuilt[op.kind] += option.rebuilt_bytes
        for value, state in zip(op.operands, option.option.operands, strict=True):
            demanded.add((value, problem.values[value].demanded.index(state)))
        for value, state in zip(op.results, option.option.results, strict=True):
            produced[value] = problem.values[value].states.index(state)
        kept.update(dict.fromkeys(option.held))
        weight[op.kind] += option.weight_s
        waiting[op.kind] += option.waiting_bytes
        for place, num_bytes in option.waiting:
            if (op.operands[place], num_bytes) not in awaited:
                awaited.add((op.operands[place], num_bytes))
                waiting[op.kind] += num_bytes
    for number, found in enumerate(problem.values):
        if found.state_class is not None:
            produced[number] = solution.states[found.state_class]
    for state_class, chosen in zip(problem.classes, solution.states, strict=True):
        for kind, costs in state_class.outer.items():
            forward[kind] += costs[chosen].forward_s
            backward[kind] += costs[chosen].backward_s
            forward_comm[kind] += costs[chosen].forward_s
            backward_comm[kind] += costs[chosen].backward_s
    for delivery in problem.deliveries:
        state = problem.classes[delivery.state_class].states[solution.states[delivery.state_class]]
        target = problem.values[delivery.value].demanded.index(state)
        demanded.add((delivery.value, target))
    for number, target in sorted(demanded):
        found = problem.values[number]
        cost = found.moves[produced[number], target]
        forward[found.kind] += cost.forward_s
        backward[found.kind] += cost.backward_s
        forward_comm[found.kind] += cost.forward_s
        backward_comm[found.kind] += cost.backward_s
    held = [0] * num
    for number in kept:
        entry = problem.held[number]
        if entry.made is not None and produced[entry.made] in entry.free:
            continue
        held[entry.kind] += entry.num_bytes
        backward[entry.kind] += entry.again_s
        backward_comm[entry.kind] += entry.again_s
        again[entry.kind][0] += entry.again_s
        rebuilt[entry.kind] += entry.rebuilt_bytes
    return tuple(
        KindCost(
            forward_s=forward[kind],
            backward_s=backward[kind],
            forward_comm_s=forward_comm[kind],
            backward_comm_s=backward_comm[kind],
            held_bytes=held[kind],
            rebuilt_bytes=rebuilt[kind],
            transient_bytes=transient[kind],
            weight_s=weight[kind],
            waiting_bytes=waiting[kind],
            forward_launch_s=launches[kind][0],
            backward_launch_s=launches[kind][1],
            again_s=again[kind][0],
            again_launch_s=again[kind][1],
        )
        for kind in range(num)
    )


def step_seconds(problem: Problem, solution: Solution) -> float:
    """Seconds once a step: reductions of gradients over the axis."""
    return sum(
        state_class.step_s[state]
        for state_class, state in zip(problem.classes, solution.states, strict=True)
        if state >= 0
    )


def objective(problem: Problem, solution: Solution, weights: Weights) -> float:
    """The objective of ``weights`` at ``solution``."""
    total = weights.step * step_seconds(problem, solution)
    for kind, cost in enumerate(kind_costs(problem, solution)):
        total += weights.forward[kind] * cost.forward_s + weights.backward[kind] * cost.backward_s
        total += weights.held[kind] * cost.held_bytes
        total += sum(weights.waiting[kind : kind + 1]) * cost.waiting_bytes
        total += sum(weights.input[kind : kind + 1]) * (cost.backward_s - cost.weight_s)
    for state_class, state, size in zip(
        problem.classes, solution.states, weights.parameters, strict=True
    ):
        total += size * state_class.numel[state] if state >= 0 and size else 0.0
    return total
