#!/bin/sh
# What the soft-RoCE guest of tests/rdma boots from: this machine's kernel has no RDMA, Debian's stock kernel has.
#
#   tools/rdma_guest.sh [prepare]   make .cache/rdma complete: install packages where that is possible, fetch a kernel
#                                   package (unpacked, never installed), build the initrd and the guest's Python
#   tools/rdma_guest.sh status      say whether everything is there
#
# Exit status: 0 ready, 1 status and not ready, 2 bad usage, 3 there is no way to have it, with the reason on one line.
# Every step is bounded in time; a second run finds everything there.
#
#   PINYON_RDMA_KERNEL_DEB   a Debian kernel package that was downloaded already (default: apt-get download)
set -u

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P) || exit 3
cache=$root/.cache/rdma
log=$cache/prepare.log
install_s=300
# The guest's Python is the distribution's, because its pyverbs is built for that one and for its libibverbs.
python=/usr/bin/python3
packages='qemu-system-x86 busybox-static iproute2 rdma-core ibverbs-providers python3-pyverbs python3-venv'
# What tests inside the guest import, at the versions of requirements/test.lock.
wheels='numpy xxhash mypy-extensions protobuf pytest iniconfig packaging pluggy pygments pytest-asyncio typing-extensions hypothesis
        sortedcontainers'
modules='virtio_pci 9pnet_virtio 9p overlay veth crc32_generic crc32_pclmul ib_uverbs rdma_ucm rdma_rxe'

say() { printf 'rdma_guest: %s\n' "$*" >&2; }
no_way() {
    say "no RDMA guest: $*"
    mkdir -p "$cache" && printf '%s\n' "$*" >"$cache/reason" # the tests skip with this line
    exit 3
}

# what all of it is made from: its sources, the machine's Python and where the repository is
stamp() {
    (cd "$root" && cat tools/rdma_guest.sh tests/rdma/guest_init.sh requirements/test.lock && pwd && "$python" -VV) 2>&1 |
        cksum
}

ready() { [ "$(cat "$cache/stamp" 2>/dev/null)" = "$(stamp)" ] && [ -z "$(missing)" ]; }

missing() {
    for tool in qemu-system-x86_64 busybox rdma ip setpriv; do
        command -v "$tool" >/dev/null 2>&1 || printf '%s ' "$tool"
    done
    "$python" -c 'import pyverbs.device' >/dev/null 2>&1 || printf 'pyverbs '
    "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 || printf 'python3-venv '
}

apt() {
    timeout "$install_s" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 "$@" >>"$log" 2>&1
}

install_packages() {
    lacking=$(missing)
    [ -n "$lacking" ] || return 0
    [ "$(id -u)" -eq 0 ] || no_way "missing: $lacking(and this is not root, who could install them)"
    command -v apt-get >/dev/null 2>&1 || no_way "missing: $lacking(and there is no apt-get)"
    say "installing $packages, at most $install_s s a step ..."
    apt update || say "apt-get update failed, going on with the lists that are there"
    # shellcheck disable=SC2086 # names are words without blanks
    apt install -y --no-install-recommends $packages ||
        no_way "apt-get could not install $packages: $(tail -n 1 "$log")"
    lacking=$(missing)
    [ -z "$lacking" ] || no_way "missing after the installation: $lacking"
}

kernel_name() {
    apt-cache depends linux-image-amd64 2>>"$log" | sed -n 's/^ *Depends: \(linux-image-[0-9][^ ]*\)$/\1/p'
}

download() { # PACKAGE
    # root's apt would download as a user of its own, who may not write here
    [ -n "$1" ] && (cd "$scratch" && apt -o APT::Sandbox::User=root download "$1")
}

