#!/usr/bin/env bash
# Measures jbofd and SPDK's nvmf_tgt alternately in one run, the same way: memory behind them, NVMe/TCP on loopback, one host, one queue, target
# pinned to processor 0 and load generator to processor 1, each with its own load generator (jbofbench, spdk_nvme_perf).
#   SPDK=/path/to/a/built/spdk test/bench/spdk.sh [ROUNDS] [SECONDS]     (default 10 rounds of 2 s)
# Needs root and 900 huge pages of 2 MiB for SPDK. A target that is not measured is stopped (SIGSTOP), as SPDK's never sleeps.
# Prints, per load, the median IOPS of both and their ratio.
set -euo pipefail
cd "$(dirname "$0")/../.."
readonly rounds=${1:-10} seconds=${2:-2} spdk=${SPDK:?where SPDK was built}
export LD_LIBRARY_PATH=$spdk/build/lib
make -s build
work=$(mktemp -d)
pids=()
trap 'kill -CONT "${pids[@]}" 2>/dev/null; kill "${pids[@]}" 2>/dev/null || true; rm -rf "$work"' EXIT
cat > "$work/jbofd.yaml" <<YAML
metrics: {address: "127.0.0.1:19420"}
admin: {socket: "$work/admin.sock"}
discovery: {address: ""}
listeners: [{transport: tcp, address: "127.0.0.1:14421"}]
ssds: [{name: mem0, backend: mem, size: 1GiB}]
subsystems:
  - nqn: nqn.2026-11.example.jbofd:bench
    allow_any_host: true
    namespaces: [{nsid: 1, ssd: mem0, size: 512MiB}]
YAML
taskset -c 0 bin/jbofd --config "$work/jbofd.yaml" 2> "$work/jbofd.log" &
pids+=($!)
"$spdk/build/bin/nvmf_tgt" -m 0x1 -s 600 --no-pci -r "$work/spdk.sock" > "$work/spdk.log" 2>&1 &
pids+=($!)
readonly jbofd=${pids[0]} nvmf=${pids[1]} nqn=nqn.2026-11.example.jbofd:spdk
until [ -S "$work/spdk.sock" ]; do sleep 0.2; done
sleep 1
rpc() { "${PYTHON:-python3}" "$spdk/scripts/rpc.py" -s "$work/spdk.sock" "$@" > /dev/null; }
rpc nvmf_create_transport -t TCP
rpc bdev_malloc_create -b M0 512 4096
rpc nvmf_create_subsystem $nqn -a -s S1
rpc nvmf_subsystem_add_ns $nqn M0
rpc nvmf_subsystem_add_listener $nqn -t tcp -a 127.0.0.1 -s 14423
until curl -sf http://127.0.0.1:19420/readyz > /dev/null; do sleep 0.1; done

ours() {
  kill -STOP "$nvmf"
  taskset -c 1 bin/jbofbench block --json -q --target tcp://127.0.0.1:14421 --nqn nqn.2026-11.example.jbofd:bench --rw "$1" --bs "$2" --iodepth "$3" \
    --runtime "${seconds}s" | grep -o '"iops": *[0-9.]*' | head -1 | grep -o '[0-9.]*$'
}
theirs() {
  kill -CONT "$nvmf"
  "$spdk/build/bin/spdk_nvme_perf" -c 0x2 -s 256 -q "$3" -o "$2" -w "$1" -t "$seconds" \
    -r "trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:14423 subnqn:$nqn" 2>&1 | awk '$1 == "Total" {print $3}'
}
median() { sort -n | awk '{v[NR]=$1} END {print (NR%2) ? v[(NR+1)/2] : (v[NR/2]+v[NR/2+1])/2}'; }
for load in "randread 4096 1" "randwrite 4096 1" "randread 4096 32" "randwrite 4096 32" "randread 4096 128" "randwrite 4096 128" "randread 131072 16" "randwrite 131072 16"; do
  read -r rw bs qd <<< "$load"
  : > "$work/ours"
  : > "$work/theirs"
  for ((r = 0; r < rounds; r++)); do
    ours "$rw" "$bs" "$qd" >> "$work/ours"
    theirs "$rw" "$bs" "$qd" >> "$work/theirs"
  done
  a=$(median < "$work/ours") b=$(median < "$work/theirs")
  awk -v l="$load" -v a="$a" -v b="$b" 'BEGIN {printf "%-22s jbofd %9.0f IOPS   nvmf_tgt %9.0f IOPS   ratio %.2f\n", l, a, b, a/b}'
done
