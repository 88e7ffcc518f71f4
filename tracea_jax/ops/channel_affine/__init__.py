"""Scales and shifts of channels, whose gradients are sums over all else."""
