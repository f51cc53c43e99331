#!/usr/bin/env bash
# Repeats Figures 6 to 9 of LEED's evaluation (SIGCOMM 2023), and writes of one hot key, with real daemons: three or
# four jbofd on loopback, a server of etcd in each of the first three, and jbofbench kv as one host. Their emulated SSDs
# are slowed down so far that they are the bottleneck and not the processors.
#   test/bench/cluster.sh [--quick] [FIGURE ...]     FIGURE: 6, 7, 8, 9, hot; default: all, about 15 minutes
# Prints a Markdown table. JSON=FILE (default cluster-bench.json) gets all of it, also each second of Figure 9.
# SLOWDOWN (of a DCT983; default 40), SECONDS_EACH (of a row; 6), RECORDS (of 1,000 bytes; 20000) and SEED (of the
# choice of records; 1) may be set. --quick takes a few rows of a second, in half a minute. BIN=DIR has jbofd, jbofctl
# and jbofbench; otherwise they are built. CPU is what all of this has used of all processors, and in brackets what they
# were busy with it and with anything else. A row with more than 60 % is marked "CPU!": it says little of the drives.
set -euo pipefail
cd "$(dirname "$0")/../.."
quick=
if [ "${1:-}" = --quick ]; then quick=1; shift; fi
readonly quick figures=${*:-6 7 8 9 hot}
for f in $figures; do
  case $f in 6 | 7 | 8 | 9 | hot) ;; *) echo "cluster.sh: there is no figure $f: 6, 7, 8, 9 or hot" >&2; exit 2 ;; esac
done
each=6 keys=20000 depths="8 32 128 512" tailnodes="n3 any" thetas="0.9 0.95 0.99" policies="fifo jbof" mixes8="B C"
mixes9="A B" events="join leave die" wraps=4
if [ -n "$quick" ]; then
  each=1 keys=2000 depths=64 tailnodes=n3 thetas=0.99 policies=jbof mixes8=B mixes9=B events=join wraps=1
