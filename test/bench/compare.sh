#!/usr/bin/env bash
# Compares two builds of jbofd over NVMe/TCP on loopback: both run, pinned to processor 0, and jbofbench, pinned to
# processor 1, drives them in turn. An idle daemon costs nothing, so that neither disturbs the other.
#   test/bench/compare.sh BEFORE AFTER [ROUNDS] [SECONDS]     (two binaries; default 11 rounds of 2 s)
# Prints for each row the medians of both and the ratio of the medians, AFTER by BEFORE. Needs an otherwise idle machine
# with two processors. Sets the congestion control to cubic while it runs, as spdk.sh does.
set -euo pipefail
cd "$(dirname "$0")/../.."
readonly before=$(realpath "${1:?BEFORE}") after=$(realpath "${2:?AFTER}") rounds=${3:-11} seconds=${4:-2}
make -s build
work=$(mktemp -d)
congestion=$(cat /proc/sys/net/ipv4/tcp_congestion_control)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; rm -rf "$work"; echo "$congestion" > /proc/sys/net/ipv4/tcp_congestion_control' EXIT
echo cubic > /proc/sys/net/ipv4/tcp_congestion_control

readonly nqn=nqn.2026-11.example.jbofd:bench
start() { # NAME BINARY PORT
  local dir=$work/$1
  mkdir "$dir"
  cat > "$dir/jbofd.yaml" << YAML
metrics: {address: "127.0.0.1:$(($3 + 5000))"}
admin: {socket: "$dir/admin.sock"}
discovery: {address: ""}
listeners: [{transport: tcp, address: "127.0.0.1:$3"}]
ssds:
  - {name: mem0, backend: mem, size: 2GiB}
  - {name: file0, backend: file, path: "$dir/file0.img", size: 3GiB, create: true}
subsystems:
  - nqn: $nqn
    allow_any_host: true
    namespaces:
      - {nsid: 1, ssd: mem0, size: 512MiB}
      - {nsid: 2, ssd: file0, size: 1GiB}
      - {nsid: 3, ssd: mem0, size: 1GiB, type: kv}
      - {nsid: 4, ssd: file0, size: 1GiB, type: kv}
YAML
  taskset -c 0 "$2" --config "$dir/jbofd.yaml" 2> "$dir/jbofd.log" &
  pids+=($!)
  until curl -sf "http://127.0.0.1:$(($3 + 5000))/readyz" > /dev/null; do sleep 0.1; done
}
start before "$before" 14431
start after "$after" 14432
declare -A port=([before]=14431 [after]=14432)

block() { # SIDE, then arguments
  local side=$1
  shift
  taskset -c 1 bin/jbofbench block --json -q --target "tcp://127.0.0.1:${port[$side]}" --nqn $nqn "$@"
}
readonly records=1000000
kv() { # SIDE NSID load|run WORKLOAD, then arguments
  local side=$1 nsid=$2 verb=$3 workload=$4
  shift 4
  taskset -c 1 bin/jbofbench kv "$verb" --json -q --target "tcp://127.0.0.1:${port[$side]}" --nqn $nqn --nsid "$nsid" \
    -P "configs/ycsb/workload$workload" -p recordcount=$records -p fieldcount=1 -p fieldlength=256 "$@"
}
number() { grep -o "\"$1\": *[0-9.]*" | head -1 | grep -o '[0-9.]*$'; }
median() { sort -n | awk '{v[NR]=$1} END {print (NR%2) ? v[(NR+1)/2] : (v[NR/2]+v[NR/2+1])/2}'; }

# All of the drives is written first: memory and files that were never written are read in no time.
for side in before after; do
  for nsid in 1 2; do block $side --nsid $nsid --rw write --bs 1m --iodepth 4 > /dev/null; done
  for nsid in 3 4; do kv $side $nsid load c --depth 128 > /dev/null; done
done

printf '%-38s %10s %10s %7s\n' "" before after ratio
row() { # NAME FIELD COMMAND; SIDE in the command is replaced
  local name=$1 field=$2 r
  shift 2
  rm -f "$work"/{before,after}.row
  for ((r = 0; r < rounds; r++)); do
    for side in before after; do "${@/SIDE/$side}" | number "$field" >> "$work/$side.row"; done
  done
  local a b
  a=$(median < "$work/before.row") b=$(median < "$work/after.row")
  printf '%-38s %10.0f %10.0f %7.2f\n' "$name" "$a" "$b" "$(awk "BEGIN {print $b / $a}")"
}
for w in "randread 4k 1" "randwrite 4k 1" "randread 4k 32" "randwrite 4k 32" "randread 4k 128" "randwrite 4k 128" \
  "randread 128k 16" "randwrite 128k 16"; do
  read -r rw bs qd <<< "$w"
  row "mem, $rw $bs, QD $qd" iops block SIDE --nsid 1 --rw "$rw" --bs "$bs" --iodepth "$qd" --runtime "${seconds}s"
done
for w in "randread 4k 32" "randwrite 4k 32" "randread 128k 16" "randwrite 128k 16"; do
  read -r rw bs qd <<< "$w"
  row "file, $rw $bs, QD $qd" iops block SIDE --nsid 2 --rw "$rw" --bs "$bs" --iodepth "$qd" --runtime "${seconds}s"
done
for w in "3 c 1" "3 c 128" "3 a 128" "4 c 128" "4 a 128"; do
  read -r nsid workload qd <<< "$w"
  name=$([ "$nsid" = 3 ] && echo mem || echo file)
  row "kv on $name, YCSB-${workload^^}, QD $qd" opsPerSec kv SIDE "$nsid" run "$workload" --depth "$qd" \
    -p operationcount=0 -p maxexecutiontime="$seconds"
done
