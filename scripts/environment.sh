#!/usr/bin/env bash
# Makes a virtual environment for this checkout. What others publish (torch, tools) is installed once a
# machine, in a folder that all checkouts share; the package itself always comes from the checkout.
# usage: environment.sh PYTHON VENV [TORCH_VERSION]
#
# 1. The shared environment is a folder of ${XDG_CACHE_HOME:-~/.cache}/torch_ckpt. Its name contains a
#    hash of all that it depends on: the interpreter, the dependencies in pyproject.toml, the version of
#    torch, and this script.
# 2. A missing shared environment is made under a temporary name and then renamed, so that an
#    interrupted installation is never used. Its files are not changed afterwards.
# 3. VENV reads the packages of the shared environment and the package of the checkout by a .pth file,
#    and has copies of the commands that start VENV's interpreter.
set -euo pipefail
python=$1 venv=$2 torch_version=${3:-}
tree=$(realpath "$(dirname "$0")/..")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/torch_ckpt

dependencies=$("$python" - "$tree/pyproject.toml" << 'END'
import json, sys, tomllib
with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)
print(json.dumps([sys.version, sys.executable, project["project"]["dependencies"],
                  project["project"]["optional-dependencies"], project["dependency-groups"]]))
END
)
hash=$({ printf '%s\n' "$dependencies" "$torch_version"; cat "$0"; } | sha256sum | cut -c 1-16)
shared=$cache/environment-$hash

if [[ ! -d $shared ]]; then
  mkdir -p "$cache"
  chmod 700 "$cache"
  making=$(mktemp -d "$shared.XXXXXX")
  trap 'rm -rf "$making"' EXIT
  "$python" -m venv "$making"
  # Python compiles each file at its first import; tests import a small part of what is installed.
  install() { "$making/bin/pip" install -q --disable-pip-version-check --no-compile "$@"; }
  # pyproject.toml lists the packages and pins the tools. pip reads its groups from version 25.1.
  install "pip>=25.1"
  cd "$tree"
  install --group dev ${torch_version:+"torch==$torch_version"}
  for peer in megatron nvrx; do
    install --no-deps --only-binary :all: --group $peer ||
      echo "torch_ckpt: without the packages of group $peer some tests of torch_ckpt.megatron will skip" >&2
  done
  # The commands name their interpreter by its path.
  grep -rlIF "$making" "$making/bin" "$making/pyvenv.cfg" | xargs sed -i "s|$making|$shared|g"
  # If another checkout was faster, its environment is the same.
  mv -T "$making" "$shared" 2> /dev/null || [[ -d $shared ]]
fi

rm -rf "$venv"
"$python" -m venv --without-pip "$venv"
venv=$(realpath "$venv")
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$tree" "import site; site.addsitedir('$shared/${packages#"$venv"/}')" \
  > "$packages/torch_ckpt.pth"
for command in "$shared"/bin/*; do
  copy=$venv/bin/${command##*/}
  [[ ! -e $copy ]] || continue
  if [[ $(head -c 2 "$command") == '#!' ]]; then
    sed "1s|^#!$shared/|#!$venv/|" "$command" > "$copy"
    chmod 755 "$copy"
  else
    ln -s "$command" "$copy"
  fi
done
printf '%s\n' "#!$venv/bin/python" 'import sys' 'from torch_ckpt.cli import main' 'sys.exit(main())' \
  > "$venv/bin/torch-ckpt"
chmod 755 "$venv/bin/torch-ckpt"
