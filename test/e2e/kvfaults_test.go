package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/client/kv"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/ssd/label"
)

// kvCommand makes a command to namespace 2; n is the length of the value or of the buffer.
func kvCommand(opcode uint8, key []byte, n int) (e nvme.SQE) {
	e.SetOpcode(opcode)
	e.SetNSID(2)
	e.KV().SetKey(key)
	e.KV().SetLenBytes(uint32(n))
	return e
}

// TestCommandsOfKeysAsAToolSendsThem, byte by byte: keys and values of every length, right or not, buffers that are too short, and
// lists from the middle.
func TestCommandsOfKeysAsAToolSendsThem(t *testing.T) {
	t.Parallel()
	d := start(t, kvSetup(memSSD))
	c := d.connect(d.options(hostA, nqnA))
	do := func(e nvme.SQE, data []byte) (dw0 uint32, st nvme.Status) {
		t.Helper()
		comp, err := c.IOPassthru(ctx(t), e, data)
		if err != nil && comp.Status.OK() {
			t.Fatal(err)
		}
		return uint32(comp.Result), comp.Status.Code()
	}
	sizes := []int{0, 1, 2, 511, 512, 513, 4095, 4096, 4097, 8192, 8193, 65536, 1<<20 - 1, 1 << 20}
	for i, n := range sizes {
		key := bytes.Repeat([]byte{byte(i)}, 1+i) // keys of 1 to 14 bytes, with zeroes among them
		v := value(fmt.Sprint("value ", i), 1, n)
		if _, st := do(kvCommand(nvme.CmdKVStore, key, n), v); !st.OK() {
			t.Fatalf("store of %d bytes: %v", n, st)
		}
		for _, room := range []int{0, 1, n / 2, n - 1, n, n + 1, 1 << 20} {
			if room < 0 || room > 1<<20 {
				continue
			}
			got := make([]byte, room)
			dw0, st := do(kvCommand(nvme.CmdKVRetrieve, key, room), got)
			if have := min(n, room); !st.OK() || int(dw0) != n || !bytes.Equal(got[:have], v[:have]) || bytes.Count(got[have:], []byte{0}) != room-have {
				t.Errorf("retrieve of %d bytes into %d: %v, DW0 %d, or other data", n, room, st, dw0)
			}
		}
	}
	if _, st := do(kvCommand(nvme.CmdKVStore, []byte("long"), 1<<20+1), make([]byte, 1<<20+1)); st != nvme.InvalidValueSize {
		t.Errorf("store of 1 MiB and a byte: %v", st)
	}
	for _, op := range []uint8{nvme.CmdKVStore, nvme.CmdKVRetrieve, nvme.CmdKVDelete, nvme.CmdKVExist, nvme.CmdKVList} {
		for _, n := range []uint8{0, 17, 255} {
			if n == 0 && op == nvme.CmdKVList {
				continue // from the beginning
			}
			e, data := kvCommand(op, []byte("0123456789abcdef"), 4096), make([]byte, 4096)
			if op == nvme.CmdKVDelete || op == nvme.CmdKVExist {
				e.KV().SetLenBytes(0)
				data = nil
			}
			e[44] = n // CDW11, bits 7:0
			if _, st := do(e, data); st != nvme.InvalidKeySize {
				t.Errorf("command %#x with a key of %d bytes: %v", op, n, st)
			}
		}
	}
	if _, st := do(kvCommand(nvme.CmdKVList, nil, 3), make([]byte, 3)); st != nvme.InvalidField {
		t.Errorf("a list of 3 bytes: %v", st)
	}
	// Lists of two keys or so, each from the last key of the one before.
	seen := map[string]int{}
	var order []string
	for from := []byte(nil); ; {
		b := make([]byte, 48)
		if _, st := do(kvCommand(nvme.CmdKVList, from, len(b)), b); !st.OK() {
			t.Fatalf("list from %x: %v", from, st)
		}
		news := false
		for key := range nvme.KVList(b).All() {
			if seen[string(key)]++; seen[string(key)] == 1 {
				order, news = append(order, string(key)), true
			}
		}
		if !news {
			break
		}
		from = []byte(order[len(order)-1])
	}
	if len(seen) != len(sizes) {
		t.Errorf("%d keys are listed, %d were stored", len(seen), len(sizes))
	}
	// From the middle there is what came behind it, also when the key itself is gone.
	middle := len(order) / 2
	for _, gone := range []bool{false, true} {
		b := make([]byte, 4096)
		if gone {
			if _, st := do(kvCommand(nvme.CmdKVDelete, []byte(order[middle]), 0), nil); !st.OK() {
				t.Fatal(st)
			}
		}
		if _, st := do(kvCommand(nvme.CmdKVList, []byte(order[middle]), len(b)), b); !st.OK() {
			t.Fatal(st)
		}
		var got []string
		for key := range nvme.KVList(b).All() {
			got = append(got, string(key))
		}
		want := order[middle:]
		if gone {
			want = want[1:]
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("from the middle (gone: %t): %x, want %x", gone, got, want)
		}
	}
}

