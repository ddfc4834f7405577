"""The runtime runs a plan on its ranks: groups, actions, parameters, optimizer."""
