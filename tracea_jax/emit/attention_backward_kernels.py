"""The kernels of attention_backward_sm90 as text.

    keys      dk and dv, a tile of keys after the other
    queries   dq, a tile of queries after the other
    both      one launch of the blocks of both, which read the same operands

What they are made of is in ``attention_backward_halves``, the small kernels before and
after them in ``attention_backward_rows``. Caller: ``variants.attention_backward_sm90``.
"""

from __future__ import annotations

from collections.abc import Container

from tracea_jax.device import CudaDevice
from tracea_jax.emit import attention_backward_halves as halves
from tracea_jax.emit import attention_backward_sm90 as sizes
from tracea_jax.emit import sources
from tracea_jax.emit.attention_backward_halves import Half, threads_of
from tracea_jax.emit.attention_backward_sm90 import AttentionBackwardSm90Config
from tracea_jax.emit.attention_sm90 import DTYPES
from tracea_jax.emit.kernel import Kernel, Param, Scalar
from tracea_jax.problem import AttentionProblem


def keys_kernel(
    problem: AttentionProblem,
    config: AttentionBackwardSm90Config,
    device: CudaDevice,
    has_blind: bool,
) -> Kernel:
    """The kernel (q, k, v, do, rows, lengths, everywhere) -> dk, dv."""
    reads = sizes.keys_reads(problem, config, has_blind)
    operands = (*reads, *sizes.keys_writes(config))
    return _alone(halves.keys(problem, config, has_blind, operands), problem, device)


def queries_kernel(
    problem: AttentionProblem, config: AttentionBackwardSm90Config, device: CudaDevice
) -> Kernel:
    """The kernel (q, k, v, do, rows, lengths) -> dq."""
    operands = (*sizes.queries_reads(problem, config), "dq")
    return _alone(halves.queries(problem, config, operands), problem, device)


def both_kernel(
    problem: AttentionProblem,
    config: AttentionBackwardSm90Config,
    device: CudaDevice,
    has_blind: bool,
) -> Kernel:
    """The kernel (q, k, v, do, rows, lengths, everywhere) -> dk, dv, dq.

    Blocks of few heads are neighbours, so that what those of keys have read is in L2
    when those of queries read it.
    """
    p = problem
    reads, writes = sizes.both_reads(p, config, has_blind), ("dk", "dv", "dq")
    keys = halves.keys(p, config, has_blind, (*reads, *writes))
    queries = halves.queries(p, config, (*reads, *writes))
    sides = {"KeysTraits": keys, "QueriesTraits": queries}
    # Of keys all, and of queries what keys have not or has another value.
    same = {
        name for name, param in keys.given.items() if queries.given.get(name) == param
    }
    units = p.kv_heads * p.batch
    places = {"units": units, "units_of_section": halves.section_of_both(p)}
    places |= {f"{s.name}_tiles": s.tiles // units for s in sides.values()}
    return _kernel(
        "both",
        (*keys.kind, queries.kind[-1]),
        p,
        device,
        sides=sides,
        parameters={
            **keys.parameters,
            **{
                f"queries_{name}": of_type
                for name, of_type in queries.parameters.items()
                if name not in same
            },
            **dict.fromkeys(places, "int"),
        },
        call=f"<{', '.join(sides)}>({_arguments(keys)}, "
        f"{_arguments(queries, same)}, {{{', '.join(places)}}})",
        params=(
            *keys.params,
            *(param for name, param in queries.given.items() if name not in same),
            *(Scalar(value=value) for value in places.values()),
        ),
    )


def _alone(side: Half, problem: AttentionProblem, device: CudaDevice) -> Kernel:
    return _kernel(
        side.name,
        side.kind,
        problem,
        device,
        sides={"Traits": side},
        parameters=side.parameters,
        call=f"<Traits>({_arguments(side)})",
        params=side.params,
    )


def _kernel(
    name: str,
    kind: tuple[str, ...],
    problem: AttentionProblem,
    device: CudaDevice,
    *,
    sides: dict[str, Half],
    parameters: dict[str, str],
    call: str,
    params: tuple[Param, ...],
) -> Kernel:
    """The translation unit, Traits and one entry, and its launch."""
    p = problem
    base = f"attention_backward_{name}_sm90"
    dims = f"d{p.head_dim}" + (f"x{p.value_dim}" if p.value_dim else "")
    entry = "_".join((base, DTYPES[p.dtype][1], dims, *kind))
    headers = dict(sources.headers(f"{base}.cuh"))
    products = [w for side in sides.values() for w in side.products]
    headers |= {w.header_name: w.header for w in products}
    includes = dict.fromkeys((f"{base}.cuh", *(w.header_name for w in products)))
    consumers = next(iter(sides.values())).consumers
    structs = "".join(
        f"struct {traits} {{\n{side.traits}}};\n" for traits, side in sides.items()
    )
    source = f"""\
// {base} | {p.dtype} {dims} | {" ".join(kind)}
{"".join(f'#include "{header}"' + chr(10) for header in includes)}
namespace {{
{structs}}}  // namespace

extern "C" __global__ void __launch_bounds__({threads_of(consumers)}, \
{2 if consumers == 1 else 1})
{entry}({", ".join(f"{of_type} {n}" for n, of_type in parameters.items())}) {{
  tracea::{base}{call};
}}
"""
    return Kernel(
        entry=entry,
        source=source,
        headers=tuple(sorted(headers.items())),
        arch=device.arch,
        grid=(sum(side.tiles for side in sides.values()), 1, 1),
        block=(threads_of(consumers), 1, 1),
        smem_bytes=max(side.smem for side in sides.values()),
        params=params,
    )


def _arguments(side: Half, same: Container[str] | None = None) -> str:
    """The side's struct of parameters, made of the entry's.

    Those of the side alone, unless ``same`` says which the entry has for both, are
    called after it.
    """

    def named(argument: str) -> str:
        name = argument.lstrip("&")
        is_own = same is not None and name not in same and name != "nullptr"
        return argument.replace(name, f"{side.name}_{name}") if is_own else argument

    given = ", ".join(map(named, side.arguments))
    return f"{{{given}, {{{', '.join(map(named, side.beside.parameters))}}}}}"
