"""Which configs to try next."""
