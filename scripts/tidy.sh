#!/usr/bin/env bash
# Runs clang-tidy over the core's files that changed since a commit, and over the files that include a
# changed header. usage: tidy.sh SINCE
# SINCE is a commit, or `all`. If it is empty, it means the commit at which this branch left main, and
# on main itself the tenth commit before HEAD. If git finds neither commit, all files are checked.
set -euo pipefail
build=build/lint
mapfile -t files < <(find csrc -name '*.cpp' -not -path 'csrc/python/*' -not -path 'csrc/torch/*' -not -path 'csrc/torch_python/*' | sort)

since=$1
if [[ -z $since ]]; then
  for main in origin/main main; do
    since=$(git merge-base HEAD "$main" 2> /dev/null) && break
  done
  [[ -n $since && $since != "$(git rev-parse HEAD)" ]] ||
    since=$(git rev-parse --verify --quiet HEAD~10 2> /dev/null) || since=all
fi

if [[ $since != all ]]; then
  changed=$(git diff --name-only "$since" -- csrc .clang-tidy && git ls-files -o --exclude-standard csrc)
  if ! grep -qx '.clang-tidy' <<< "$changed"; then
    kept=()
    for file in "${files[@]}"; do
      # A header is included by its path in csrc.
      if grep -qxF "$file" <<< "$changed" ||
        grep -qF -f <(sed -n 's|^csrc/\(.*\.h\)$|#include "\1"|p' <<< "$changed") "$file"; then
        kept+=("$file")
      fi
    done
    files=("${kept[@]}")
  fi
fi

echo "clang-tidy: ${#files[@]} files (since: $since)"
cmake --preset lint > /dev/null
((${#files[@]} == 0)) || printf '%s\n' "${files[@]}" | xargs -n 2 -P "$(nproc)" \
  clang-tidy -quiet -p "$build" --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wthread-safety
