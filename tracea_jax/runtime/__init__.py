"""From kernel text to a launch: compile, keep, hand to XLA."""
