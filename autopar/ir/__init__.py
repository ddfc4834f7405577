"""The shared vocabulary: graph, mesh, placement, rules, schedule and plan."""
