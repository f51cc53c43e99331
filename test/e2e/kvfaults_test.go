package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"jbofd/client"
	"jbofd/client/kv"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// kvCommand returns a command to namespace 2; n is the length of the value or of the buffer.
func kvCommand(opcode uint8, key []byte, n int) (e nvme.SQE) {
	e.SetOpcode(opcode)
	e.SetNSID(2)
	e.KV().SetKey(key)
	e.KV().SetLenBytes(uint32(n))
	return e
}

// TestRawKVCommandsGetTheirStatus sends commands byte by byte: keys and values of valid and invalid lengths, buffers
// that are too short, and Lists from the middle.
func TestRawKVCommandsGetTheirStatus(t *testing.T) {
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
			if have := min(n, room); !st.OK() || int(dw0) != n || !bytes.Equal(got[:have], v[:have]) ||
				bytes.Count(got[have:], []byte{0}) != room-have {
				t.Errorf("retrieve of %d bytes into %d: %v, DW0 %d, or other data", n, room, st, dw0)
			}
		}
	}
	if _, st := do(kvCommand(nvme.CmdKVStore, []byte("long"), 1<<20+1),
		make([]byte, 1<<20+1)); st != nvme.InvalidValueSize {
		t.Errorf("store of 1 MiB and a byte: %v", st)
	}
	for _, op := range []uint8{nvme.CmdKVStore, nvme.CmdKVRetrieve, nvme.CmdKVDelete, nvme.CmdKVExist, nvme.CmdKVList} {
		for _, n := range []uint8{0, 17, 255} {
			if n == 0 && op == nvme.CmdKVList {
				continue // start at the first key
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
	// Lists of about two keys, each starting at the last key of the previous one.
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
	// A List from the middle returns the keys behind the given one, also if that key was deleted.
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

// kvVictim is a host that puts keys, reads them and compares, until it is stopped.
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

// progress waits for n further rounds.
func (v *kvVictim) progress(n int64) {
	v.t.Helper()
	from := v.done.Load()
	eventually(v.t, "others go on", func() bool { return v.t.Failed() || v.done.Load() >= from+n })
}

func (v *kvVictim) end() {
	v.stop.Store(true)
	v.wg.Wait()
}

// rawKVQueue is rawQueue for a host that has enabled all command sets.
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

// TestMisbehavingKVHostsHarmOnlyThemselves: transfers that stop in the middle, wrong lengths, random bytes, and
// responses that the host does not read.
func TestMisbehavingKVHostsHarmOnlyThemselves(t *testing.T) {
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
					e := kvCommand([]uint8{nvme.CmdKVStore, nvme.CmdKVRetrieve, nvme.CmdKVList, nvme.CmdKVExist,
						nvme.CmdFlush}[rng.IntN(5)], []byte{0xff, byte(i)}, rng.IntN(3000))
					for range 1 + rng.IntN(3) {
						e[4+rng.IntN(60)] ^= byte(1 << rng.IntN(8))
					}
					e.KV().SetKey([]byte{0xff, byte(i)}) // random puts do not touch the keys of other hosts
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

// TestManyKVHosts: many hosts connect at once, and the daemon releases all their resources.
func TestManyKVHosts(t *testing.T) {
	t.Parallel()
	s := kvSetup(memSSD)
	d := start(t, s)
	const hosts = 120 // each with two connections
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

// TestReloadsUnderKVLoad: reloads add and remove a key-value namespace while commands to it are in flight. The other
// namespace is not affected.
func TestReloadsUnderKVLoad(t *testing.T) {
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
				case errors.As(err, &st) &&
					(st.Status.Code() == nvme.InvalidNamespaceOrFormat || st.Status.Code() == nvme.NamespaceNotReady):
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

// TestKVWithoutDurability: keys survive everything except a loss of power.
func TestKVWithoutDurability(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	s := kvSetup(fileSSD)
	s.subsystems = strings.Replace(s.subsystems, "type: kv}", "type: kv, kv: {durability: none}}", 1)
	d := start(t, s)
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
