#!/usr/bin/env bash
# Installs the system packages that the build and the tests need and the machine lacks, if apt may be
# used. usage: packages.sh PYTHON [wheel]
#   wheel  only what the build of a wheel needs; pip installs CMake and Ninja for it
set -euo pipefail
python=$1 purpose=${2:-}

missing=()
need() { # need PACKAGE TEST...: adds PACKAGE where TEST fails
  local package=$1
  shift
  "$@" > /dev/null 2>&1 || missing+=("$package")
}
header() { echo "#include <$1>" | g++ -E -x c++ - ; }
boost() {
  CPATH=${BOOST_ROOT:+$BOOST_ROOT/include:$BOOST_ROOT}${CPATH:+:$CPATH} \
    header boost/asio/experimental/concurrent_channel.hpp
}

need g++ command -v g++
need libisal-dev header isa-l/crc.h
need zlib1g-dev header zlib.h
python_header() {
  header_dir=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
  [[ -f $header_dir/Python.h ]]
}
need python3-dev python_header
need python3-venv "$python" -c 'import ensurepip, venv'
if [[ $purpose != wheel ]]; then
  need cmake command -v cmake
  need ninja-build command -v ninja
  need clang-tidy command -v clang-tidy
  need libgtest-dev header gtest/gtest.h
  need strace command -v strace
fi
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

[[ $purpose != wheel ]] || exit 0
# ccache shortens every build after the first, and lld links the C++ tests faster. Tests that draw, read
# the site in a browser or mount file systems need the remaining packages, and are skipped without them.
# Mounting needs root.
optional=()
want() { # want PACKAGE COMMAND
  PATH=$PATH:/usr/sbin:/sbin command -v "$2" > /dev/null 2>&1 || optional+=("$1")
}
want ccache ccache
want lld ld.lld
want xfsprogs mkfs.xfs
want libnbd-bin nbdfuse
want nbdkit nbdkit
want graphviz dot
want sshfs sshfs
want openssh-sftp-server /usr/lib/openssh/sftp-server
want iproute2 ip
want moosefs-master mfsmaster
want moosefs-chunkserver mfschunkserver
want moosefs-client mfsmount
want chromium chromium
if ((${#optional[@]})) && [[ $(id -u) -eq 0 ]] && command -v apt-get > /dev/null; then
  echo "torch_ckpt: installing ${optional[*]}, which the build does not need"
  # A machine without network is not to wait for long.
  { ((${#missing[@]})) || timeout 120 apt-get update -qq; } &&
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y -qq --no-install-recommends \
      "${optional[@]}" > /dev/null ||
    echo "torch_ckpt: without ${optional[*]} some tests will skip" >&2
fi
