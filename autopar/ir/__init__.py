"""The shared vocabulary: graph, mesh, placement, rules, schedule and plan. Depends on nothing above it."""
