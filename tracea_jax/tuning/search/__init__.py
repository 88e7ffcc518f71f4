"""Which configs of one problem to try next.

    candidates, encode   the legal configs of all variants as a matrix of numbers
    batches              the search: asks for batches, is told times
    surrogate            the Gaussian process that predicts times
    acquisition          which candidates to take, given the predictions
    seeding, history     what to try before the first times, and what other shapes teach

Nothing here measures: ``tuning.tuner`` runs the proposed configs in a lab.
"""
