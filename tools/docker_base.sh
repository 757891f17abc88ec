#!/bin/sh
# What deploy/Dockerfile needs where no registry can be reached: a base image made from the distribution's packages, and
# a folder of wheels for its Python. Both are kept: a second run only looks.
#
#   tools/docker_base.sh            make what is missing
#   tools/docker_base.sh --builder  and an image NAME-cc with a C compiler, which compiles the pure rooms, and its wheels
#   tools/docker_base.sh --name     print the name of the base image, nothing else
#
# Needs a Docker engine (tools/docker_engine.sh), root, and mmdebstrap (installed if missing). Exit status: 0 both are
# there, 2 bad usage, 3 there is no way, with the reason on one line. Every step is bounded in time.
#
#   PINYON_LOCAL_BASE   name of the image (default pinyon-base:<codename of this machine's distribution>)
set -u

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P) || exit 3
# shellcheck source=/dev/null
codename=$(. /etc/os-release 2>/dev/null && echo "${VERSION_CODENAME:-}")
image=${PINYON_LOCAL_BASE:-pinyon-base:${codename:-unknown}}
wheels=$root/deploy/wheels
lock=runtime

say() { printf 'docker_base: %s\n' "$*" >&2; }
no_way() {
    say "no base image: $*"
    exit 3
}

case ${1:-} in
--name)
    echo "$image"
    exit 0
    ;;
'') ;;
--builder) lock=compile ;;
*)
    say "usage: tools/docker_base.sh [--builder | --name]"
    exit 2
    ;;
esac

scratch=$(mktemp -d) || no_way "no temporary folder"
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM HUP
log=$scratch/log

make_image() { # NAME PACKAGES
    [ "$(id -u)" -eq 0 ] || no_way "only root can make one"
    [ -n "$codename" ] || no_way "the distribution of this machine is unknown"
    if ! command -v mmdebstrap >/dev/null 2>&1; then
        command -v apt-get >/dev/null 2>&1 || no_way "neither mmdebstrap nor apt-get is there"
        timeout 300 env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            -o DPkg::Lock::Timeout=120 mmdebstrap >"$log" 2>&1 || no_way "mmdebstrap: $(tail -n 1 "$log")"
    fi
    # The machine's own package sources (a mirror, a proxy): what works here works for the image.
    sources=
    for file in /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list.d/ubuntu.sources /etc/apt/sources.list; do
        if [ -s "$file" ]; then
            sources=$file
            break
        fi
    done
    eval "$(apt-config shell http_line Acquire::http::Proxy https_line Acquire::https::Proxy)"
    say "making $1 from the packages of $codename, at most 300 s ..."
    # shellcheck disable=SC2086 # no source file: mmdebstrap takes the distribution's own
    timeout 300 mmdebstrap --quiet --variant=minbase --include="$2" \
        ${http_line:+"--aptopt=Acquire::http::Proxy \"$http_line\";"} \
        ${https_line:+"--aptopt=Acquire::https::Proxy \"$https_line\";"} \
        --aptopt='APT::Install-Recommends "false";' \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
        "$codename" "$scratch/base.tar" $sources >"$log" 2>&1 || no_way "mmdebstrap: $(tail -n 1 "$log")"
    timeout 120 docker import "$scratch/base.tar" "$1" >"$log" 2>&1 || no_way "docker import: $(tail -n 1 "$log")"
}

# An interpreter of this machine with exactly the image's version: pip judges the lock's markers by the one it runs on.
find_python() {
    wanted=$(timeout 60 docker run --rm --network none "$image" python3 -c 'import platform; print(platform.python_version())') ||
        no_way "$image does not run"
    for candidate in /usr/bin/python3 "$root/.venv/bin/python" python3; do
        [ "$("$candidate" -c 'import platform; print(platform.python_version())' 2>/dev/null)" = "$wanted" ] || continue
        python=$candidate
        return
    done
    no_way "this machine has no Python $wanted to fetch the wheels with"
}

fetch_wheels() {
    find_python
    # compile.lock holds runtime.lock: its wheels do for both
    for held in $lock compile; do
        stamp="$held $(cksum <"$root/requirements/$held.lock") $wanted"
        [ "$(cat "$wheels/.stamp" 2>/dev/null)" = "$stamp" ] && return
    done
    stamp="$lock $(cksum <"$root/requirements/$lock.lock") $wanted"
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv "$scratch/venv" >"$log" 2>&1 || no_way "$python has neither pip nor venv"
        python=$scratch/venv/bin/python
    fi
    say "fetching the wheels of requirements/$lock.lock for Python $wanted, at most 300 s ..."
    timeout 300 "$python" -m pip download --quiet --disable-pip-version-check --no-input --require-hashes \
        --only-binary :all: --no-deps -r "$root/requirements/$lock.lock" -d "$scratch/wheels" >"$log" 2>&1 ||
        no_way "the wheels cannot be fetched: $(grep -v '^$' "$log" | tail -n 1)"
    rm -rf "$wheels"
    mkdir -p "$wheels"
    cp "$scratch"/wheels/*.whl "$wheels/" || no_way "cannot write $wheels"
    echo "$stamp" >"$wheels/.stamp"
}

timeout 20 docker version >/dev/null 2>&1 || no_way "no Docker engine answers (tools/docker_engine.sh)"
have() { timeout 20 docker image inspect "$1" >/dev/null 2>&1; }
python_packages=python3,python3-venv,ca-certificates
have "$image" || make_image "$image" "$python_packages"
[ "$lock" = runtime ] || have "$image-cc" || make_image "$image-cc" "$python_packages,python3-dev,gcc,libc6-dev"
fetch_wheels
say "$image and $(find "$wheels" -name '*.whl' | wc -l) wheels are there"
