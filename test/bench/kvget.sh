#!/usr/bin/env bash
# Measures GETs of the key-value store on a file beside raw 4 KiB random reads of the same file, alternately, as many outstanding.
#   test/bench/kvget.sh FILE [ROUNDS] [SECONDS] [DEPTH] [VALUE]    (default 10 rounds of 2 s, 128, 1000 bytes)
# FILE is made anew, 2 GiB. Prints the medians, and that of the rounds' ratios of GETs to half of the raw reads.
set -euo pipefail
cd "$(dirname "$0")/../.."
readonly file=${1:?FILE} rounds=${2:-10} seconds=${3:-2} depth=${4:-128} value=${5:-1000}
readonly records=$((1400000000 / (value + 60)))
make -s build
rm -f "$file"
truncate -s 2g "$file"
echo "preparing the file" >&2
bin/jbofbench block -q --raw "$file" --rw write --bs 1m --iodepth 4 > /dev/null # all of it: what was never written is read in no time
kv() { bin/jbofbench kv "$@" --json -q -P configs/ycsb/workloadc -p requestdistribution=uniform -p recordcount=$records -p fieldcount=1 -p fieldlength="$value" \
  --embedded "$file" --depth "$depth"; }
number() { grep -o "\"$1\": *[0-9.]*" | head -1 | grep -o '[0-9.]*$'; }
median() { sort -n | awk '{v[NR]=$1} END {print (NR%2) ? v[(NR+1)/2] : (v[NR/2]+v[NR/2+1])/2}'; }
kv load --format > /dev/null
raw=() gets=() ratios=()
for ((r = 0; r < rounds; r++)); do
  raw+=("$(bin/jbofbench block --json -q --raw "$file" --rw randread --bs 4k --iodepth "$depth" --runtime "${seconds}s" | number iops)")
  gets+=("$(kv run -p operationcount=0 -p maxexecutiontime="$seconds" | number opsPerSec)")
  ratios+=("$(awk "BEGIN {print 2 * ${gets[-1]} / ${raw[-1]}}")")
done
of() { printf '%s\n' "$@" | median; }
printf 'raw reads %.0f/s, GETs %.0f/s, GETs by half of the raw reads %.2f\n' "$(of "${raw[@]}")" "$(of "${gets[@]}")" "$(of "${ratios[@]}")"
