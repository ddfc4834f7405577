"""Tests of `autopar.ir`."""