// kvVictim puts and reads keys and holds what comes to what was put, until it is stopped.
type kvVictim struct {
	t    *testing.T
	stop atomic.Bool
	wg   sync.WaitGroup
	done atomic.Int64
}

func startKVVictim(t *testing.T, n *kv.Namespace, workers int) *kvVictim {
	v := &kvVictim{t: t}
	for w := range workers {
		v.wg.Go(func() {
			for i := 0; !v.stop.Load(); i++ {
				key := fmt.Appendf(nil, "victim %d %d", w, i%20)
				want := value(string(key), i, 100+i%3000)
				if err := n.Put(ctx(t), key, want); err != nil {
					t.Errorf("put %s: %v", key, err)
					return
				}
				if got, err := n.Value(ctx(t), key); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s: %d bytes, %v; want the %d that were put", key, len(got), err, len(want))
					return
				}
				v.done.Add(1)
			}
		})
	}
	return v
}

// progress waits until n more rounds are done.
func (v *kvVictim) progress(n int64) {
	v.t.Helper()
	from := v.done.Load()
	eventually(v.t, "others go on", func() bool { return v.t.Failed() || v.done.Load() >= from+n })
}

func (v *kvVictim) end() {
	v.stop.Store(true)
	v.wg.Wait()
}

// rawKVQueue is rawQueue of a host that has enabled all command sets.
func (d *daemon) rawKVQueue(host string) (admin, io *rawHost) {
	d.t.Helper()
	admin, io = d.raw(), d.raw()
	admin.initialize(false)
	l := login{host: host, sub: nqnA, entries: 128, noSQFlow: true}
	c := admin.connect(l)
	if !c.Status().OK() {
		d.t.Fatalf("Connect: %v", c.Status())
	}
	l.cntlid, l.qid = c.ConnectCNTLID(), 1
	const allCommandSets = 6 << 4
	if c := admin.do(propertySet(nvme.PropCC, enable|allCommandSets, 1)); !c.Status().OK() {
		d.t.Fatalf("enabling the controller: %v", c.Status())
	}
	io.initialize(false)
	if c := io.connect(l); !c.Status().OK() {
		d.t.Fatalf("Connect of the I/O queue: %v", c.Status())
	}
	return admin, io
}

