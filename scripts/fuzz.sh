#!/bin/sh
# Fuzzes what reads bytes from outside, for a while: scripts/fuzz.sh PYTHON SECONDS
# The corpora stay in build/fuzz/corpus, so that the next run goes on; a crash's input is kept in
# build/fuzz and named.
set -eu
python=$1
seconds=$2
build=build/fuzz

probe=$(mktemp -d)
trap 'rm -rf "$probe"' EXIT
echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' > "$probe/probe.cpp"
if ! clang++ -fsanitize=fuzzer,address,undefined "$probe/probe.cpp" -o "$probe/probe" 2> "$probe/why"; then
  cat "$probe/why" >&2
  echo "SKIPPED: fuzzing needs clang 14 or newer with libFuzzer (Debian: clang libclang-rt-14-dev)." >&2
  exit 0
fi

cmake --preset fuzz
cmake --build "$build" --target record_fuzz metadata_fuzz program_fuzz
"$python" -m tests.fuzz.seeds "$build/seeds"

# rss in MiB; timeout in seconds for one input, where a millisecond is long.
run() {
  name=$1
  longest=$2
  shift 2
  mkdir -p "$build/corpus/$name"
  echo "== $name: $seconds seconds"
  "$build/${name}_fuzz" "$build/corpus/$name" "$build/seeds/$name" -max_total_time="$seconds" \
    -max_len="$longest" -rss_limit_mb=1024 -timeout=10 -artifact_prefix="$build/$name-" \
    -print_final_stats=1 -verbosity=0 "$@" 2> "$build/$name.log" || {
    cat "$build/$name.log" >&2
    echo "the $name fuzzer found something; its input is $build/$name-*" >&2
    exit 1
  }
  grep -E 'number_of_executed_units|peak_rss_mb' "$build/$name.log"
  echo "corpus: $(ls "$build/corpus/$name" | wc -l) inputs"
}
run record 8192 -dict=tests/fuzz/record.dict
run metadata 8192
run program 4096
