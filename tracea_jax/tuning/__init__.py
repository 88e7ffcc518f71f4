"""Finding the fastest config of a problem by measurement, and remembering it.

One tuning is in ``tuner`` and ``session``; ``schedule`` divides time between several.
Below: ``search`` proposes configs, ``lab`` runs and ``measure`` times them, ``store``
keeps the results, ``answers`` looks them up. Tuning all problems of a function or graph
is a campaign: ``tracea_jax.campaign``, which calls this package, as do ``knowledge``
and ``dispatch``.
"""
