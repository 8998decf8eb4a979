#!/usr/bin/env bash
# Makes everything that the build and the tests need: system packages where they are missing and apt
# may be used, and a virtual environment with torch and the tools.
# usage: setup.sh PYTHON VENV [TORCH_VERSION]
set -euo pipefail
python=$1 venv=$2 torch_version=${3:-}

missing=()
need() { # need PACKAGE TEST...: adds PACKAGE where TEST fails
  local package=$1
  shift
  "$@" > /dev/null 2>&1 || missing+=("$package")
}
header() { echo "#include <$1>" | g++ -E -x c++ - ; }
boost() { header boost/asio/experimental/concurrent_channel.hpp; }

need g++ command -v g++
need cmake command -v cmake
need ninja-build command -v ninja
need clang-tidy command -v clang-tidy
need libisal-dev header isa-l/crc.h
need zlib1g-dev header zlib.h
need libgtest-dev header gtest/gtest.h
python_header() {
  header_dir=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
  [[ -f $header_dir/Python.h ]]
}
need python3-dev python_header
need python3-venv "$python" -c 'import ensurepip, venv'
need strace command -v strace
if ! boost > /dev/null 2>&1; then
  # Debian 12 has two versions, and the unversioned package is the older one.
  if apt-cache show libboost1.81-dev > /dev/null 2>&1 || ! command -v apt-get > /dev/null; then
    missing+=(libboost1.81-dev)
  else
    missing+=(libboost-dev)
  fi
fi

if ((${#missing[@]})); then
  sudo=()
  [[ $(id -u) -eq 0 ]] || sudo=(sudo -n)
  if ! command -v apt-get > /dev/null || { ((${#sudo[@]})) && ! sudo -n true 2> /dev/null; }; then
    echo "torch_ckpt: please install first: ${missing[*]} (Debian's names; Boost 1.78 or newer)" >&2
    exit 1
  fi
  echo "torch_ckpt: installing ${missing[*]}"
  "${sudo[@]}" apt-get update -qq
  # The index may have been empty before, and then the choice of Boost was a guess.
  if [[ " ${missing[*]} " == *" libboost-dev "* ]] &&
    apt-cache show libboost1.81-dev > /dev/null 2>&1; then
    missing=("${missing[@]/libboost-dev/libboost1.81-dev}")
  fi
  DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends \
    "${missing[@]}" > /dev/null
fi

# ccache is for the builds after the first one. The others are for tests that draw, or mount file systems
# of their own, which takes root; without them these tests skip. apt installs them while pip works.
optional=()
want() { # want PACKAGE COMMAND
  PATH=$PATH:/usr/sbin:/sbin command -v "$2" > /dev/null 2>&1 || optional+=("$1")
}
want ccache ccache
want xfsprogs mkfs.xfs
want libnbd-bin nbdfuse
want nbdkit nbdkit
want graphviz dot
if ((${#optional[@]})) && [[ $(id -u) -eq 0 ]] && command -v apt-get > /dev/null; then
  echo "torch_ckpt: installing ${optional[*]}, which the build does not need"
  # A machine without network is not to wait for long.
  { { ((${#missing[@]})) || timeout 120 apt-get update -qq; } &&
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq --no-install-recommends \
      "${optional[@]}" > /dev/null ||
    echo "torch_ckpt: without ${optional[*]} some tests will skip" >&2; } &
fi

[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
# Python compiles each file at its first import; tests import a small part of what is installed.
pip_install() { "$venv/bin/pip" install -q --disable-pip-version-check --no-compile "$@"; }

# clang-format is pinned: each version formats differently. The fourth line is what
# torch_ckpt.integrations and remote checkpoints work with, the fifth builds the documentation.
pip_install "torch${torch_version:+==$torch_version}" "numpy" "setuptools>=68" wheel safetensors \
  pytest pytest-random-order pytest-timeout pytest-xdist hypothesis ruff==0.17.5 mypy==2.4.1 matplotlib \
  tensorboard clang-format==14.0.6 \
  fsspec s3fs "moto[server]==5.2.5" transformers==5.23.0 accelerate==1.15.0 lightning==2.6.6 \
  mkdocs==1.6.1 mkdocs-material==9.8.1 "mkdocstrings[python]==1.0.8"

# Released code that tests let work with ours; without it they skip. Versions as in pyproject.toml, and
# no dependencies: what these packages require beyond psutil is for other parts of them.
for peer in psutil packaging megatron-core==0.16.1 nvidia-resiliency-ext==0.4.1; do
  pip_install --no-deps --only-binary :all: "$peer" ||
    echo "torch_ckpt: without $peer some tests of torch_ckpt.megatron will skip" >&2
done
wait