// TestHostsOfKeysThatDoWrong harm themselves only: data that stops in the middle, lengths that lie, garbage, answers that
// nobody reads.
func TestHostsOfKeysThatDoWrong(t *testing.T) {
	t.Parallel()
	d := start(t, kvSetup(memSSD))
	c := d.connect(d.options(hostA, nqnA))
	n := openKV(t, c, 2)
	was := value("target", 1, 300_000)
	if err := n.Put(ctx(t), []byte("target"), was); err != nil {
		t.Fatal(err)
	}
	v := startKVVictim(t, n, 4)
	defer v.end()
	rng := random(t)
	store := func(cid uint16, size int) nvme.SQE {
		e := kvCommand(nvme.CmdKVStore, []byte("target"), size)
		e.SetCID(cid)
		return e
	}
	for round := range 4 {
		for name, harm := range map[string]func(h *rawHost){
			"gone before the data": func(h *rawHost) {
				for i := range uint16(100) {
					h.send(h.capsule(store(i, 200_000), nil, 200_000))
				}
			},
			"gone in the middle of the data": func(h *rawHost) {
				h.send(h.capsule(store(1, 200_000), nil, 200_000))
				p := h.frame(pdu.TypeH2CData, 0, h2cData(1, h.r2t(), 0, 65536), make([]byte, 65536))
				h.send(p[:1+rng.IntN(len(p))])
			},
			"more data than was asked for": func(h *rawHost) {
				h.send(h.capsule(store(1, 200_000), nil, 200_000))
				tag := h.r2t()
				h.send(h.frame(pdu.TypeH2CData, pdu.FlagLast, h2cData(1, tag, 180_000, 65536), make([]byte, 65536)))
				if h.ended() == nil {
					t.Error("data beyond the value: closed without a TermReq")
				}
			},
			"another length in the SGL": func(h *rawHost) {
				h.send(h.capsule(store(1, 200_000), nil, 5000))
				if r := h.response(); r.Status().OK() {
					t.Error("a Store of 200,000 bytes with an SGL of 5,000 succeeds")
				}
				e := kvCommand(nvme.CmdKVRetrieve, []byte("target"), 4096)
				h.send(h.capsule(e, nil, 100))
				if r := h.response(); r.Status().OK() {
					t.Error("a Retrieve of 4,096 bytes with an SGL of 100 succeeds")
				}
			},
			"less data in the capsule than the value's length": func(h *rawHost) {
				h.send(h.capsule(store(1, 4096), make([]byte, 100), 0))
				if r := h.response(); r.Status().OK() {
					t.Error("a Store of 4,096 bytes with 100 in its capsule succeeds")
				}
			},
			"answers that nobody reads": func(h *rawHost) {
				e := kvCommand(nvme.CmdKVRetrieve, []byte("target"), 1<<20)
				for i := range uint16(100) {
					e.SetCID(i)
					h.send(h.capsule(e, nil, 1<<20))
				}
				v.progress(20)
			},
			"garbage behind a command": func(h *rawHost) {
				h.send(h.capsule(store(1, 4096), nil, 4096))
				junk := make([]byte, 300)
				for i := range junk {
					junk[i] = byte(rng.Uint32())
				}
				h.send(junk)
			},
			"random commands": func(h *rawHost) {
				for i := range uint16(60) {
					e := kvCommand([]uint8{nvme.CmdKVStore, nvme.CmdKVRetrieve, nvme.CmdKVList, nvme.CmdKVExist, nvme.CmdFlush}[rng.IntN(5)], []byte{0xff, byte(i)}, rng.IntN(3000))
					for range 1 + rng.IntN(3) {
						e[4+rng.IntN(60)] ^= byte(1 << rng.IntN(8))
					}
					e.KV().SetKey([]byte{0xff, byte(i)}) // what is put at random is nobody else's
					e.SetCID(i)
					h.send(h.capsule(e, nil, rng.IntN(3000)))
				}
			},
		} {
			admin, io := d.rawKVQueue(fmt.Sprintf("%s:%d:%s", hostB, round, strings.ReplaceAll(name, " ", "-")))
			harm(io)
			io.close()
			admin.close()
		}
	}
	v.progress(20)
	v.end()
	got, err := n.Value(ctx(t), []byte("target"))
	if err != nil || !bytes.Equal(got, was) {
		t.Errorf("the value that was never replaced whole: %d bytes, %v", len(got), err)
	}
}

