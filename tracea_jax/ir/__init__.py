"""Semantic IR: the algebra behind kernels, as pure values that prove themselves.

Nothing here imports JAX, NumPy or CUDA. The emitter takes constants and address
expressions from these values; tests/parity writes the assertions that prove, at
compile time, that the device headers in ``kernels/cuda/tile`` agree with them.

    address    byte addresses as expressions of the lane: evaluated here, printed in C++
    swizzle    XOR swizzles of shared memory
    banks      bank-conflict simulator
    lanes      which element each register of a fragment holds
    register_operand   which words of a tile are a fragment in registers
    staging    where an accumulator is staged in shared memory for its store
    pipeline   stages, parities and waits of an asynchronous pipeline
    schedules  random schedules of agents: no deadlock, no stale or lost data
    ring_schedules, copy_schedules, attention_schedules, sum_schedules   of pipelines
"""
