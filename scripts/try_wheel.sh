#!/usr/bin/env bash
# Installs a wheel and a version of torch into a fresh environment, without a compiler, and runs there what
# `make demo` runs.
# usage: try_wheel.sh PYTHON WHEEL TORCH
set -euo pipefail
python=$1 wheel=$(realpath "$2") torch=$3
demo=$(realpath "$(dirname "$0")/../examples")
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

"$python" -m venv "$fresh/venv"
mkdir "$fresh/bin"
for program in cat env ls rm sh; do ln -s "$(command -v $program)" "$fresh/bin"; done
export PATH=$fresh/venv/bin:$fresh/bin
pip install -q --disable-pip-version-check --only-binary :all: "torch==$torch" numpy "$wheel"
cd "$fresh"
python "$demo/demo.py"
