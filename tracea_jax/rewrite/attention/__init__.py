"""Attention, however it is spelled: softmax(scale * q @ k' + bias, where seen) @ v.

The softmax is the anchor. Before it, scores are scaled, masked and biased, back to a
product of queries and keys; after it, nothing may happen to the probabilities but a
product with the values. Dimensions are followed through all transposes and reshapes, so
any layout is found; masks are interpreted (see ``masks``).

One thing may differ from the program: the result for a query that sees no key at all,
which models avoid. The op gives the mean of all values, or just something finite, where
a mask of -inf gives NaN and an added mask gives a softmax of rounded scores. A result
that the program itself sets to zero there stays zero.
"""

from __future__ import annotations

from tracea_jax.rewrite.attention.masks import Term
from tracea_jax.rewrite.attention.op_call import call_of
from tracea_jax.rewrite.attention.output import Output, output_of
from tracea_jax.rewrite.attention.products import looks_like_attention, score_paths
from tracea_jax.rewrite.attention.scores import Scores, scores_along
from tracea_jax.rewrite.attention.softmax import Softmax, softmax_at
from tracea_jax.rewrite.attention.steps import Refused
from tracea_jax.rewrite.match import Match, Rule
from tracea_jax.rewrite.view import View


def match_attention(view: View, index: int) -> Match | str | None:
    """The attention around an ``exp``; why it stays as it is; None if it is another."""
    softmax = softmax_at(view, index)
    if softmax is None or not looks_like_attention(view, softmax):
        return None
    try:
        return _match(view, softmax)
    except Refused as refused:
        return str(refused)


ATTENTION = Rule(op="attention", anchors=frozenset({"exp"}), match=match_attention)


def _match(view: View, softmax: Softmax) -> Match:
    obstacles: list[str] = []
    refused = None
    for path in score_paths(view, softmax.x, obstacles):
        for zeroes in (True, False):
            try:
                scores = scores_along(view, path, softmax)
                return _matched(view, softmax, scores, zeroes)
            except Refused as reason:
                refused = refused or reason
    through = obstacles[0] if obstacles else "too much"
    raise refused or Refused(f"the scores go through {through}")


def _matched(view: View, softmax: Softmax, scores: Scores, zeroes: bool) -> Match:
    """The match for one reading of the scores and of the masked result."""
    output = output_of(view, softmax, scores, zeroes)
    equations = scores.equations | softmax.equations | output.equations
    if equations & view.taken:
        raise Refused("parts of it belong to another site")
    if not view.are_interior(equations, output.root):
        raise Refused("the scores are used elsewhere, too")
    if not scores.keys:
        raise Refused("there is only one key")
    terms = _terms(view, softmax, scores, output)
    return call_of(view, scores, output, terms, equations)


def _terms(
    view: View, softmax: Softmax, scores: Scores, output: Output
) -> tuple[Term, ...]:
    """The mask. What only sums or probabilities are masked with must be in it."""
    if scores.weights != scores.dims and (softmax.masks or softmax.repeated):
        raise Refused("its scores and sinks are masked together")
    terms = list(scores.terms)
    for keep in softmax.masks:
        terms += keep.terms(view, scores.dims)
    again = [*scores.repeated, *output.repeated]
    for keep in softmax.repeated:
        again += keep.terms(view, scores.dims)
    if not set(again) <= set(terms):
        raise Refused("the probabilities are masked, but not their scores")
    return tuple(dict.fromkeys(terms))
