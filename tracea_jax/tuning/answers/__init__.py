"""From what was measured to an answer for a problem."""
