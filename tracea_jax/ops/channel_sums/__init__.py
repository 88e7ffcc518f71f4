"""Two sums of each channel in one pass: the statistics and gradients of batch norms."""
