"""Cross entropy of logits that are a product: in chunks, never all at once."""
