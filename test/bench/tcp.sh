#!/usr/bin/env bash
# Measures jbofd over NVMe/TCP on loopback, pinned to processor 0, driven by jbofbench pinned to processor 1, each run beside the yardstick.
#   test/bench/tcp.sh [ROUNDS] [SECONDS]     (default 10 rounds of 3 s)
# Prints medians over the rounds. Needs an otherwise idle machine with two processors.
set -euo pipefail
cd "$(dirname "$0")/../.."
readonly rounds=${1:-10} seconds=${2:-3}
make -s build
work=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; rm -rf "$work"' EXIT
(cd test/bench && go build -o "$work/synthetic" ./synthetic)
cat > "$work/jbofd.yaml" <<YAML
metrics: {address: "127.0.0.1:19420"}
admin: {socket: "$work/admin.sock"}
discovery: {address: ""}
listeners: [{transport: tcp, address: "127.0.0.1:14421"}]
ssds:
  - {name: mem0, backend: mem, size: 1GiB}
  - {name: file0, backend: file, path: "$work/file0.img", size: 2GiB, create: true}
subsystems:
  - nqn: nqn.2026-11.example.jbofd:bench
    allow_any_host: true
    namespaces:
      - {nsid: 1, ssd: mem0, size: 512MiB}
      - {nsid: 2, ssd: file0, size: 1GiB}
YAML
taskset -c 0 bin/jbofd --config "$work/jbofd.yaml" 2> "$work/jbofd.log" &
pids+=($!)
taskset -c 0 "$work/synthetic" serve 127.0.0.1:14422 &
pids+=($!)
until curl -sf http://127.0.0.1:19420/readyz > /dev/null; do sleep 0.1; done

bench() { taskset -c 1 bin/jbofbench block --json -q "$@" --runtime "${seconds}s"; }
target=(--target tcp://127.0.0.1:14421 --nqn nqn.2026-11.example.jbofd:bench)
# field FILE KEY: the number behind "KEY": in a report's total.
iops() { grep -o '"iops": *[0-9.]*' | head -1 | grep -o '[0-9.]*$'; }
median() { sort -n | awk '{v[NR]=$1} END {print (NR%2) ? v[(NR+1)/2] : (v[NR/2]+v[NR/2+1])/2}'; }

echo "preparing the file" >&2
fill() { bin/jbofbench block -q "$@" --rw write --bs 1m --iodepth 4 --size 1g > /dev/null; } # all of it: what was never written is read in no time
fill "${target[@]}" --nsid 2
truncate -s 1g "$work/raw.img"
fill --raw "$work/raw.img"

row() { # NAME, then jbofbench arguments
  local name=$1 r
  shift
  for ((r = 0; r < rounds; r++)); do bench "$@" | iops; done | median | xargs printf '%-44s %12.0f IOPS\n' "$name"
}
yard() { # DEPTH
  local r
  for ((r = 0; r < rounds; r++)); do taskset -c 1 "$work/synthetic" drive 127.0.0.1:14422 "$1" "$seconds"; done | median |
    xargs printf '%-44s %12.0f replies/s\n' "yardstick, 4 KiB, QD $1"
}
mem=("${target[@]}" --nsid 1 --size 64m)
for qd in 1 32 128; do
  yard $qd
  row "mem, 4 KiB random read, QD $qd" "${mem[@]}" --rw randread --bs 4k --iodepth $qd
  row "mem, 4 KiB random write, QD $qd" "${mem[@]}" --rw randwrite --bs 4k --iodepth $qd
done
row "mem, 128 KiB read, QD 16" "${mem[@]}" --rw randread --bs 128k --iodepth 16
row "mem, 128 KiB write, QD 16" "${mem[@]}" --rw randwrite --bs 128k --iodepth 16
for w in "randread 4k 32" "randwrite 4k 32" "randread 4k 128" "randread 128k 16" "randwrite 128k 16"; do
  read -r rw bs qd <<< "$w"
  row "file raw, $w" --raw "$work/raw.img" --size 1g --rw "$rw" --bs "$bs" --iodepth "$qd"
  row "file over TCP, $w" "${target[@]}" --nsid 2 --size 1g --rw "$rw" --bs "$bs" --iodepth "$qd"
done
