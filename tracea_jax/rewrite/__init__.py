"""Finding products, convolutions and attention in jaxprs, and replacing them."""

from tracea_jax.rewrite.attention import ATTENTION
from tracea_jax.rewrite.conv2d import CONV2D
from tracea_jax.rewrite.gated_matmul import GATED_MATMUL
from tracea_jax.rewrite.match import Match, Miss, Rule
from tracea_jax.rewrite.matmul import MATMUL
from tracea_jax.rewrite.splice import splice

# Larger sites first: what they take, the others do not see.
RULES: tuple[Rule, ...] = (ATTENTION, CONV2D, GATED_MATMUL, MATMUL)
OPS = tuple(dict.fromkeys(rule.op for rule in RULES))

__all__ = ["OPS", "RULES", "Match", "Miss", "Rule", "splice"]
