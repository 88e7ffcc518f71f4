"""Ring attention: a sequence that is split over devices, which pass their keys on.

``plan`` says what each device computes in each step, ``order`` puts sequences into the
order in which causal work is equal, ``parts`` merges attention to parts of the keys,
and ``attend`` is the function that ``ops.attention`` calls.
"""
