#!/bin/sh
# NIXL for tests/nixl and the benchmark's row: the wheel alone into .cache/nixl. What it depends on beside NumPy is
# PyTorch with CUDA, which it does without on host memory. Quiet when it is there already.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
wheel=nixl-cu12==1.5.1
home=$root/.cache/nixl
[ ! -e "$home/.complete" ] || exit 0
rm -rf "$home.new"
"${PINYON_NIXL_PYTHON:-$root/.venv/bin/python}" -m pip install --no-input --disable-pip-version-check --quiet --no-deps \
    --only-binary :all: --target "$home.new" "$wheel"
touch "$home.new/.complete"
rm -rf "$home"
mv "$home.new" "$home"
