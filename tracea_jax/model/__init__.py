"""How long choices take, predicted; see ``model``."""
