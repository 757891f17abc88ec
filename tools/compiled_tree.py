"""A copy of ``src/pinyon`` and ``services``, with the modules of ``tools/compiled_modules.py`` as machine code beside
their sources.

    python -m tools.compiled_tree [--out FOLDER] [--optimize LEVEL] [--jobs N]

Nothing is written beside the sources: a compiled module found there would run in place of an edited one. The tree takes
their place on the path; edits of the sources have no effect there. A tree that was made of the same sources, by the
same mypyc, interpreter and options, is taken as it is.

Exit status: 0 made or found, 1 a source that mypyc or the compiler refuses. Status 3: this machine lacks something (the
C compiler, Python's headers, mypyc), with the reason on one line."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from tools.compiled_modules import COMPILED, compiled_modules, compiled_services

ROOT = Path(__file__).resolve().parent.parent
LEFT_BEHIND = shutil.ignore_patterns("__pycache__", "*.so")
STAMP = "compiled.stamp"
MYPY_OPTIONS = ("--follow-imports=silent", "--ignore-missing-imports")
"""The options are less strict than ``./dev check``: some classes derive from packages that need not be here."""
CC_OPTIONS = ("-fPIC", "-fwrapv", "-DNDEBUG", "-w", "-fno-semantic-interposition")
LINK_OPTIONS = ("-shared", "-Wl,-Bsymbolic")
"""The functions call each other directly, since nothing puts others in their place."""
OPTIMIZE = "2"
"""The compiler's -O2, for the rooms on the way of every request and block: -O3 takes longer and was not faster."""
OPTIMIZED = ("placement", "paging", "runtime", "messages", "model", "transfer", "conductor", "decode")
"""The rooms that get -O2. All others get -O1 at most: their time goes by in calls of Python's, and -O2 takes 2.6 times
as long to compile. The conductor was 2 % slower without, a transfer of many blocks 4 %, a tokenizer 5 %. With -Og in
place of -O1, which compiles hardly faster, a forwarded request took 5 to 7 % more."""
TOGETHER = 24
"""The C files that one compiler gets as one: each includes the headers of all modules."""
COMPILE_S = 1800.0
"""The time for one call of the compiler: services are one file, and the machine may be busy."""


class Lacking(Exception):
    """The machine lacks something that compiling needs; the text says what."""


def compiler() -> list[str]:
    """Returns ``CC``, or what Python was built with, or ``cc``. Raises :class:`Lacking`."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        words = shlex.split(command or "")
        if words and shutil.which(words[0]):
            return words[:1]
    raise Lacking("no C compiler (cc) on the PATH; on Debian and Ubuntu: apt-get install gcc libc6-dev")


def headers() -> Path:
    """Returns the folder of ``Python.h``. Raises :class:`Lacking`."""
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").is_file():
        raise Lacking(f"no Python.h in {folder}; on Debian and Ubuntu: apt-get install python3-dev")
    return folder


def mypyc_version() -> str:
    """Returns mypy's version. Raises :class:`Lacking`."""
    try:
        import mypyc.build  # noqa: F401 - it needs setuptools as well, from Python 3.12 on
    except ImportError as error:
        raise Lacking(f"mypyc cannot be imported ({error}); ./dev build and ./dev check install it") from None
    return metadata.version("mypy")


def lacking() -> str:
    """Returns why nothing can be compiled here, in words; empty if it can."""
    try:
        compiler(), headers(), mypyc_version()
    except Lacking as error:
        return str(error)
    return ""


