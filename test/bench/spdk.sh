#!/usr/bin/env bash
# Measures jbofd and SPDK's nvmf_tgt alternately in one run, with the same load generator on both sides: first SPDK's
# spdk_nvme_perf, then jbofbench block. Memory stands behind both targets (backend mem, bdev_malloc); NVMe/TCP on
# loopback, one host, one I/O queue; the target is pinned to processor 0 and the load generator to processor 1.
#   SPDK=/path/to/a/built/spdk test/bench/spdk.sh [ROUNDS] [SECONDS] [perf|jbofbench]     (default 10 rounds of 2 s, both)
# JBOFD=path measures another jbofd binary than bin/jbofd. LOADS="randread:4096:1 ..." replaces the list of loads.
# Needs root and 900 huge pages of 2 MiB for SPDK. The target that is not measured is stopped (SIGSTOP), because
# nvmf_tgt never sleeps. Prints a Markdown table per load generator: the median IOPS of both, the median of the ratios
# of the pairs, and the least and largest ratio.
set -euo pipefail
cd "$(dirname "$0")/../.."
readonly rounds=${1:-10} generators=${3:-"perf jbofbench"} spdk=${SPDK:?the folder in which SPDK was built}
seconds=${2:-2}
readonly loads=${LOADS:-"randread:4096:1 randwrite:4096:1 randread:4096:32 randwrite:4096:32 randread:4096:128 randwrite:4096:128 randread:131072:16 randwrite:131072:16 randwrite:16384:4 randwrite:131072:1"}
export LD_LIBRARY_PATH=$spdk/build/lib
make -s build
readonly binary=${JBOFD:-bin/jbofd}
# Linux's default congestion control on both sides. BBR estimates a bandwidth and paces the sender to it; on loopback
# that measures the estimate and not the target.
readonly congestion=/proc/sys/net/ipv4/tcp_congestion_control
before=$(< $congestion)
echo cubic > $congestion
work=$(mktemp -d)
pids=()
trap 'echo "$before" > $congestion; kill -CONT "${pids[@]}" 2>/dev/null; kill "${pids[@]}" 2>/dev/null || true; rm -rf "$work"' EXIT
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
taskset -c 0 "$binary" --config "$work/jbofd.yaml" 2> "$work/jbofd.log" &
pids+=($!)
"$spdk/build/bin/nvmf_tgt" -m 0x1 -s 600 --no-pci -r "$work/spdk.sock" > "$work/spdk.log" 2>&1 &
pids+=($!)
readonly jbofd=${pids[0]} nvmf=${pids[1]}
readonly our_nqn=nqn.2026-11.example.jbofd:bench their_nqn=nqn.2026-11.example.jbofd:spdk
until [ -S "$work/spdk.sock" ]; do
  kill -0 "$nvmf" 2>/dev/null || { echo "nvmf_tgt ended:"; cat "$work/spdk.log"; exit 1; } >&2
  sleep 0.2
done
sleep 1
rpc() { "${PYTHON:-python3}" "$spdk/scripts/rpc.py" -s "$work/spdk.sock" "$@" > /dev/null; }
rpc nvmf_create_transport -t TCP
rpc bdev_malloc_create -b M0 512 4096
rpc nvmf_create_subsystem $their_nqn -a -s S1
rpc nvmf_subsystem_add_ns $their_nqn M0
rpc nvmf_subsystem_add_listener $their_nqn -t tcp -a 127.0.0.1 -s 14423
until curl -sf http://127.0.0.1:19420/readyz > /dev/null; do sleep 0.1; done

perf() { # RW BS QD PORT NQN
  "$spdk/build/bin/spdk_nvme_perf" -c 0x2 -s 256 -q "$3" -o "$2" -w "$1" -t "$seconds" \
    -r "trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:$4 subnqn:$5" 2>&1 | awk '$1 == "Total" {print $3}'
}
jbofbench() {
  taskset -c 1 bin/jbofbench block --json -q --target "tcp://127.0.0.1:$4" --nqn "$5" --rw "$1" --bs "$2" --iodepth "$3" \
    --runtime "${seconds}s" | grep -o '"iops": *[0-9.]*' | head -1 | grep -o '[0-9.]*$'
}
one() { # GENERATOR TARGET RW BS QD
  kill -STOP "$jbofd" "$nvmf"
  case $2 in
    jbofd) kill -CONT "$jbofd"; "$1" "$3" "$4" "$5" 14421 $our_nqn ;;
    nvmf) kill -CONT "$nvmf"; "$1" "$3" "$4" "$5" 14423 $their_nqn ;;
  esac
}
# Every block of both drives is written once before anything is measured: a page of memory is slow when it is touched
# for the first time, as a block of flash is fast before it is written.
for target in jbofd nvmf; do
  seconds=3 one perf $target write 131072 16 > /dev/null
done
for generator in $generators; do
  printf '\n| %s | jbofd, IOPS | nvmf_tgt, IOPS | ratio | least to largest |\n|---|---|---|---|---|\n' "$generator"
  for load in $loads; do
    IFS=: read -r rw bs qd <<< "$load"
    if [ "$generator" = jbofbench ] && ((qd == 128)); then qd=127; fi # nvmf_tgt has queues of 128 entries, one of them empty
    : > "$work/pairs"
    for ((r = 0; r < rounds; r++)); do
      if ((r % 2)); then a=$(one "$generator" jbofd "$rw" "$bs" "$qd") b=$(one "$generator" nvmf "$rw" "$bs" "$qd")
      else b=$(one "$generator" nvmf "$rw" "$bs" "$qd") a=$(one "$generator" jbofd "$rw" "$bs" "$qd"); fi
      echo "$a $b" >> "$work/pairs"
    done
    awk -v l="$rw $bs B, QD $qd" '
      function median(v, n,  i, j, t) { for (i = 2; i <= n; i++) for (j = i; j > 1 && v[j] < v[j-1]; j--) { t = v[j]; v[j] = v[j-1]; v[j-1] = t }
        return n % 2 ? v[(n+1)/2] : (v[n/2] + v[n/2+1]) / 2 }
      { a[NR] = $1; b[NR] = $2; q[NR] = $1 / $2 }
      END { m = median(q, NR); printf "| %s | %.0f | %.0f | %.2f | %.2f to %.2f |\n", l, median(a, NR), median(b, NR), m, q[1], q[NR] }' "$work/pairs"
  done
done
kill -CONT "$jbofd" "$nvmf"
