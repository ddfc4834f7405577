"""The placement problem of one axis: data, build, solve, decode, check."""
