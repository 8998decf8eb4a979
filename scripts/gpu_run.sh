#!/usr/bin/env bash
# Builds the extension on a machine with a CUDA device and without network, tests it there, trains with
# it and measures it. The machine needs Python with torch, pytest and hypothesis, the CUDA toolkit, CMake
# and ninja; `make gpu-kit` fills the folder with everything else.
# usage: gpu_run.sh [KIT]
#   OUT=build/gpu-run   folder for run.json, a log of each part, training.json and figures.json
#   PYTHON=python3      the interpreter that has torch
#   DEVICE=cuda         with "cpu" the same parts run without a device, for trying this script
#   SIZE=10GB           bytes of the state that is copied to the host
# 1. Each part runs in a process group with a time limit. A part that fails or hangs costs no other part.
# 2. Without a CUDA device the extension is built, and the other parts are skipped.
# 3. The last lines of output are a table, at most 60 lines.
# Exit status: 0 if all parts passed, 1 if one failed, 3 if there is no CUDA device.
set -uo pipefail
cd "$(dirname "$0")/.."
kit=$(realpath -m "${1:-build/gpu-kit}")
out=$(realpath -m "${OUT:-build/gpu-run}")
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
size=${SIZE:-10GB}
total_seconds=465
most_log_bytes=15000000
mkdir -p "$out"
parts=$out/parts.tsv
: > "$parts"

note() { printf '%s\t%s\t%s\n' "$1" "$2" "$3" >> "$parts"; } # note PART OUTCOME SECONDS
part() { # part NAME SECONDS COMMAND...: runs the command for so many seconds at most, fewer near the end
  local name=$1 limit=$2 begin=$SECONDS status=0
  shift 2
  if ((limit > total_seconds - SECONDS)); then limit=$((total_seconds - SECONDS)); fi
  if ((limit < 5)); then
    note "$name" "skipped: no time left" 0
    return 1
  fi
  echo "--- $name, $limit s at most"
  timeout --kill-after=10 "$limit" "$@" > "$out/$name.log" 2>&1 || status=$?
  case $status in
    0) note "$name" passed $((SECONDS - begin)) ;;
    124 | 137) note "$name" "failed: took more than $limit s" $((SECONDS - begin)) ;;
    *) note "$name" "failed: exit status $status" $((SECONDS - begin)) ;;
  esac
  tail -c "$most_log_bytes" "$out/$name.log" > "$out/$name.log.end" && mv "$out/$name.log.end" "$out/$name.log"
  ((status == 0)) || tail -n 30 "$out/$name.log"
  return $status
}

build() {
  cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DTORCH_CKPT_BUILD_PYTHON=ON \
    -DTORCH_CKPT_CUDA=ON -DTORCH_CKPT_WERROR=ON -DPYTHON_EXECUTABLE="$(command -v "$python")" \
    -DCMAKE_PREFIX_PATH="$kit" -DCMAKE_INSTALL_RPATH="$kit/lib" \
    -DCMAKE_INSTALL_PREFIX="$PWD/torch_ckpt" &&
    cmake --build build/gpu --target _C && cmake --install build/gpu &&
    "$python" -c 'import torch, torch_ckpt; from torch_ckpt import _C
assert _C.has_cuda
print(torch.__version__, torch_ckpt.__file__)'
}
export -f build
export kit python

export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PIP_NO_INDEX=1 PIP_FIND_LINKS=$kit/wheels
part build 200 bash -c build
built=$?

has_device() { "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2> /dev/null; }
found=true
has_device || found=false
if ((built == 0)) && { $found || [[ $device == cpu ]]; }; then
  part tests 120 "$python" -m pytest -q -p no:cacheprovider $(git ls-files 'tests/**/test_cuda*.py' 2> /dev/null || find tests -name 'test_cuda*.py')
  if $found && command -v compute-sanitizer > /dev/null; then
    part memcheck 60 compute-sanitizer --tool memcheck --error-exitcode 9 "$python" -m pytest -q \
      -p no:cacheprovider tests/python/api/test_cuda.py -k "what_was_there_at_the_call or every_kind_of_tensor"
  else
    note memcheck "skipped: no device, or no compute-sanitizer" 0
  fi
  part training 100 "$python" -m benchmarks.gpu_training --device "$device" --out "$out/training.json"
  part figures 240 "$python" -m benchmarks.gpu --device "$device" --size "$size" \
    --seconds $((total_seconds - SECONDS - 10)) --out "$out/figures.json"
else
  for name in tests memcheck training figures; do note "$name" "skipped: no device, or no build" 0; done
fi

"$python" -m benchmarks.gpu_report --parts "$parts" --out "$out" || exit 1
rm -f "$parts"
$found || exit 3