// TestKeysOnAFullFileSystem: writes are refused while the drive's file system has no room, what is there is served, and
// when there is room again all goes on by itself.
func TestKeysOnAFullFileSystem(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	unshare, err := exec.LookPath("unshare")
	if err == nil {
		err = exec.Command(unshare, "-Urm", "sh", "-c", "mount -t tmpfs -o size=8m tmpfs /mnt").Run()
	}
	if err != nil {
		t.Skipf("no small file system to be had: unshare -Urm and mounting a tmpfs: %v", err)
	}
	s := kvSetup(strings.Replace(fileSSD, "@DIR@/", "@DIR@/small/", 1))
	d := newDaemon(t, s)
	d.workers = 8
	small := filepath.Join(d.dir, "small")
	if err := os.Mkdir(small, 0o700); err != nil {
		t.Fatal(err)
	}
	d.prefix = []string{unshare, "-Urm", "sh", "-c", `mount -t tmpfs -o size=24m tmpfs "$0" && head -c 12582912 /dev/zero > "$0/ballast" && exec "$@"`, small}
	d.launch()
	n := openKV(t, d.connect(d.options(hostA, nqnA)), 2)
	key := func(i int) []byte { return fmt.Appendf(nil, "%d", i) }
	put := func(i, version int) error { return n.Put(ctx(t), key(i), value(fmt.Sprint(i), version, 20_000)) }
	have, maybe := map[int]int{}, map[int]bool{} // versions; puts that failed
	refused := 0
	for i := 0; i < 2000 && refused < 30; i++ {
		err := put(i, 1)
		if err == nil {
			have[i] = 1
			continue
		}
		maybe[i] = true
		if st := statusOf(t, err); st.Code() != nvme.WriteFault {
			t.Fatalf("put to a full file system: %v", st)
		}
		refused++
	}
	t.Logf("%d values, then %d refused", len(have), refused)
	if len(have) < 300 || refused < 30 {
		t.Fatalf("%d values were stored and %d refused, in some 12 MiB", len(have), refused)
	}
	check := func(when string) {
		t.Helper()
		for i, version := range have {
			if got, err := n.Value(ctx(t), key(i)); err != nil || !bytes.Equal(got, value(fmt.Sprint(i), version, 20_000)) {
				t.Fatalf("%s: value %d: %d bytes, %v", when, i, len(got), err)
			}
		}
		for i := range maybe {
			got, err := n.Value(ctx(t), key(i))
			if !errors.Is(err, kv.ErrKeyNotFound) && (err != nil || !bytes.Equal(got, value(fmt.Sprint(i), 1, 20_000))) {
				t.Fatalf("%s: value %d, whose put had failed: %d bytes, %v", when, i, len(got), err)
			}
		}
	}
	check("when full")
	if d.metric("jbof_ssd_no_space_errors_total", "ssd", "ssd0") == 0 {
		t.Error("not counted as want of space")
	}
	// The file system is the daemon's own: /proc leads into it.
	if err := os.Remove(fmt.Sprintf("/proc/%d/root%s/ballast", d.cmd.Process.Pid, small)); err != nil {
		t.Fatal(err)
	}
	for i := 3000; i < 3200; i++ {
		err := put(i, 1)
		for deadline := time.Now().Add(wait); err != nil && time.Now().Before(deadline); err = put(i, 1) {
			_ = statusOf(t, err)
		}
		if err != nil {
			t.Fatalf("with room again: %v", err)
		}
		have[i] = 1
	}
	check("with room again")
	if code, body := d.get("/readyz"); code != 200 {
		t.Errorf("with room again /readyz is %d %s", code, body)
	}
}

// TestTheScrubFindsDamage: a value changes on the drive while the daemon runs. That is counted and logged, its Retrieve fails, and
// nothing else does.
func TestTheScrubFindsDamage(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	s := kvSetup(fileSSD)
	s.subsystems = strings.Replace(s.subsystems, "type: kv}", "type: kv, kv: {scrub_rate: 1GiB}}", 1)
	d := start(t, s)
	d.workers = 8
	n := openKV(t, d.connect(d.options(hostA, nqnA)), 2)
	const keys, bad = 300, 17
	size := func(i int) int { return 500 + 10*i }
	for i := range keys {
		if err := n.Put(ctx(t), fmt.Appendf(nil, "%d", i), value(fmt.Sprint(i), 1, size(i))); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 400 { // what is full is scrubbed, not what is being written
		if err := n.Put(ctx(t), fmt.Appendf(nil, "behind %d", i), make([]byte, 10_000)); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(d.dir, "ssd0.img")
	image, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := value(fmt.Sprint(bad), 1, size(bad))
	at := bytes.Index(image, want)
	if at < 0 || bytes.Contains(image[at+1:], want) {
		t.Fatal("the value is not on the drive once")
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{^want[99]}, int64(at)+99); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the damage is counted", func() bool { return d.metric("jbof_kv_damaged_records_total", "nsid", "2") > 0 })
	if d.metric("jbof_kv_scrubbed_bytes_total", "nsid", "2") == 0 {
		t.Error("no bytes are scrubbed")
	}
	if lines := d.log.find("a record is not what was written", "level=ERROR", "nsid=2", fmt.Sprintf("Offset:%d", at-24-label.AlignBytes-16<<20)); len(lines) == 0 {
		t.Errorf("the log does not say where; it is at %d of the drive: %s", at, d.log.find("a record is not what was written"))
	}
	for i := range keys {
		got, err := n.Value(ctx(t), fmt.Appendf(nil, "%d", i))
		switch {
		case i == bad:
			if err == nil {
				t.Fatalf("the damaged value is served, %d bytes", len(got))
			}
			if st := statusOf(t, err); st.Code() != nvme.UnrecoveredReadError {
				t.Errorf("the damaged value: %v", st)
			}
		case err != nil || !bytes.Equal(got, value(fmt.Sprint(i), 1, size(i))):
			t.Errorf("value %d: %d bytes, %v", i, len(got), err)
		}
	}
	if err := n.Put(ctx(t), fmt.Appendf(nil, "%d", bad), []byte("new")); err != nil {
		t.Errorf("a new value instead of the damaged one: %v", err)
	}
	if got, err := n.Value(ctx(t), fmt.Appendf(nil, "%d", bad)); err != nil || string(got) != "new" {
		t.Errorf("a new value instead of the damaged one: %q, %v", got, err)
	}
}

// TestManyHostsOfKeys at once, and nothing of them is left.
func TestManyHostsOfKeys(t *testing.T) {
	t.Parallel()
	s := kvSetup(memSSD)
	d := start(t, s)
	const hosts = 120 // of two connections each
	var wg sync.WaitGroup
	for h := range hosts {
		wg.Go(func() {
			c, err := client.Connect(ctx(t), d.options(fmt.Sprintf("%s%d", hostA, h), nqnA))
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = c.Close() }()
			n, err := kv.Open(ctx(t), c, 2, kv.Options{})
			if err != nil {
				t.Error(err)
				return
			}
			for i := range 10 {
				key := fmt.Appendf(nil, "%d of %d", i, h)
				want := value(string(key), i, 100*i)
				if err := n.Put(ctx(t), key, want); err != nil {
					t.Error(err)
				}
				if got, err := n.Value(ctx(t), key); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s: %d bytes, %v", key, len(got), err)
				}
			}
		})
	}
	wg.Wait()
	if objects := d.metric("jbof_kv_objects"); objects != 10*hosts {
		t.Errorf("%v keys, want %d", objects, 10*hosts)
	}
}

