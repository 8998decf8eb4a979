#!/usr/bin/env bash
# Makes a virtual environment for this checkout. Published packages (torch, tools) are installed once per
# machine, in a folder that all checkouts share; the package itself always comes from the checkout.
# usage: environment.sh PYTHON VENV [TORCH_VERSION]
#
# 1. The shared environment is a folder of ${XDG_CACHE_HOME:-~/.cache}/torch_ckpt. Its name contains a
#    hash of all that it depends on: the interpreter, the dependencies in pyproject.toml, the version of
#    torch, and this script.
# 2. One process at a time installs, under the name FOLDER.new, and then renames it, so that an
#    interrupted installation is never used. The next process deletes it. A complete environment does
#    not change.
# 3. VENV reads the packages of the shared environment and the package of the checkout by a .pth file,
#    and has copies of the commands that start VENV's interpreter. VENV/.ready is empty until all this is
#    there, and then holds the path of the shared environment. A VENV without .ready is not touched.
set -euo pipefail
python=$1 venv=$2 torch_version=${3:-}
tree=$(realpath "$(dirname "$0")/..")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/torch_ckpt

if [[ -e $venv && ! -e $venv/.ready ]]; then
  echo "environment.sh: $venv was not made by this script: delete it, or choose another folder (make VENV=FOLDER)" >&2
  exit 1
fi

# PYTHON may be VENV's interpreter, which is deleted below, or that of another checkout's environment.
python=$("$python" -c 'import os, sys; print(os.path.realpath(sys._base_executable))')
dependencies=$("$python" - "$tree/pyproject.toml" << 'END'
import json, sys, sysconfig, tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)
print(json.dumps([sys.version, sys.executable, sysconfig.get_platform(),
                  project["project"]["dependencies"],
                  project["project"]["optional-dependencies"], project["dependency-groups"]]))
END
)
hash=$({ printf '%s\n' "$dependencies" "$torch_version"; cat "$0"; } | sha256sum | cut -c 1-16)
shared=$cache/environment-$hash

mkdir -p "$cache"
chmod 700 "$cache"
exec {lock}> "$cache/lock"
flock -n "$lock" || { echo "torch_ckpt: waiting for another installation"; flock "$lock"; }
rm -rf "$cache"/environment-*.new
if [[ ! -d $shared ]]; then
  new=$shared.new
  trap 'rm -rf "$new"' EXIT
  "$python" -m venv "$new"
  # Python compiles each file at its first import; tests import a small part of what is installed.
  install() {
    (cd "$tree" && "$new/bin/python" -m pip install -q --disable-pip-version-check --no-compile "$@")
  }
  # pyproject.toml lists the packages and pins the tools. pip reads its groups from version 25.1.
  install "pip>=25.1"
  install --group dev ${torch_version:+"torch==$torch_version"}
  for peer in megatron nvrx torchtitan; do
    log=$new/$peer.log
    install --log "$log" --no-deps --only-binary :all: --group $peer && continue
    # pip reports "No matching distribution" even if the network failed while it read the index.
    if ! grep -q 'No matching distribution found' "$log" ||
      grep 'Could not fetch URL' "$log" | grep -v ' 404 Client Error' > /dev/null; then
      echo "environment.sh: could not download the packages of group $peer: run the command again" >&2
      exit 1
    fi
    echo "torch_ckpt: PyPI lacks packages of group $peer for this Python: the tests with these packages will skip" >&2
  done
  mv "$new" "$shared"
fi
exec {lock}>&-

mkdir -p "$venv"
: > "$venv/.ready"
find "$venv" -mindepth 1 -maxdepth 1 ! -name .ready -exec rm -rf {} +
"$python" -m venv --without-pip "$venv"
venv=$(realpath "$venv")
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$tree" "import site; site.addsitedir('$shared/${packages#"$venv"/}')" \
  > "$packages/torch_ckpt.pth"
# Adds the lines that start VENV's interpreter to a program. pip writes the same lines for paths with
# spaces, which cannot follow #!.
launch() {
  printf '%s\n' '#!/bin/sh' "'''exec' \"$venv/bin/python\" \"\$0\" \"\$@\"" "' '''"
  cat
}
for command in "$shared"/bin/*; do
  copy=$venv/bin/${command##*/}
  [[ ! -e $copy ]] || continue
  { read -r first; read -r second; } < "$command" || true
  case "$first $second" in
    "#!"*"/environment-$hash.new/bin/python"*) tail -n +2 "$command" | launch > "$copy" ;;
    "#!/bin/sh '''exec' "*) tail -n +4 "$command" | launch > "$copy" ;;
    *) ln -s "$command" "$copy" && continue ;;
  esac
  chmod 755 "$copy"
done
printf '%s\n' 'import sys' 'from torch_ckpt.cli import main' 'sys.exit(main())' | launch \
  > "$venv/bin/torch-ckpt"
chmod 755 "$venv/bin/torch-ckpt"
echo "$shared" > "$venv/.ready"
