"""Finding sites of the ops in jaxprs, and replacing them.

Which sites there are, the rules in the records of the ops say; those of the built-in
ops are in the modules here. ``transform`` and ``explain`` use both.
"""

from tracea_jax import catalogue
from tracea_jax.rewrite.match import Match, Miss, Rule
from tracea_jax.rewrite.splice import splice


def rules() -> tuple[Rule, ...]:
    """The rules of every op, those of the op that was registered last first.

    An op may be made of those before it, so its sites are the larger ones: what they
    take, the others do not see.
    """
    return tuple(rule for op in reversed(catalogue.registered()) for rule in op.rules)


__all__ = ["Match", "Miss", "Rule", "rules", "splice"]
