"""The survey: problems drawn at random, and how long each way to compute them takes.

    problems    problem number i of (op, seed): the distribution
    candidates  which choices of a problem are measured
    programs    choices as programs that repeat them; times in turns
    rows        what was measured, as values and as lines of a file
    run         draws, measures and appends until the time is over

Rows are what the performance model is fitted to. Callers: the command line and
``benchmarks/survey``.
"""
