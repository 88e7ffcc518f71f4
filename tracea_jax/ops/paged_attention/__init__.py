"""Attention of one query a sequence to keys and values that lie in pages."""
