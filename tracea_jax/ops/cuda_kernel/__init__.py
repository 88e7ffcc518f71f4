"""Kernels of users as ops: ``tracea_jax.cuda_kernel``."""
