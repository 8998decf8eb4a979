#!/usr/bin/env bash
# Fills a folder with what a machine with a GPU and without network lacks to run scripts/gpu_run.sh:
# headers of Boost, ISA-L and zlib, their libraries, pybind11, and wheels.
# usage: gpu_kit.sh PYTHON FOLDER
set -euo pipefail
python=$1 kit=$2
most_mib=40

rm -rf "$kit"
mkdir -p "$kit/include" "$kit/lib" "$kit/wheels"

# Every header that the compiler reads for the includes of the sources and of CMake's precompiled
# header. Boost.Config and Boost.Asio choose among their headers by compiler, so they come complete.
includes=$(grep -rhoE '<(boost|isa-l)/[a-z0-9_/]+\.h(pp)?>|<zlib\.h>' csrc CMakeLists.txt | sort -u)
read_headers=$(sed 's/^/#include /' <<< "$includes" |
  g++ -std=c++20 -DBOOST_ASIO_NO_DEPRECATED -M -x c++ - | tr -d '\\' | tr ' ' '\n' |
  grep -E '/(boost|isa-l)/|/zlib\.h$|/zconf\.h$')
boost=$(grep -m 1 '/boost/' <<< "$read_headers")
boost=${boost%%/boost/*}
whole=$(find "$boost/boost/asio" "$boost/boost/config" -type f)
while read -r header; do
  case $header in
    */boost/*) name=boost/${header#*/boost/} ;;
    */isa-l/*) name=isa-l/${header#*/isa-l/} ;;
    *) name=${header##*/} ;;
  esac
  install -D -m 644 "$header" "$kit/include/$name"
done < <(sort -u <<< "$read_headers"$'\n'"$whole")

# Shared libraries, since Debian has no static ISA-L. The module finds them by its run path. Copies
# and no links: each is there by the name that the linker and the one that the loader looks for.
for library in isal z; do
  file=$(realpath "$(g++ -print-file-name="lib$library.so")")
  soname=$(readelf -d "$file" | sed -n 's/.*SONAME.*\[\(.*\)\].*/\1/p')
  install -m 644 "$file" "$kit/lib/lib$library.so"
  install -m 644 "$file" "$kit/lib/$soname"
done

cp -r "$("$python" -c 'import pybind11; print(pybind11.__path__[0])')" "$kit/pybind11"

# The version that benchmarks/peers.py names. The machine's Python is 3.12.
requirement=$("$python" -c 'from benchmarks.peers import TORCH_CHECKPOINTING as peer
print(f"{peer.name}=={peer.version}")')
"$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: \
  --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d "$kit/wheels" "$requirement"

size=$(du -sm "$kit" | cut -f 1)
echo "$kit: $size MiB"
if ((size > most_mib)); then
  echo "gpu_kit.sh: more than the $most_mib MiB that may travel" >&2
  exit 1
fi
