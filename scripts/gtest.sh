#!/bin/sh
# Runs GoogleTests in two processes: they mostly wait.
# usage: gtest.sh BINARY ARGUMENT...
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
for shard in 0 1; do
  GTEST_TOTAL_SHARDS=2 GTEST_SHARD_INDEX=$shard timeout 1200 "$@" --gtest_brief=1 > "$logs/$shard" 2>&1 &
  eval "pid$shard=$!"
done
status=0
# shellcheck disable=SC2154
for pid in "$pid0" "$pid1"; do wait "$pid" || status=$?; done
cat "$logs/0" "$logs/1"
exit $status
