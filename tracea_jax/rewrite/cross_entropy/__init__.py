"""Cross entropy over a large vocabulary, however it is spelled.

A product is the anchor. What a program computes of its result is followed, value by
value, to the one that is the logit of each row's label less the log-sum-exp of the row,
or its negative. Nothing else may use the logits.

Logits that are few stay as they are: chunks pay in memory. One thing may differ from
the program: a row with a logit of minus infinity has a loss of NaN where a one-hot
array is multiplied with it, and the loss of its label here.
"""

from __future__ import annotations

from tracea_jax.ops.linear_cross_entropy import chunks
from tracea_jax.rewrite.cross_entropy.head import Head, head_at
from tracea_jax.rewrite.cross_entropy.meaning import Loss, Reading
from tracea_jax.rewrite.cross_entropy.site import CrossEntropySite
from tracea_jax.rewrite.match import Match, Rule
from tracea_jax.rewrite.view import View


def match_cross_entropy(view: View, index: int) -> Match | str | None:
    """The loss of the logits at a ``dot_general``; why it stays; None if there is none.

    The decision about their number comes last: it is told of losses only.
    """
    if not _has_logarithms(view):
        return None
    head = head_at(view, index)
    if head is None:
        return None
    reading = Reading(view, head.result)
    loss = reading.loss()
    if loss is None or isinstance(loss, str):
        return loss
    rows, vocabulary = head.rows, head.product.n
    chunk = chunks.chunk_of(rows, vocabulary)
    if chunk is None:
        return chunks.why_at_once(rows, vocabulary)
    return _match(view, head, loss, chunk)


LINEAR_CROSS_ENTROPY = Rule(
    op="linear_cross_entropy",
    anchors=frozenset({"dot_general"}),
    match=match_cross_entropy,
)


def _has_logarithms(view: View) -> bool:
    """Most programs of many products have none."""
    if _has_logarithms not in view.memory:
        view.memory[_has_logarithms] = any(
            eqn.primitive.name == "log" for eqn in view.eqns
        )
    return view.memory[_has_logarithms]


def _match(view: View, head: Head, loss: Loss, chunk: int) -> Match | str:
    equations = head.equations | loss.equations
    if equations & view.taken or not view.are_interior(equations, loss.root):
        return "parts of it are used elsewhere, too"
    result = view.eqns[loss.root].outvars[0].aval
    site = CrossEntropySite(
        lhs=head.product.lhs,
        rhs=head.product.rhs,
        contraction=head.product.extents.ranks.contraction,
        moves=head.moves,
        has_bias=head.bias is not None,
        logits=head.dtype,
        precision=head.product.precision,
        chunk=chunk,
        sign=loss.sign,
        is_whole=loss.is_whole,
        is_raw=loss.is_raw,
        outside=loss.labels.outside,
        summed=loss.summed,
        lead=loss.lead,
        out=result.dtype.name,
        shape=tuple(result.shape),
    )
    extra = () if head.bias is None else (head.bias,)
    return Match(
        root=loss.root,
        equations=equations,
        operands=(*head.product.operands, *extra, loss.labels.atom),
        site=site,
    )