# the path of a Debian kernel package is in $package afterwards
fetch_kernel() {
    package=${PINYON_RDMA_KERNEL_DEB:-}
    [ -z "$package" ] || return 0
    command -v apt-get >/dev/null 2>&1 || no_way "there is no apt-get to fetch a kernel package with"
    say "fetching Debian's stock kernel (about 70 MB), at most $install_s s ..."
    if ! download "$(kernel_name)"; then # no lists of packages, or old ones
        [ "$(id -u)" -ne 0 ] || apt update
        download "$(kernel_name)" ||
            no_way "apt-get could not download what linux-image-amd64 depends on: $(tail -n 1 "$log")"
    fi
    package=$(ls "$scratch"/*.deb)
}

# Reading thousands of small files through the 9p mount costs the guest more than booting: Python's libraries go into the
# initrd as well, at their own paths below /fast, and are mounted over those of the host.
fast() { # TREE FOLDER
    mkdir -p "$1/fast$2"
    tar -C "$2" -ch --exclude=./test --exclude=idlelib --exclude=ensurepip --exclude='config-*' \
        --exclude=pip --exclude=setuptools --exclude='*.pyi' --exclude='*.opt-?.pyc' . 2>>"$log" |
        tar -C "$1/fast$2" -x 2>>"$log" || no_way "cannot copy $2: $(tail -n 1 "$log")"
    echo "$2" >>"$1/fast/folders"
}

# kernel and initrd: what the guest needs of the package goes into the initrd, nothing else of it is kept
build_kernel() {
    rm -rf "$cache"/build.* # of one that was ended
    scratch=$(mktemp -d "$cache/build.XXXXXX") || no_way "cannot write $cache"
    trap 'rm -rf "$scratch"' EXIT
    fetch_kernel
    say "building the guest's initrd ..."
    dpkg -x "$package" "$scratch/package" 2>>"$log" || no_way "cannot unpack $package"
    [ -d "$scratch/package/lib/modules" ] || mv "$scratch/package/usr/lib" "$scratch/package/lib"
    release=$(ls "$scratch/package/lib/modules")
    busybox depmod -b "$scratch/package" "$release" 2>>"$log" || no_way "cannot index the modules of $package"

    tree=$scratch/tree
    mkdir -p "$tree/bin" "$tree/modules" "$tree/proc" "$tree/sys" "$tree/dev" "$tree/lower" "$tree/upper" "$tree/host"
    cp "$(command -v busybox)" "$tree/bin/busybox"
    cp "$root/tests/rdma/guest_init.sh" "$tree/init"
    chmod +x "$tree/init"
    # in the order of their dependencies, each once: the guest then only calls insmod
    for module in $modules; do
        line=$(grep "/$module\.ko[.xz]*:" "$scratch/package/lib/modules/$release/modules.dep") || continue # built in
        set -- "${line%%:*}"
        for file in ${line#*:}; do set -- "$file" "$@"; done # modules.dep names the nearest first
        for file; do
            base=$(basename "$file")
            ! grep -qsx "${base%.xz}" "$tree/modules/order" || continue
            file=$scratch/package/lib/modules/$release/$file
            case $base in
            *.xz) base=${base%.xz} && busybox xz -dc "$file" >"$tree/modules/$base" ;;
            *) cp "$file" "$tree/modules/$base" ;;
            esac
            echo "$base" >>"$tree/modules/order"
        done
    done
    grep -q '^rdma_rxe\.ko' "$tree/modules/order" || no_way "$package has no soft-RoCE module (rdma_rxe)"
    fast "$tree" "$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
    fast "$tree" "$("$cache/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    mkdir "$scratch/kernel"
    # not compressed: the emulated processor would take seconds to undo it
    (cd "$tree" && find . | busybox cpio -o -H newc 2>>"$log") >"$scratch/kernel/initrd" ||
        no_way "cannot write the initrd: $(tail -n 1 "$log")"
    cp "$scratch/package/boot/vmlinuz-$release" "$scratch/kernel/vmlinuz" || no_way "$package has no kernel"
    rm -rf "$cache/kernel"
    mv "$scratch/kernel" "$cache/kernel"
    rm -rf "$scratch"
    trap - EXIT
}

build_python() {
    say "building the guest's Python, at most $install_s s ..."
    "$python" -m venv --clear --system-site-packages "$cache/venv" >>"$log" 2>&1 ||
        no_way "$python could not create a virtual environment: $(tail -n 1 "$log")"
    # shellcheck disable=SC2086 # names are words without blanks
    awk -v names="$(echo $wheels)" 'BEGIN { split(names, list, " "); for (i in list) wanted[list[i]] = 1 }
        /^[a-z0-9]/ { split($1, part, "=="); take = part[1] in wanted }
        take' "$root/requirements/test.lock" >"$cache/venv/requirements.txt"
    timeout "$install_s" "$cache/venv/bin/python" -m pip install --require-hashes --only-binary :all: --no-deps \
        --ignore-installed --disable-pip-version-check --no-input --progress-bar off \
        -r "$cache/venv/requirements.txt" >>"$log" 2>&1 ||
        no_way "pip could not install the guest's packages: $(tail -n 1 "$log")"
}

prepare() {
    [ "$(uname -m)" = x86_64 ] || no_way "the guest is x86_64, this machine is $(uname -m)"
    mkdir -p "$cache" || no_way "cannot write $cache"
    exec 9>"$cache/lock"
    if command -v flock >/dev/null 2>&1; then flock -w 900 9 || no_way "another preparation does not end"; fi
    if ! ready; then
        rm -f "$cache/reason" "$cache/stamp"
        : >"$log"
        install_packages
        build_python
        build_kernel
        stamp >"$cache/stamp"
    fi
    say "ready: $(du -sm "$cache" | cut -f1) MB in .cache/rdma"
}

status() {
    if ready; then
        say "ready"
        return 0
    fi
    lacking=$(missing)
    if [ -s "$cache/reason" ]; then
        why=$(cat "$cache/reason")
    elif [ -n "$lacking" ]; then
        why="missing: ${lacking% }"
    else
        why="it was not prepared from the present sources"
    fi
    say "no RDMA guest: $why"
    return 1
}

case ${1:-prepare} in
prepare) prepare ;;
status) status ;;
*)
    say "usage: tools/rdma_guest.sh [prepare|status]"
    exit 2
    ;;
esac
