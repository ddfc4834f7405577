"""Tests of the `autopar` command."""
