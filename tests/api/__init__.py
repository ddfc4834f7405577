"""Tests of `autopar.api`."""
