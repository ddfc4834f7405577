"""Composes the stages for a user: plan, compile, explain."""