// TestReloadsUnderLoadOfKeys: another namespace of keys comes and goes, with commands to it under way; the one that stays does not
// notice.
func TestReloadsUnderLoadOfKeys(t *testing.T) {
	t.Parallel()
	one := kvSetup("  - {name: ssd0, backend: mem, size: 256MiB}\n")
	two := one
	two.subsystems += "      - {nsid: 3, ssd: ssd0, size: 64MiB, type: kv}\n"
	d := start(t, two)
	c := d.connect(d.options(hostA, nqnA))
	v := startKVVictim(t, openKV(t, c, 2), 4)
	defer v.end()
	n := openKV(t, c, 3)
	var stop atomic.Bool
	var others sync.WaitGroup
	var served, gone atomic.Int64
	for w := range 4 {
		others.Go(func() {
			for i := 0; !stop.Load(); i++ {
				key := fmt.Appendf(nil, "%d %d", w, i%100)
				err := n.Put(ctx(t), key, value(string(key), 1, 10_000))
				if err == nil {
					_, err = n.Value(ctx(t), key)
				}
				var st *client.StatusError
				switch {
				case err == nil:
					served.Add(1)
				case errors.As(err, &st) && (st.Status.Code() == nvme.InvalidNamespaceOrFormat || st.Status.Code() == nvme.NamespaceNotReady):
					gone.Add(1)
				default:
					t.Errorf("a namespace that comes and goes: %v", err)
					return
				}
			}
		})
	}
	for range 3 {
		for _, x := range []struct {
			conf  setup
			count *atomic.Int64
		}{{one, &gone}, {two, &served}} {
			if !d.reload(x.conf) {
				t.Fatal("the reload fails")
			}
			from := x.count.Load()
			eventually(t, "commands see the change", func() bool { return t.Failed() || x.count.Load() > from+10 })
			v.progress(5)
		}
	}
	stop.Store(true)
	others.Wait()
}

// TestAStoreOfAnotherSizeIsNotTouched: with another size in the configuration the daemon says so, and with the old
// one all is as before.
func TestAStoreOfAnotherSizeIsNotTouched(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	right := kvSetup(fileSSD)
	d := start(t, right)
	d.workers = 8
	c := d.connect(d.options(hostA, nqnA))
	want := value("k", 1, 5000)
	if err := openKV(t, c, 2).Put(ctx(t), []byte("k"), want); err != nil {
		t.Fatal(err)
	}
	for _, size := range []string{"64MiB", "100MiB"} {
		d.term()
		other := right
		other.subsystems = strings.Replace(right.subsystems, "96MiB", size, 1)
		d.write(other)
		d.spawn()
		select {
		case <-d.exited:
			if d.cmd.ProcessState.Success() {
				t.Errorf("%s: the daemon ends as if all was well", size)
			}
		case <-time.After(wait):
			t.Fatalf("%s: the daemon starts", size)
		}
		if len(d.log.find("96MiB", size)) == 0 {
			t.Errorf("the log does not name both sizes, 96MiB and %s:\n%s", size, d.log.tail(1000))
		}
		d.write(right)
		d.launch()
		if got, err := openKV(t, c, 2).Value(ctx(t), []byte("k")); err != nil || !bytes.Equal(got, want) {
			t.Errorf("after a start with %s: %d bytes, %v", size, len(got), err)
		}
	}
}

