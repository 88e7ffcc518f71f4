"""Code that several ops share.

    lowering, export, remat, by_reference  how primitives meet JAX's transformations
    shapes, ranks, precision, epilogue     operands and arithmetic
    sharding, meshes, partition, halo      ops split over several devices
    arguments, building                    problems of the command line and plain values
    bench, exact, kernel_time              how a problem is run, verified and timed

What only one op needs is in ``ops/<op>``. Callers: the ops, and rewrite rules.
"""
