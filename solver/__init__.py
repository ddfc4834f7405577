"""The solver: costs, hardware, problem, ILP, search over meshes, and the simulator."""