// TestKeysWithoutDurability survive all but a loss of power.
func TestKeysWithoutDurability(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	s := kvSetup(fileSSD)
	s.subsystems = strings.Replace(s.subsystems, "type: kv}", "type: kv, kv: {durability: none}}", 1)
	d := start(t, s)
	d.workers = 8
	n := openKV(t, d.connect(d.options(hostA, nqnA)), 2)
	rng := rand.New(rand.NewPCG(random(t).Uint64(), 1))
	have := map[string]int{}
	for round := range 3 {
		for i := range 300 {
			key := fmt.Sprint(rng.IntN(200))
			if err := n.Put(ctx(t), []byte(key), value(key, 1000*round+i, 1000)); err != nil {
				t.Fatal(err)
			}
			have[key] = 1000*round + i
		}
		if round == 0 {
			d.term()
		} else {
			d.kill()
		}
		d.launch()
		for key, version := range have {
			if got, err := n.Value(ctx(t), []byte(key)); err != nil || !bytes.Equal(got, value(key, version, 1000)) {
				t.Fatalf("round %d: %s: %d bytes, %v", round, key, len(got), err)
			}
		}
	}
}

// TestTwoDaemonsOnOneDrive: the second one does not get it, and the keys of the first one are not harmed.
func TestTwoDaemonsOnOneDrive(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	d := start(t, kvSetup(fileSSD))
	d.workers = 8
	n := openKV(t, d.connect(d.options(hostA, nqnA)), 2)
	v := startKVVictim(t, n, 2)
	defer v.end()
	second := newDaemon(t, kvSetup(strings.ReplaceAll(fileSSD, "@DIR@", d.dir)))
	second.spawn()
	eventually(t, "the second daemon has ended", func() bool { return !second.running() })
	if second.cmd.ProcessState.Success() || len(second.log.find("ssd0.img", "in use")) == 0 {
		t.Errorf("the second daemon ends with %v and says %s", second.cmd.ProcessState, second.log.tail(1000))
	}
	v.progress(20)
	v.end()
	d.kill()
	d.launch()
	v = startKVVictim(t, n, 2)
	v.progress(20)
	v.end()
}

// TestKeysOnADriveOfLongBlocks: a block device of 4 KiB blocks, through a stop and a kill -9.
func TestKeysOnADriveOfLongBlocks(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	backing := filepath.Join(t.TempDir(), "backing")
	if err := errors.Join(os.WriteFile(backing, nil, 0o600), os.Truncate(backing, 128<<20)); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", "--find", "--show", "--sector-size", "4096", backing).CombinedOutput()
	if err != nil {
		t.Skipf("this machine lacks loop devices or root: losetup: %v %s", err, out)
	}
	dev := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", dev).CombinedOutput(); err != nil {
			t.Errorf("losetup --detach %s: %v %s", dev, err, out)
		}
	})
	d := start(t, kvSetup("  - {name: ssd0, backend: file, path: "+dev+"}\n"))
	d.workers = 8
	if len(d.log.find("drive opened", "block_size=4096")) == 0 {
		t.Fatal("its blocks are not of 4 KiB")
	}
	n := openKV(t, d.connect(d.options(hostA, nqnA)), 2)
	for round, stop := range []func(){func() { d.term() }, d.kill, d.kill} {
		var wg sync.WaitGroup
		each := func(do func(key string, want []byte) error) {
			t.Helper()
			for w := range 8 {
				wg.Go(func() {
					for i := range 40 {
						key := fmt.Sprint(w, "-", i)
						if err := do(key, value(key, round, 150*i)); err != nil {
							t.Errorf("round %d: %s: %v", round, key, err)
						}
					}
				})
			}
			wg.Wait()
		}
		each(func(key string, want []byte) error { return n.Put(ctx(t), []byte(key), want) })
		stop()
		d.launch()
		each(func(key string, want []byte) error {
			got, err := n.Value(ctx(t), []byte(key))
			if err == nil && !bytes.Equal(got, want) {
				err = fmt.Errorf("%d bytes, want the %d that were put", len(got), len(want))
			}
			return err
		})
	}
}
