"""Tests: they mirror the sources, and each name is a claim (see README.md)."""
