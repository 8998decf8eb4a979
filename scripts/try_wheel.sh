#!/usr/bin/env bash
# Installs a wheel and a version of torch into a fresh environment, without a compiler. Prints the time
# from the installation of the wheel to the first checkpoint, and runs what `make demo` runs.
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
install() { pip install -q --disable-pip-version-check --only-binary :all: "$@"; }
install "torch==$torch" numpy
cd "$fresh"

TIMEFORMAT='%R s: pip install of the wheel, torch is there'
time install "$wheel"
TIMEFORMAT='%R s: first checkpoint in a new process, of which:'
time python > parts << 'END'
import time

times = [time.perf_counter()]
import torch
times.append(time.perf_counter())
import torch.distributed.checkpoint
times.append(time.perf_counter())
import torch_ckpt
torch_ckpt.save({"weight": torch.ones(1000, 1000)}, "checkpoint")
times.append(time.perf_counter())
parts = ("import torch", "import torch.distributed.checkpoint", "import torch_ckpt and save")
for part, begin, end in zip(parts, times, times[1:]):
    print(f"  {end - begin:.2f} s: {part}")
END
cat parts
python "$demo/demo.py"
