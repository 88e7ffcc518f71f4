"""Finding the fastest config by measurement, and remembering it."""
