#!/bin/sh
# Runs a command and notes how long it took, for the list at the end of `make test`.
# usage: timed.sh NAME COMMAND...
name=$1
shift
start=$(date +%s)
status=0
"$@" || status=$?
mkdir -p build
printf '%5d s  %s\n' $(($(date +%s) - start)) "$name" >> build/times
exit $status
