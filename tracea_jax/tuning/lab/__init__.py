"""The lab: where choices are compiled, run and possibly crash.

    local                 the protocol ``Lab``, and a lab in this process
    child, child_server   a lab in a disposable child process
    worker, serving, frames   a process that answers questions: both sides, the messages
    compile_pool, ahead   compiling kernels before they are needed, in worker processes

How times are taken is in ``tuning.measure``. Tunings get their lab from ``knowledge``.
"""
