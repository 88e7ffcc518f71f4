"""The match of an attention that has been read: the call's operands, and the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from tracea_jax import catalogue, dispatch
from tracea_jax.ops.attention.primitives import attention_backward_p
from tracea_jax.ops.common import lowering
from tracea_jax.problem.attention import Alibi as Form
from tracea_jax.rewrite.attention.alibi import Alibi, alibi, sloped
from tracea_jax.rewrite.attention.bias import Bias
from tracea_jax.rewrite.attention.dims import Arrange, Dims, Factor, Labels, arrange
from tracea_jax.rewrite.attention.mask_arguments import Lengths, Seen
from tracea_jax.rewrite.attention.masks import Term
from tracea_jax.rewrite.attention.output import Output
from tracea_jax.rewrite.attention.roles import Roles, positions, size
from tracea_jax.rewrite.attention.scores import Scores
from tracea_jax.rewrite.attention.site import AttentionSite
from tracea_jax.rewrite.attention.sliced import Within, arranged
from tracea_jax.rewrite.attention.sources import Source
from tracea_jax.rewrite.attention.steps import Refused
from tracea_jax.rewrite.match import Match
from tracea_jax.rewrite.replace import calls_of, is_left_to_xla
from tracea_jax.rewrite.view import Atom, Equation, View

_ALL = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Arguments for a call of the op.

    Attributes:
      view: the equations.
      labels, roles: the parts of all dimensions, and what they are.
      scores, output: the parts of the program.
      terms, seen: the mask, as it is written and as arguments.
      zeroed: whether queries that see no key have a result of zero.
    """

    view: View
    labels: Labels
    roles: Roles
    scores: Scores
    output: Output
    terms: tuple[Term, ...]
    seen: Seen
    zeroed: bool

    def match(self, operands: Sequence[Source], equations: frozenset[int]) -> Match:
        """The match, from sources of query, key and value.

        Raises:
          Refused: if few kernels compute this, and none does here: its products are
            sites then.
        """
        match = self._match(operands, equations, None)
        for found in self._alibis():
            other = self._match(operands, equations, found)
            if self._is_better(other, match):
                match = other
        self._check_pays(match)
        return match

    def _match(
        self,
        operands: Sequence[Source],
        equations: frozenset[int],
        made: tuple[Bias, Alibi] | None,
    ) -> Match:
        """The match with one of the biases made of slopes, or with none."""
        q, k, v = operands
        roles, seen, view = self.roles, self.seen, self.view
        biases = [b for b in self.scores.biases if made is None or b is not made[0]]
        root = self.output.root
        extra: list[Atom] = [x.atom for x in (*biases, *seen.leaves)]
        lengths = [x for x in (seen.q_lengths, seen.kv_lengths) if x is not None]
        ids = seen.segments or ()
        site = AttentionSite(
            query=self._arrange(q.dims, roles.for_queries, _ALL),
            key=self._arrange(k.dims, roles.for_keys, _ALL),
            value=self._arrange(v.dims, roles.for_values, _ALL),
            result=self._result(),
            dtype=view.eqns[root].outvars[0].aval.dtype.name,
            biases=tuple(
                (self._arrange(b.dims, roles.for_scores), b.factor) for b in biases
            ),
            masks=tuple(
                (self._arrange(x.dims, roles.for_scores), x.positive)
                for x in seen.leaves
            ),
            q_lengths=self._lengths(seen.q_lengths),
            kv_lengths=self._lengths(seen.kv_lengths),
            segments=tuple(
                self._arrange(x.dims, (roles.batch, positions), (0, 1))
                for x, positions in zip(ids, (roles.queries, roles.keys), strict=False)
            ),
            sinks=self._sinks(),
            alibi=None if made is None else self._slopes(made[1]),
            scale=self.scores.scale * q.scale * k.scale,
            is_causal=seen.is_causal,
            window=seen.window(size(roles.queries), size(roles.keys)),
            soft_cap=self.scores.soft_cap,
            from_end=seen.from_end,
            zeroed=self.zeroed,
        )
        extra += [x.unknown.atom for x in lengths]
        extra += [x.atom for x in ids]
        if isinstance(site.sinks, Arrange):
            assert self.scores.sink is not None
            extra.append(self.scores.sink.atom)
        if made is not None:
            extra.append(made[1].slopes)
        self._check_made(extra)
        atoms = (q.atom, k.atom, v.atom, *extra)
        return Match(root=root, equations=equations, operands=atoms, site=site)

    def _alibis(self) -> Iterator[tuple[Bias, Alibi]]:
        """Biases that the op could make of slopes."""
        roles, scores = self.roles, self.scores
        for bias in scores.biases:
            parts = sloped(self.view, bias, scores.keys)
            found = parts and alibi(
                parts,
                queries=positions(roles),
                keys=scores.keys,
                terms=self.terms,
                is_exact=scores.soft_cap is not None or scores.sink is not None,
            )
            if found is None:
                continue
            from_start = found.form == "linear" or not self.seen.from_end
            heads = {*roles.heads, *roles.groups}
            if from_start and set(self.labels.of_all(found.dims)) <= heads:
                yield bias, found

    def _is_better(self, made: Match, read: Match) -> bool:
        """Returns whether a bias is better made of slopes than read.

        It is if a kernel does so, unless a gradient would be XLA's for it alone.
        """
        root = self.view.eqns[self.output.root]
        if is_left_to_xla(made, root):
            return False
        return _is_trained(made, root) or not _is_trained(read, root)

    def _check_pays(self, match: Match) -> None:
        """Refuses what few kernels compute where none does: its products are sites."""
        width, values = size(self.roles.width), size(self.roles.values)
        what = None
        if width != values:
            what = f"a head of the keys has {width} numbers, of the values {values}"
        elif self.scores.soft_cap is not None:
            what = "its scores have a soft cap"
        elif self.scores.sink is not None:
            what = "its softmax has sinks"
        if what is not None and is_left_to_xla(match, self.view.eqns[match.root]):
            raise Refused(f"{what}, and no kernel here computes that")

    def _arrange(
        self, dims: Dims, groups: Sequence[Sequence[Factor]], whole: Sequence[int] = ()
    ) -> Arrange:
        return arrange(self.labels.of_all(dims), groups, whole)

    def _result(self) -> Arrange:
        made = [x for group in self.roles.for_result for x in group]
        return arrange(made, [self.labels.of(d) for d in self.output.dims])

    def _lengths(self, lengths: Lengths | None) -> tuple[Arrange | Within, int] | None:
        if lengths is None:
            return None
        how = self._arrange(lengths.unknown.dims, (self.roles.batch,), (0,))
        return arranged(how, lengths.unknown), lengths.offset

    def _sinks(self) -> Arrange | float | None:
        sink = self.scores.sink
        if sink is None or sink.atom is None:
            return None if sink is None else sink.value
        heads = self.roles.heads + self.roles.groups
        return self._arrange(sink.dims, (heads,), (0,))

    def _slopes(self, made: Alibi) -> tuple[Arrange, float, Form]:
        heads = self.roles.heads + self.roles.groups
        return self._arrange(made.dims, (heads,), (0,)), made.factor, made.form

    def _check_made(self, atoms: Sequence[Atom]) -> None:
        """Refuses masks and biases that are interior to another match."""
        if any(self.view.producer_index(x) in self.view.taken for x in atoms):
            raise Refused("its mask or bias is part of another site")


def _is_trained(match: Match, root: Equation) -> bool:
    """Returns whether a kernel of ours would compute the gradients of a call."""
    planned = catalogue.planned()[attention_backward_p]
    calls = calls_of(match, root)
    how = {"lse": jnp.dtype("float32")}
    try:
        return not any(
            lowering.would_be_xla(planned, avals, {**params, **how})
            for _, avals, params in calls
        )
    except dispatch.Unsupported:
        return True  # what was demanded cannot run here; lowering says so, if it comes
