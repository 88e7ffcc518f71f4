"""Kernel descriptions to CUDA source text."""
