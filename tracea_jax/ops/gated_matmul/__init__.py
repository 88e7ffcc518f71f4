"""Gated matrix products."""
