#!/usr/bin/env bash
# On a machine with a CUDA device and without network: builds the extension from this tree and the
# folder that `make gpu-kit` has filled, tests it, trains with it and measures it. Each part has a
# time limit of its own. All parts end within eight minutes, plus the seconds by which BUILD_SECONDS
# exceeds 150. The last lines, at most 60, are tables.
#   OUT      folder for record.json and a log for each part (default build/gpu-run)
#   GPU_KIT  what `make gpu-kit` has filled (default build/gpu-kit)
#   PYTHON   the interpreter that has torch (default python3)
#   PARTS    some of: build tests sanitizer training figures (default all)
#   BUILD_SECONDS  time limit of the build, for a machine with few cores (default 150)
# Exit status: 0 if every part passed, 3 if there is no CUDA device and what runs without one passed,
# 1 otherwise.
set -uo pipefail
cd "$(dirname "$0")/.."
tree=$PWD
out=$(realpath -m "${OUT:-build/gpu-run}")
kit=$(realpath -m "${GPU_KIT:-build/gpu-kit}")
python=${PYTHON:-python3}
parts=${PARTS:-build tests sanitizer training figures}
build_seconds=${BUILD_SECONDS:-150}
deadline=450 # seconds; what is stopped then has 5 more to end
((build_seconds <= 150)) || deadline=$((deadline + build_seconds - 150))
log_bytes=4000000

mkdir -p "$out"
rm -f "$out"/{record,figures,training}.json "$out"/parts.tsv "$out"/*.log
: > "$out/parts.tsv"
export PYTHONPATH=$tree PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
# benchmarks/peers.py installs from there.
export PIP_NO_INDEX=1 PIP_FIND_LINKS=$kit/wheels
PATH=$PATH:/usr/local/cuda/bin

device=$(timeout 60 "$python" -c 'import torch
print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none")' 2> "$out/build.log")
device=${device:-none}
on=cuda
[[ $device != none ]] || on=cpu
echo "device: $device"

part() { # part NAME SECONDS COMMAND...
  local name=$1 limit=$2 begun=$SECONDS status=0
  shift 2
  [[ " $parts " == *" $name "* ]] || return 0
  ((limit <= deadline - SECONDS)) || limit=$((deadline - SECONDS))
  if ((limit < 5)); then
    limit=0 status=124
    echo "no time was left" > "$out/$name.log"
  else
    echo "$name ..."
    timeout --kill-after=5 "$limit" "$@" >> "$out/$name.log" 2>&1 < /dev/null || status=$?
  fi
  tail -c "$log_bytes" "$out/$name.log" > "$out/log" && mv "$out/log" "$out/$name.log"
  printf '%s\t%s\t%s\t%s\n' "$name" "$status" $((SECONDS - begun)) "$limit" >> "$out/parts.tsv"
  ((status == 0)) || { echo "$name ended with $status:" && tail -n 25 "$out/$name.log" | cut -c 1-160; }
}

build() {
  set -e
  # If this build fails, the tests must not run with an older module.
  rm -f torch_ckpt/*.so
  cmake -S . -B build/gpu -G Ninja -DTORCH_CKPT_BUILD_PYTHON=ON \
    -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$kit" \
    -DCMAKE_INSTALL_RPATH="$kit/lib" -DCMAKE_INSTALL_PREFIX="$tree" \
    -Dpybind11_DIR="$kit/pybind11/share/cmake/pybind11"
  cmake --build build/gpu --target _C
  cmake --install build/gpu
  "$python" -c "from torch_ckpt import _C; assert _C.has_cuda or '$on' == 'cpu', 'no CUDA'"
}

sanitizer() {
  local memcheck=()
  if [[ $on == cuda ]]; then
    # torch calls functions of the runtime that fail, and expects it.
    memcheck=(compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9)
  fi
  "${memcheck[@]}" "$python" -m benchmarks.run gpu --round-trip --device "$on"
}

export -f build sanitizer
export tree kit python on

figures=(--seconds 205)
training=()
if [[ $on == cpu ]]; then
  # No figures, but the code that measures them.
  figures+=(--size 8MB --disk-size 8MB --few 30 --many 60 --saves 2 --idle-steps 3)
  figures+=(--savers ours_overlapped torch_checkpointing)
  training=(--width 32 --layers 1 --steps 8 --at-once 1 --variants blocking overlapped)
fi
mapfile -t tests < <(find tests/python -name 'test_cuda*.py' | sort)

part build "$build_seconds" bash -c build
part tests 100 "$python" -m pytest -q -p no:cacheprovider "${tests[@]}"
part sanitizer 60 bash -c sanitizer
part training 80 "$python" -m tests.gpu_training --device "$on" --out "$out/training.json" \
  "${training[@]}"
part figures 220 "$python" -m benchmarks.run gpu --device "$on" --out "$out/figures.json" \
  "${figures[@]}"

exec "$python" -m benchmarks.gpu_record "$out" "$device"