def compiled_files(tree: Path) -> list[Path]:
    """Returns the extension modules of a tree, relative to it."""
    return sorted(path.relative_to(tree) for path in tree.rglob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"))


def is_current(
    out: Path,
    *,
    src: Path = ROOT / "src",
    patterns: Sequence[str] = COMPILED,
    services: Path | None = None,
    optimize: str = OPTIMIZE,
) -> bool:
    """Returns whether ``out`` is what :func:`make_tree` would make. Raises :class:`Lacking`."""
    stamp = out / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == _stamp(src, patterns, services, optimize)


def make_tree(
    out: Path,
    *,
    src: Path = ROOT / "src",
    patterns: Sequence[str] = COMPILED,
    services: Path | None = None,
    optimize: str = OPTIMIZE,
    jobs: int | None = None,
) -> bool:
    """Makes ``out`` unless it is there and of these sources; returns whether it was made.

    ``services`` is the folder of that name, None: the tree has none. ``optimize`` is the compiler's level, 0 to 3;
    ``jobs`` how many compilers run at a time (default: a processor each). Raises :class:`Lacking`, and
    ``subprocess.CalledProcessError`` where the compiler fails; ends the process with mypy's messages where mypyc does.
    """
    if reason := lacking():  # the compiler comes first: without one, mypyc is of no use
        raise Lacking(reason)
    stamp = _stamp(src, patterns, services, optimize)
    if is_current(out, src=src, patterns=patterns, services=services, optimize=optimize):
        return False
    scratch = out.with_name(f"{out.name}.{os.getpid()}")
    tree, work = scratch / "tree", scratch / "c"
    try:
        for package in _packages(src):
            shutil.copytree(package, tree / package.name, ignore=LEFT_BEHIND)
        jobs = jobs or len(os.sched_getaffinity(0))
        _compile(tree, work / "pinyon", "pinyon", compiled_modules(src, patterns), optimize, jobs)
        if services is not None:
            # Not together with the library: a service may hand a journal's recorder to what is annotated as its class.
            shutil.copytree(services, tree / services.name, ignore=LEFT_BEHIND)
            _compile(tree, work / "services", "services", compiled_services(services), optimize, jobs)
        (tree / STAMP).write_text(stamp, encoding="utf-8")
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        tree.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def _packages(src: Path) -> list[Path]:
    """Returns the packages of a tree; an image has no laboratory."""
    return [src / name for name in ("pinyon", "pinyon_lab") if (src / name).is_dir()]


def _stamp(src: Path, patterns: Sequence[str], services: Path | None, optimize: str) -> str:
    modules = compiled_modules(src, patterns) + (compiled_services(services) if services is not None else [])
    digest = hashlib.sha256(repr(modules).encode())
    # All of the packages, not only what is compiled: the types of the rest decide what code comes out.
    packages = [*_packages(src), *([services] if services is not None else [])]
    files = [path for package in packages for path in package.rglob("*") if path.is_file()]
    files = [path for path in files if path.parent.name != "__pycache__"]
    for path in sorted([*files, *Path(__file__).parent.glob("compiled_*.py")]):
        digest.update(f"{path}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return f"{sysconfig.get_config_var('EXT_SUFFIX')} mypyc {mypyc_version()} -O{optimize} {digest.hexdigest()}\n"


def _compile(tree: Path, work: Path, group: str, modules: Sequence[Path], optimize: str, jobs: int) -> None:
    """Compiles sources in place, to one shared library (``pinyon__mypyc``) and a small one for each module.

    ``group`` is mypyc's name for what is compiled together."""
    cc, include, suffix = compiler(), headers(), sysconfig.get_config_var("EXT_SUFFIX")
    from mypyc.build import mypycify

    work.mkdir(parents=True)
    config = work / "mypy.ini"  # not the checkout's: that one needs packages of the edges
    # Stubs are followed loudly unless told: the generated ones are not strict.
    config.write_text("[mypy]\nfollow_imports_for_stubs = True\n", encoding="utf-8")
    before = Path.cwd()
    os.chdir(tree)  # mypy names modules, and tracebacks files, as seen from here
    try:
        extensions = mypycify(
            [f"--config-file={config}", f"--cache-dir={work / 'mypy'}", *MYPY_OPTIONS, *map(str, modules)],
            opt_level=optimize,
            debug_level="0",
            multi_file=True,
            group_name=group,
            target_dir=str(work),
        )
    finally:
        os.chdir(before)

    def run(*words: str | Path) -> None:
        subprocess.run([*cc, *map(str, words)], cwd=tree, check=True, timeout=COMPILE_S)

    def is_optimized(source: str) -> bool:
        return any(f"___{room}___" in source for room in OPTIMIZED)

    def compiled(sources: Sequence[str], options: list[str], folders: list[str]) -> Path:
        level = optimize if optimize == "0" or is_optimized(sources[0]) else "1"
        one = work / f"{hashlib.sha256(repr(sources).encode()).hexdigest()[:16]}.c"
        one.write_text("".join(f'#include "{tree / source}"\n' for source in sources), encoding="utf-8")
        out = one.with_suffix(".o")
        run("-c", *options, *CC_OPTIONS, f"-O{level}", *(f"-I{each}" for each in (include, *folders)), one, "-o", out)
        return out

    # Not by setuptools, which gives the sources of one library to the compiler one after the other.
    with ThreadPoolExecutor(jobs) as pool:
        made = []
        for each in extensions:
            kinds = [[name for name in each.sources if is_optimized(name) is fast] for fast in (True, False)]
            parts = [names[at : at + TOGETHER] for names in kinds for at in range(0, len(names), TOGETHER)]
            made.append(
                (each, [pool.submit(compiled, part, each.extra_compile_args, each.include_dirs) for part in parts])
            )
        for each, objects in made:
            library = Path(*each.name.split(".")).with_suffix(suffix)
            run(*LINK_OPTIONS, *(one.result() for one in objects), "-o", library)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.compiled_tree", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "compiled", help="default build/compiled")
    parser.add_argument("--optimize", choices="0123", default=OPTIMIZE, help=f"default {OPTIMIZE}")
    parser.add_argument("--jobs", type=int, help="compilers at a time; default: one per processor")
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    try:
        made = make_tree(
            arguments.out.resolve(), services=ROOT / "services", optimize=arguments.optimize, jobs=arguments.jobs
        )
    except Lacking as error:
        print(f"compiled_tree: nothing is compiled: {error}", file=sys.stderr)
        return 3
    except subprocess.CalledProcessError as error:
        print(f"compiled_tree: the compiler failed: {error}", file=sys.stderr)
        return 1
    what = f"made in {time.monotonic() - begun:.0f} s" if made else "there already"
    print(f"{arguments.out}: {len(compiled_files(arguments.out))} compiled files, {what}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