fi
each=${SECONDS_EACH:-$each} keys=${RECORDS:-$keys}
readonly slowdown=${SLOWDOWN:-40} seed=${SEED:-1} json=${JSON:-cluster-bench.json}
if [ -z "${BIN:-}" ]; then make -s build; fi
bin=$(cd "${BIN:-bin}" && pwd)
readonly bin nqn=nqn.2026-11.example.jbofd:figures
work=$(mktemp -d)
pids=()
stop_cluster() {
  if ((${#pids[@]})); then
    kill "${pids[@]}" 2>> "$work/kill.log" || true
    wait "${pids[@]}" 2>> "$work/kill.log" || true
  fi
  pids=() gone=0
}
trap 'stop_cluster; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
say() { echo "$(date +%T) $*" >&2; }
fail() {
  echo "cluster.sh: $*" >&2
  tail -n 5 "$work"/n*/jbofd.log >&2
  exit 1
}
ctl() { # NODE, then arguments of jbofctl cluster
  local n=$1
  shift
  "$bin/jbofctl" --socket "$work/n$n/admin.sock" cluster "$@"
}
# full waits until all ranges have all their copies.
full() {
  ctl "${1:-1}" status --wait --timeout 300s > "$work/status.log" 2>&1 || fail "copies are missing: $(cat "$work/status.log")"
}

# What the nodes of the next cluster have: drives, their policy, how slow they are, and lines of the section "cluster".
drives=1 policy=jbof slow=$slowdown options=
node() { # NUMBER OF: starts a node of so many
  local n=$1 of=$2 d ssds= spaces= nodes= members= urls= etcd
  for ((d = 1; d <= drives; d++)); do
    ssds+="  - {name: ssd$d, backend: model, slowdown: $slow, size: 80MiB, policy: $policy}"$'\n'
    spaces+="      - {nsid: $d, ssd: ssd$d, size: 64MiB, type: kv, replicated: true, kv: {scrub_rate: 0}}"$'\n'
  done
  for ((d = 1; d <= of; d++)); do
    nodes+="    - {name: n$d, address: \"127.77.0.$d:24430\", target: \"tcp://127.77.0.$d:24420\"}"$'\n'
  done
  for d in 1 2 3; do
    members+="        - {name: n$d, client_url: \"http://127.77.0.$d:24379\", peer_url: \"http://127.77.0.$d:24380\"}"$'\n'
    urls+="\"http://127.77.0.$d:24379\", "
  done
  etcd=$'    embedded:\n      members:\n'"$members"
  if ((n > 3)); then etcd="    endpoints: [${urls%, }]"$'\n'; fi
  mkdir -p "$work/n$n"
  cat > "$work/n$n/jbofd.yaml" << YAML
node: {name: n$n, data_dir: .}
admin: {socket: admin.sock}
metrics: {address: "127.77.0.$n:24942"}
discovery: {address: ""}
listeners: [{address: "127.77.0.$n:24420"}]
limits: {queue_depth: 1023}
ssds:
${ssds}subsystems:
  - nqn: $nqn
    allow_any_host: true
    namespaces:
${spaces}cluster:
  name: figures
  subsystem: $nqn
  away: 2s
$options  etcd:
$etcd  nodes:
$nodes
YAML
  (cd "$work/n$n" && exec "$bin/jbofd" --config jbofd.yaml >> jbofd.log 2>&1) &
  pids[n - 1]=$!
}
# cluster OF STARTED [TAIL]: starts so many of so many nodes, and loads the records. TAIL=n3: the third node is
# restarted, so that it is the ChainTail of all chains.
cluster() {
  local n end=$((SECONDS + 120))
  stop_cluster
  rm -rf "$work"/n*
  say "a cluster: $2 nodes with $drives drives each"
  for ((n = 1; n <= $2; n++)); do node "$n" "$1"; done
  until ctl 1 init --replicas 3 --ranges 32 > "$work/init.log" 2>&1; do
    for n in "${pids[@]}"; do kill -0 "$n" 2>> "$work/kill.log" || fail "a node has ended"; done
    if ((SECONDS > end)); then fail "no cluster: $(cat "$work/init.log")"; fi
    sleep 0.1
  done
  full
  if [ "${3:-any}" = n3 ]; then
    kill "${pids[2]}"
    wait "${pids[2]}" || true
    node 3 "$1"
    full 3
    full
  fi
  kv load -p recordcount="$keys" --depth 64 > "$work/load.out" || fail "not loaded: $(tail -n 3 "$work/kv.log")"
}
kv() { # COMMAND, then arguments of jbofbench kv
  local what=$1
  shift
  "$bin/jbofbench" kv "$what" -q -p fieldcount=1 -p fieldlength=1000 -p requestdistribution=zipfian --threads 2 \
    --randseed "$seed" --read_timeout 10s --cluster 127.77.0.1:24420,127.77.0.2:24420,127.77.0.3:24420 --nqn $nqn "$@" 2>> "$work/kv.log"
}
# busy prints, in ticks: for how long all processors were busy, for how long they were there, and how much of them the
# nodes and their servers of etcd have used.
gone=0 # by nodes that were killed
busy() {
  awk '/^cpu / {for (i = 2; i <= 9; i++) t += $i; print t - $5 - $6, t}' /proc/stat
  used "${pids[@]}"
}
used() { # PID ...: these and their children
  # A process may end before its file is read.
  { cat /proc/[0-9]*/stat 2>> "$work/kill.log" || true; } | awk -v pids="$* " -v gone="$gone" '
    BEGIN {n = split(pids, p, " "); for (i = 1; i <= n; i++) own[p[i]] = 1}
    $1 in own || $4 in own {t += $14 + $15}
    END {print t + gone}'
}
# got NAME KEY: the value of a line "[NAME], KEY, value" of the latest run; 0 if there is none.
got() { awk -F', ' -v n="[$1]" -v k="$2" '$1 == n && $2 == k {v = $3} END {print v + 0}' "$work/run.out"; }
# run FIGURE NAME COMPARED WANTED PAPER, then arguments of jbofbench kv run: makes the row $last, which is compared with
# an earlier one; -: with none.
run() {
  local figure=$1 name=$2 compared=$3 wanted=$4 paper=$5 before measured= args
  shift 5
  args="-p recordcount=$keys -p maxexecutiontime=$each --continue_on_error $*"
  say "figure $figure: $name"
  before=$(busy)
  kv run $args > "$work/run.out" || true
  row
}
rows=0
row() { # of the variables of run or over
  local ops rm r9 wm w9 failed cpu all
  ops=$(got OVERALL "Throughput(ops/sec)")
  if [ "$ops" = 0 ]; then fail "figure $figure, $name: nothing was done: $(tail -n 3 "$work/kv.log")"; fi
  rm=$(got READ "AverageLatency(us)") r9=$(got READ "99.9PercentileLatency(us)")
  wm=$(got UPDATE "AverageLatency(us)") w9=$(got UPDATE "99.9PercentileLatency(us)")
  failed=$(awk -F', ' '$2 == "Operations" && $1 ~ /-FAILED/ {n += $3} END {print n + 0}' "$work/run.out")
  read -r cpu all < <(echo $before $(busy) "$(got OVERALL "CPU(%)")" "$(got OVERALL "RunTime(ms)")" "$(getconf CLK_TCK)" | awk '
    {printf "%.0f %.0f\n", 100 * ($6 - $3 + $7 / 100 * $8 / 1e3 * $9) / ($5 - $2), 100 * ($4 - $1) / ($5 - $2)}')
  last=$((++rows))
  echo "$ops $r9 $w9" > "$work/row$last"
  if [ "$compared" != - ]; then
    measured=$(cat "$work/row$compared" "$work/row$last" | awk 'NR == 1 {o = $1; r = $2; w = $3}
      NR == 2 {printf "%.2f times", $1 / o
        if (r && $2) printf ", reads p99.9 %+.0f %%", 100 * $2 / r - 100
        if (!r && w && $3) printf ", writes p99.9 %+.0f %%", 100 * $3 / w - 100}')
  fi
  awk -v f="$figure" -v n="$name" -v o="$ops" -v rm="$rm" -v r9="$r9" -v wm="$wm" -v w9="$w9" -v c="$cpu" -v all="$all" -v e="$failed" \
    -v m="$measured" -v w="$wanted" -v p="$paper" '
    function ms(mean, tail) { return mean ? sprintf("%.2f, %.1f", mean / 1e3, tail / 1e3) : "" }
    BEGIN { printf "| %s | %s | %.0f | %s | %s | %s | %s (%s)%s | %s | %s | %s |\n", f, n, o, ms(rm, r9), ms(wm, w9),
      (e ? e : ""), c, all, (all > 60 ? " CPU!" : ""), m, w, p }' >> "$work/table"
  tail -n 1 "$work/table" >&2
  {
    if ((last > 1)); then echo ,; fi
    printf '{"figure":"%s","name":"%s","kvRun":"%s","opsPerSec":%s,"failed":%s,"cpuPercent":%s,"cpuPercentOfAnything":%s,"readMeanUS":%s,' \
      "$figure" "$name" "$args" "$ops" "$failed" "$cpu" "$all" "$rm"
    printf '"readP999US":%s,"writeMeanUS":%s,"writeP999US":%s,"measured":"%s","wanted":"%s","paper":"%s","timeline":[%s]}' \
      "$r9" "$wm" "$w9" "$measured" "$wanted" "$paper" "$(awk -F', ' '$1 == "[TIMELINE]" {printf "%s%s", n++ ? "," : "", $3}' "$work/run.out")"
  } >> "$work/rows"
}
mix() { echo "-p readproportion=$1 -p updateproportion=$2"; } # of reads and updates
declare -A mixes=([A]=$(mix 0.5 0.5) [B]=$(mix 0.95 0.05) [C]=$(mix 1 0))

# Figure 6: latency by operations under way.
figure6() {
  local n
  cluster 3 3
  for n in $depths; do
    run 6 "YCSB-B, $n under way" - "" "" ${mixes[B]} --depth $((n / 2))
  done
}

# Figure 7: reads at all replicas, and at the ChainTail only.
figure7() {
  local tail theta base
  local -A paper=([0.9]="7.3 times, -94 %" [0.95]="5.1 times, -96 %" [0.99]="4.2 times, -64 %")
  for tail in $tailnodes; do
    cluster 3 3 "$tail"
    for theta in $thetas; do
      run 7 "YCSB-C, zipf $theta, ChainTails at $tail node, reads there" - "" "" ${mixes[C]} -p zipfianconstant="$theta" --depth 128 --read_from tail
      base=$last
      run 7 "the same, reads at all replicas" "$base" "2.5 times, -50 %" "${paper[$theta]}" ${mixes[C]} -p zipfianconstant="$theta" --depth 128
    done
  done
}

# Figure 8: scheduling by tokens on and off, with four drives in a node.
figure8() {
  local w
  local -A base
  drives=4 slow=$((2 * slowdown))
  for policy in $policies; do
    cluster 3 3
    for w in $mixes8; do
      run 8 "YCSB-$w, no tokens, reads at each in turn, drives $policy" - "" "" ${mixes[$w]} --depth 512 --credits off --read_from turn
      base[$w$policy]=$last
    done
  done
  for w in $mixes8; do
    run 8 "YCSB-$w, tokens, drives jbof" "${base[$w${policies%% *}]}" "1.4 times, -30 %" "1.52 times, -34 % (B)" ${mixes[$w]} --depth 512
  done
  drives=1 slow=$slowdown policy=jbof
}

# over NAME WANTED PAPER EVENT, then arguments of jbofbench kv run: a row of Figure 9. The event is a third into it.
over() {
  local figure=9 name=$1 compared=- wanted=$2 paper=$3 event=$4 before measured args time=$((each > 1 ? 4 * each : 6)) load took
  shift 4
  args="-p recordcount=$keys -p maxexecutiontime=$time -p timeseries.granularity=1000 --continue_on_error $*"
  say "figure 9: $name"
  # The logs wrap first: otherwise compaction begins in the middle of the row, and looks like an effect of the event.
  # No write may fail, although ChainHeads move meanwhile.
  kv run -p recordcount="$keys" -p operationcount=$((wraps * keys)) $(mix 0 1) --depth 64 > "$work/wrap.out" ||
    fail "the logs have not wrapped: $(tail -n 3 "$work/kv.log")"
  before=$(busy)
  kv run $args > "$work/run.out" &
  load=$!
  sleep $((time / 3))
  took=$(date +%s%3N)
  case $event in
    join) node 4 4 ;;
    leave) ctl 1 drain n4 --wait --timeout 300s > "$work/drain.log" ;;
    die)
      gone=$(used "${pids[3]}")
      kill -KILL "${pids[3]}"
      wait "${pids[3]}" 2>> "$work/kill.log" || true
      unset 'pids[3]'
      sleep 3 # until the cluster has given it up
      ;;
  esac
  if [ "$event" = join ]; then full 4; fi
  full
  took=$(($(date +%s%3N) - took))
  wait "$load" || true
  # Seconds 1 to the event are before it, the last fifth is long after it. A node that dies is given up after a lease of
  # 1 s, in which its writes wait: the first three seconds are counted apart.
  measured=$(awk -F', ' -v at=$((time / 3)) -v end="$time" -v took="$took" -v failover=$([ "$event" = die ] && echo 3 || echo 0) '
    $1 == "[TIMELINE]" && $2 / 1000 < end {
      s = $2 / 1000
      if (s >= 1 && s < at) { b += $3; n++ }
      if (s >= at && s < at + failover && (worst == "" || $3 < worst)) worst = $3
      if (s >= at + failover && (least == "" || $3 < least)) least = $3
      if (s >= end * 0.8) { a += $3; k++ }
    }
    END { if (failover) printf "failover: least second %.0f %%; then ", 100 * worst / (b / n)
      printf "least second %.0f %%, at last %.0f %% of before; all copies after %.1f s", 100 * least / (b / n),
      100 * (a / k) / (b / n), took / 1e3 }' "$work/run.out")
  row
}
# Figure 9: a node joins, leaves, or dies.
figure9() {
  local w event
  local -A paper=([A-join]="51 %" [B-join]="84 %" [A-leave]="34 %" [B-leave]="56 %")
  for w in $mixes9; do
    for event in $events; do
      if [ "$event" = join ]; then cluster 4 3; else cluster 4 4; fi
      over "YCSB-$w, one of four nodes: $event" "75 %" "${paper[$w-$event]:-}" "$event" ${mixes[$w]} --depth 64
    done
  done
}

# One hot key: many of its writes are in its chain, or one at a time.
figurehot() {
  local base=- locked
  for locked in true false; do
    options="  lock_keys: $locked"$'\n'
    cluster 3 3
    run hot "writes of one key, lock_keys: $locked" "$base" "$([ $base = - ] || echo "5 times")" "" $(mix 0 1) -p recordcount=1 --depth 32
    base=$last
  done
  options=
}

printf '| figure | how | ops/s | reads: mean, p99.9 (ms) | writes: mean, p99.9 (ms) | failed | CPU %% (of anything) | measured | wanted | the paper |\n' > "$work/table"
printf '|---|---|---|---|---|---|---|---|---|---|\n' >> "$work/table"
began=$(date -u +%FT%TZ)
for f in $figures; do "figure$f"; done
cat "$work/table"
{
  printf '{"apiVersion":"jbofd.bench/v1","kind":"ClusterBench","startedAt":"%s","version":"%s","kernel":"%s","processors":%s,' \
    "$began" "$("$bin/jbofd" --version | tr -d '"')" "$(uname -sr)" "$(nproc)"
  printf '"preset":"dct983","slowdown":%s,"seed":%s,"records":%s,"valueBytes":1000,"secondsEach":%s,"rows":[\n' "$slowdown" "$seed" "$keys" "$each"
  cat "$work/rows"
  printf '\n]}\n'
} > "$json"
say "all of it: $json"
