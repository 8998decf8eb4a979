#!/usr/bin/env bash
# Checks HEAD for a release, in a clean clone in FOLDER. The wheels are then in FOLDER/clone/dist.
# usage: release_check.sh FOLDER PYTHONS [PARTS]
#   PYTHONS  the interpreters, one for each wheel
#   PARTS    any of these; all, if none is given
#     tests    `make test-full`
#     wheels   the source distribution and the wheels, and the demo from each wheel with the oldest, a
#              middle and the newest supported torch
#     torture  every fault, which takes hours
set -euo pipefail
all="tests wheels torture"
folder=$1 pythons=$2 parts=${3:-$all}
for part in $parts; do
  [[ " $all " == *" $part "* ]] ||
    { echo "release_check.sh: there is no part $part: name some of $all" >&2; exit 2; }
done
for python in $pythons; do
  "$python" -c 'import venv' 2> /dev/null ||
    { echo "release_check.sh: cannot run $python: install it, or name the interpreters that you have: make release-check PYTHONS='python3.11 python3.12'" >&2; exit 2; }
done
[[ -z $(git status --porcelain) ]] ||
  { echo "release_check.sh: the working tree has changes that HEAD lacks: commit them first" >&2; exit 2; }
has() { [[ " $parts " == *" $1 "* ]]; }
say() { echo "=== $* ($(date +%T))"; }

rm -rf "$folder"
git clone -q . "$folder/clone"
cd "$folder/clone"
# Such as "11 15" for torch 2.11 to 2.15.
read -r oldest newest < <(sed -n 's/^SUPPORTED_TORCH = ((2, \([0-9]*\)), (2, \([0-9]*\)))$/\1 \2/p' torch_ckpt/_base/version.py)
newest=$((newest - 1))

if has tests; then
  say "tests"
  make test-full
fi
if has wheels; then
  for python in $pythons; do
    say "wheel for $python"
    make wheel PYTHON="$python"
    tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    for minor in "$oldest" $(((oldest + newest) / 2)) "$newest"; do
      say "demo from the wheel for $python with torch 2.$minor"
      scripts/try_wheel.sh "$python" dist/*-"$tag"-*.whl "2.$minor.*"
    done
  done
fi
if has torture; then
  say "torture"
  make torture
fi
say "all parts passed: $parts"
