"""The modules that mypyc compiles: pure ones that decide often, the way of small transfers, a request's way through the
front door. Those of them that stay Python are listed with the reason.

Paths are below ``src/pinyon``, of the laboratory below ``src/pinyon_lab``, of services below ``services``. A module
that is not named here is not compiled, a new one in a room that is named is."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

COMPILED = (
    "core/*.py",
    "placement/*.py",
    "batching/*.py",
    "paging/*.py",
    "eviction/*.py",
    "routing/*.py",
    "decisions/*.py",
    *(f"messages/{name}.py" for name in ("checks", "error", "explanation", "enums", "instance", "logprobs")),
    *(f"messages/{name}.py" for name in ("orders", "placement", "prefill_report", "request_class", "sampling")),
    *(f"model/{name}.py" for name in ("detokenizer", "markers", "merges", "word_table", "word_tokens")),
    "store/objects.py",
    *(f"runtime/{name}.py" for name in ("deadlines", "ledger", "log_lines", "outgoing", "tally", "telemetry")),
    *(f"runtime/http2/{name}.py" for name in ("wire", "stream", "connection")),
    *(f"transfer/{name}.py" for name in ("small", "submissions")),
    *(f"transfer/chains/{name}.py" for name in ("batch", "slicing")),
    *(f"transfer/types/{name}.py" for name in ("request", "spans", "stats")),
    *(f"transfer/links/{name}.py" for name in ("endpoint", "endpoints", "spinner", "stream", "tls")),
    *(f"transfer/memory/{name}.py" for name in ("grant", "table")),
    "transfer/transports/tcp/*.py",
    *(f"transfer/transports/shm/{name}.py" for name in ("server", "transport", "wire")),
    "http/*.py",
    *(f"openai/{name}.py" for name in ("fields", "format", "parse")),
    "frontdoor/*.py",
    *(
        f"frontdoor/instances/{name}.py"
        for name in (
            *("clusters", "completions", "conductor_session", "instances"),
            *("kind", "metrics", "prompts", "request", "routes"),
            "worker_sessions",
        )
    ),
    "frontdoor/servers/*.py",
    "frontdoor/upstreams/*.py",
)

# Modules of the simulator that hold parts which a journal may record stay Python: see decisions/front.py.
LAB = (
    "caches/*.py",
    "policies/*.py",
    *(f"simulator/{name}.py" for name in ("attempt", "host_store", "links", "prefill_reference", "virtual_time")),
)

LEFT_OUT = {
    "*/__init__.py": "a line of text",
    "*/policies.py": "read once: tables of names and lambdas",
    "*/interface.py": "protocols that Python derives from, or isinstance asks for: compiled they allow neither",
    "core/journal.py": "puts attributes into objects while it runs",
    "decisions/front.py": "puts a journal's recorder where another class stands, which only Python allows",
    "decisions/growth.py": "is handed what decisions/front.py records",
    "decisions/instance.py": "as decisions/front.py",
    "eviction/lru.py": "an OrderedDict does its work, and policies in Python derive from it",
    "eviction/hazard_table.py": "NumPy does its work",
    "policies/batching.py": "says by annotations what its settings are, which compiled classes do not have",
    "policies/names.py": "as */policies.py",
    "frontdoor/access_log.py": "an interceptor, which grpcio asks whether it is a coroutine: compiled it says no",
    "frontdoor/auth.py": "read once",
    "frontdoor/gzip.py": "an asynchronous generator, of which mypyc knows nothing",
    "frontdoor/upstreams/serving.py": "derives from regions/inbound.py, which has an asynchronous generator",
    "frontdoor/off_loop.py": "for large bodies only",
    **dict.fromkeys(
        (
            *("core/address.py", "core/near.py", "core/trace_hashes.py", "eviction/day_fits.py", "eviction/fit.py"),
            *("frontdoor/cors.py", "frontdoor/readiness.py", "frontdoor/upstreams/url.py"),
            "frontdoor/servers/comparison.py",
            *(
                "messages/explanation.py",
                "placement/cost_priors.py",
                "placement/explanation.py",
                "placement/scaling.py",
            ),
            *("placement/threshold_tuner.py", "routing/geography.py"),
        ),
        "read once, or run some times a minute",
    ),
    "transfer/transports/shm/cma.py": "takes addresses of what a local variable keeps alive; libc does its work",
}

SERVICES = (
    *(f"conductor/{name}.py" for name in ("intake", "membership", "metrics", "placing", "sessions")),
    *(
        f"worker/{name}.py"
        for name in (
            *("metrics", "report", "decode/*", "engines/checks", "engines/instant"),
            *("engines/paced", "engines/uniform", "instance/engine_loop", "instance/parts", "instance/step_members"),
            *("kv/cache", "orders/abort"),
            *("prefill/job", "prefill/prefills"),
        )
    ),
)
"""The modules that handle messages to the conductor, and a request's way through a worker, up to the engine."""

SERVICES_LEFT_OUT = {"*/__init__.py": "a line of text", "*/app.py": "run once"}


def compiled_services(services: Path, patterns: Sequence[str] = SERVICES) -> list[Path]:
    """Returns the files, with the folder ``services``, in order of their names."""
    names = {path.relative_to(services).as_posix() for pattern in patterns for path in services.glob(pattern)}
    return [
        Path(services.name, name)
        for name in sorted(names)
        if not any(fnmatch(name, each) for each in SERVICES_LEFT_OUT)
    ]


def compiled_modules(src: Path, patterns: Sequence[str] = COMPILED) -> list[Path]:
    """Returns the files, relative to ``src``, in order of their names. A test may ask for some rooms alone; the
    laboratory's are among all, where it is."""
    found = []
    for name, chosen in ("pinyon", patterns), ("pinyon_lab", LAB if patterns == COMPILED else ()):
        package = src / name
        names = {path.relative_to(package).as_posix() for pattern in chosen for path in package.glob(pattern)}
        found += [Path(name, each) for each in sorted(names) if not any(fnmatch(each, out) for out in LEFT_OUT)]
    return found
