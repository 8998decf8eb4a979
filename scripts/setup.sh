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

# ccache shortens every build after the first. The others are for tests that draw, read the site in a
# browser, or mount file systems, which needs root; without them these tests skip. apt installs them
# while pip works.
optional=()
want() { # want PACKAGE COMMAND
  PATH=$PATH:/usr/sbin:/sbin command -v "$2" > /dev/null 2>&1 || optional+=("$1")
}
want ccache ccache
want xfsprogs mkfs.xfs
want libnbd-bin nbdfuse
want nbdkit nbdkit
want graphviz dot
want chromium chromium
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

# pyproject.toml lists the packages and pins the tools. pip reads its groups from version 25.1.
pip_install "pip>=25.1"
pip_install --group dev ${torch_version:+"torch==$torch_version"}
for peer in megatron nvrx; do
  pip_install --no-deps --only-binary :all: --group $peer ||
    echo "torch_ckpt: without the packages of group $peer some tests of torch_ckpt.megatron will skip" >&2
done
# The package of this tree, with the extension that `make build` compiles into it.
pip_install --no-build-isolation --no-deps -C wheel.cmake=false -C editable.mode=inplace -e .
# Keep only the path: scikit-build-core's finder would prefer this tree to PYTHONPATH.
sed -i '/^import /d' "$venv"/lib/python3*/site-packages/_editable_skbc_torch_ckpt.pth
wait
