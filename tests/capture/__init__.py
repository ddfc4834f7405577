"""Tests of `autopar.capture`."""
