"""Tests of `autopar.passes`."""
