package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/units"
)

// dataSubsystem has namespaces of each block size on a file, in memory, and on a file without io_uring.
const (
	dataSSDs = fileSSD + "  - {name: ssd1, backend: mem, size: 128MiB}\n" +
		"  - {name: ssd2, backend: file, path: \"@DIR@/ssd2.img\", size: 64MiB, create: true, engine: threads}\n"
	dataSubsystem = `  - nqn: nqn.2026-11.example.jbofd:a
    allow_any_host: true
    namespaces:
      - {nsid: 1, ssd: ssd0, size: 32MiB, block_size: 512}
      - {nsid: 2, ssd: ssd0, size: 32MiB, block_size: 4096}
      - {nsid: 3, ssd: ssd1, size: 32MiB, block_size: 512}
      - {nsid: 4, ssd: ssd1, size: 32MiB, block_size: 4096}
      - {nsid: 5, ssd: ssd2, size: 32MiB, block_size: 512}
`
)

// TestDataIsKept compares every command that reads or changes data with a model in memory. It covers sizes, offsets,
// block sizes, digests, drives and transfer methods (in the capsule, after R2Ts, in several H2CData).
func TestDataIsKept(t *testing.T) {
	t.Parallel()
	d := start(t, setup{ssds: dataSSDs, subsystems: dataSubsystem})
	d.laneBytes = 3 * 4 * 128 << 10
	for _, digests := range []bool{false, true} {
		if digests && *rdmaIP != "" {
			continue // the fabric has its own checksums
		}
		o := d.options(hostA, nqnA)
		o.HeaderDigest, o.DataDigest = digests, digests
		o.Queues = 3
		c := d.connect(o)
		for nsid := uint32(1); nsid <= 5; nsid++ {
			t.Run(fmt.Sprintf("digests=%t/nsid=%d", digests, nsid), func(t *testing.T) {
				rng := random(t)
				n := open(t, c, nsid)
				bs := n.BlockSize()
				image := make([]byte, n.Size())
				if _, err := n.ReadAt(ctx(t), image, 0); err != nil {
					t.Fatal(err)
				}
				buf := make([]byte, 4<<20)
				// First every special combination of size and offset, then random ones.
				sizes := []int{bs, 2 * bs, 4096, 8192 - bs, 8192, 8192 + bs, 16 << 10, 128 << 10, 1<<20 - bs, 1 << 20,
					1<<20 + bs, 3 << 20}
				for i := range 120 {
					size, off := sizes[i%len(sizes)], rng.Int64N(n.Size()/int64(bs))*int64(bs)
					switch {
					case i < len(sizes):
						off = 0
					case i < 2*len(sizes):
						off = n.Size() - int64(max(size, bs))
					case i%3 == 0:
						size = (1 + rng.IntN(64)) * bs
					}
					size = max(size, bs)
					off = min(off, n.Size()-int64(size))
					p, place := buf[:size], image[off:off+int64(size)]
					switch rng.IntN(8) {
					case 0, 1, 2, 3:
						fill(p, off, rng.Uint64())
						flags := client.WriteFlags(0)
						if rng.IntN(3) == 0 {
							flags = client.FUA
						}
						if _, err := n.WriteAt(ctx(t), p, off, flags); err != nil {
							t.Fatalf("write %d at %d: %v", size, off, err)
						}
						copy(place, p)
					case 4:
						flags := client.WriteFlags(0)
						if rng.IntN(2) == 0 {
							flags = client.Deallocate
						}
						if err := n.WriteZeroes(ctx(t), off, int64(size), flags); err != nil {
							t.Fatalf("zeroes %d at %d: %v", size, off, err)
						}
						clear(place)
					case 5:
						if !n.Info().DeallocatedReadsZero {
							continue
						}
						second := client.Range{Offset: 0, Length: int64(bs)}
						if err := n.Deallocate(ctx(t), client.Range{Offset: off, Length: int64(size)},
							second); err != nil {
							t.Fatalf("deallocate %d at %d: %v", size, off, err)
						}
						clear(place)
						clear(image[:bs])
					case 6:
						copy(p, place)
						if err := n.Compare(ctx(t), p, off); err != nil {
							t.Fatalf("compare %d at %d: %v", size, off, err)
						}
						p[rng.IntN(size)] ^= 1
						if err := n.Compare(ctx(t), p, off); !errors.Is(err, client.ErrCompareFailed) {
							t.Fatalf("compare of other data: %v", err)
						}
					case 7:
						if err := n.Verify(ctx(t), off, int64(size)); err != nil {
							t.Fatalf("verify %d at %d: %v", size, off, err)
						}
						if err := n.Flush(ctx(t)); err != nil {
							t.Fatal(err)
						}
					}
					if _, err := n.ReadAt(ctx(t), p, off); err != nil {
						t.Fatalf("read %d at %d: %v", size, off, err)
					}
					if !bytes.Equal(p, place) {
						t.Fatalf("step %d: %d bytes at %d differ", i, size, off)
					}
				}
				for off := int64(0); off < n.Size(); off += int64(len(buf)) {
					if _, err := n.ReadAt(ctx(t), buf, off); err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(buf, image[off:off+int64(len(buf))]) {
						t.Fatalf("in the end the namespace differs from the model behind %d", off)
					}
				}
			})
		}
	}
}

// TestCompareAndWriteLosesNoUpdate: two hosts increment a counter in one sector by fused Compare and Write. Small pairs
// travel in their capsules, large ones after R2Ts.
func TestCompareAndWriteLosesNoUpdate(t *testing.T) {
	t.Parallel()
	d := start(t, setup{ssds: dataSSDs, subsystems: dataSubsystem})
	d.laneBytes = 3 * 4 * 128 << 10
	for _, x := range []struct {
		nsid uint32
		size int
	}{{1, 512}, {3, 512}, {1, 16 << 10}, {3, 16 << 10}, {4, 64 << 10}, {5, 16 << 10}} {
		t.Run(fmt.Sprintf("nsid=%d/size=%d", x.nsid, x.size), func(t *testing.T) {
			n := d.namespace(d.options(hostA, nqnA), x.nsid)
			if err := n.WriteZeroes(ctx(t), 1<<20, int64(x.size), 0); err != nil {
				t.Fatal(err)
			}
			const each = 100
			var wg sync.WaitGroup
			for _, host := range []string{hostA, hostB} {
				o := d.options(host, nqnA)
				o.Queues = 2
				n := open(t, d.connect(o), x.nsid)
				for range 2 {
					wg.Go(func() {
						old, next := make([]byte, x.size), make([]byte, x.size)
						for done := 0; done < each; {
							if _, err := n.ReadAt(ctx(t), old, 1<<20); err != nil {
								t.Error(err)
								return
							}
							copy(next, old)
							// The whole range contains the count, so that a torn write is detected.
							v := binary.LittleEndian.Uint64(old) + 1
							for i := 0; i < x.size; i += 8 {
								if binary.LittleEndian.Uint64(old[i:]) != v-1 {
									t.Errorf("at %d of the range stands %d, at its beginning %d", i,
										binary.LittleEndian.Uint64(old[i:]), v-1)
									return
								}
								binary.LittleEndian.PutUint64(next[i:], v)
							}
							switch err := n.CompareAndWrite(ctx(t), old, next, 1<<20); {
							case err == nil:
								done++
							case !errors.Is(err, client.ErrCompareFailed):
								t.Error(err)
								return
							}
						}
					})
				}
			}
			wg.Wait()
			if t.Failed() {
				return
			}
			p := make([]byte, x.size)
			if _, err := n.ReadAt(ctx(t), p, 1<<20); err != nil {
				t.Fatal(err)
			}
			if v := binary.LittleEndian.Uint64(p); v != 4*each {
				t.Errorf("counted to %d with %d updates", v, 4*each)
			}
		})
	}
}

// TestAQueuedCommandIsAborted, but a command at the drive is not. Each is completed once, and the drive never receives
// an aborted command. The drive and the policy admit 256 commands at a time, so further commands are queued.
func TestAQueuedCommandIsAborted(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.ssds = "  - {name: ssd0, backend: mem, size: 128MiB, policy: fifo, fault: {delay: 2s, delay_probability: 1}}\n"
	d := start(t, s)
	admin, io := d.rawQueue(hostA, nqnA, 0, 128)
	_, filler := d.rawQueue(hostB, nqnA, 0, 128)
	var third *rawHost
	_, third = d.rawQueue(hostB, nqnA, 0, 128)
	batch := func(h *rawHost) {
		var p []byte
		for i := range 120 {
			p = append(p, h.capsule(rw(nvme.CmdWrite, uint16(i), units.LBA(i), 1), make([]byte, 512), 0)...)
		}
		h.send(p)
	}
	batch(filler)
	batch(third)
	eventually(t, "the first commands are with the drive", func() bool { return d.metric("jbof_ssd_io_now") == 240 })
	batch(io)
	eventually(t, "the others are queued", func() bool { return d.metric("jbof_ssd_io_queued") == 360-256 })
	var aborted []uint16
	for _, cid := range []uint16{100, 118, 119, 0, 500} {
		var e nvme.SQE
		e.SetOpcode(nvme.AdminAbort)
		e.SetCID(7)
		e.Abort().SetSQID(1)
		e.Abort().SetCID(cid)
		c := admin.do(e)
		if !c.Status().OK() {
			t.Fatalf("Abort: %v", c.Status())
		}
		want := uint32(0)
		if cid == 0 || cid == 500 { // one is at the drive, the other does not exist
			want = nvme.AbortNotDone
		} else {
			aborted = append(aborted, cid)
		}
		if c.DW0() != want {
			t.Errorf("Abort of command %d: DW0 %d, want %d", cid, c.DW0(), want)
		}
	}
	seen := map[uint16]nvme.Status{}
	for range 120 {
		c := io.response()
		if _, twice := seen[c.CID()]; twice {
			t.Fatalf("command %d was answered twice", c.CID())
		}
		seen[c.CID()] = c.Status()
	}
	for cid, st := range seen {
		want := nvme.Success
		for _, a := range aborted {
			if a == cid {
				want = nvme.AbortRequested
			}
		}
		if st.Code() != want {
			t.Errorf("command %d: %v, want %v", cid, st, want)
		}
	}
	if n := d.metric("jbof_ssd_aborted_total"); n != float64(len(aborted)) {
		t.Errorf("%v aborted commands are counted, want %d", n, len(aborted))
	}
	eventually(t, "the drive has done all but the aborted",
		func() bool { return d.metric("jbof_ssd_writes_completed_total") == 360-float64(len(aborted)) })
}

// TestAHostThatLeavesItsCommandIsFree: when its context ends, the caller gets its buffer back at once, whatever the
// state of the drive.
func TestAHostThatLeavesItsCommandIsFree(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.ssds = "  - {name: ssd0, backend: mem, size: 128MiB, fault: {delay: 1s, delay_probability: 1}}\n"
	d := start(t, s)
	n := d.namespace(d.options(hostA, nqnA), 1)
	c, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() {
		_, err := n.ReadAt(c, make([]byte, 4096), 0)
		done <- err
	}()
	eventually(t, "the read is with the drive", func() bool { return d.metric("jbof_ssd_io_now") == 1 })
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := n.ReadAt(ctx(t), make([]byte, 4096), 0); err != nil {
		t.Error(err)
	}
}

// TestMoreCommandsThanTheQueueHolds: they end the connection that sends them, and no other.
func TestMoreCommandsThanTheQueueHolds(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.ssds = "  - {name: ssd0, backend: mem, size: 128MiB, fault: {delay: 300ms, delay_probability: 1}}\n"
	d := start(t, s)
	n := d.namespace(d.options(hostA, nqnA), 1)
	_, io := d.rawQueue(hostB, nqnA, 0, 8)
	var p []byte
	for i := range 40 {
		p = append(p, io.capsule(rw(nvme.CmdRead, uint16(i), 0, 1), nil, 512)...)
	}
	io.send(p)
	term := io.ended()
	io.close()
	if term == nil {
		t.Error("closed without a TermReq")
	}
	if _, err := n.ReadAt(ctx(t), make([]byte, 4096), 0); err != nil {
		t.Error(err)
	}
}

// TestADeepQueueIsServed completely at the maximum depth that the target announces.
func TestADeepQueueIsServed(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	o := d.options(hostA, nqnA)
	o.QPairs = 1
	c := d.connect(o)
	q, err := c.OpenQPair(ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = q.Close() }()
	if q.Depth() != 128 {
		t.Errorf("queue depth %d, want 128", q.Depth())
	}
	cmds := make([]client.Command, q.Depth())
	comps := make([]client.Completion, len(cmds))
	for round := range 50 {
		for i := range cmds {
			op, data := uint8(client.OpWrite), cmds[i].Data
			if data == nil {
				data = make([]byte, 4096)
			}
			if round%2 == 1 {
				op = client.OpRead
			}
			client.SetRW(&cmds[i], op, 1, uint64(i*8), 8)
			cmds[i].Data = data
		}
		if n, err := q.Submit(cmds); n != len(cmds) || err != nil {
			t.Fatal(n, err)
		}
		for got := 0; got < len(cmds); {
			n, err := q.Poll(comps, wait)
			if err != nil || n == 0 {
				t.Fatalf("round %d: %d of %d answered, %v", round, got, len(cmds), err)
			}
			for _, c := range comps[:n] {
				if !c.Status.OK() {
					t.Fatal(c.Status)
				}
			}
			got += n
		}
	}
}

// TestInvalidCommandsGetTheirStatus: each has the status that the specification requires.
func TestInvalidCommandsGetTheirStatus(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	_, io := d.rawQueue(hostA, nqnA, 0, 32)
	with := func(e nvme.SQE, f func(e *nvme.SQE)) nvme.SQE { f(&e); return e }
	last := units.LBA(64<<20/512 - 1)
	for _, c := range []struct {
		name  string
		frame []byte
		want  nvme.Status
		dnr   bool
	}{
		{"read beyond the end", io.capsule(rw(nvme.CmdRead, 1, last, 2), nil, 1024), nvme.LBAOutOfRange, true},
		{"LBA overflow", io.capsule(rw(nvme.CmdRead, 1, ^units.LBA(0), 2), nil, 1024), nvme.LBAOutOfRange, true},
		{"no namespace", io.capsule(with(rw(nvme.CmdRead, 1, 0, 1), func(e *nvme.SQE) { e.SetNSID(9) }), nil, 512),
			nvme.InvalidNamespaceOrFormat, true},
		{"namespace 0", io.capsule(with(rw(nvme.CmdRead, 1, 0, 1), func(e *nvme.SQE) { e.SetNSID(0) }), nil, 512),
			nvme.InvalidNamespaceOrFormat, true},
		{"all namespaces", io.capsule(with(rw(nvme.CmdRead, 1, 0, 1),
			func(e *nvme.SQE) { e.SetNSID(nvme.NSIDBroadcast) }), nil, 512), nvme.InvalidNamespaceOrFormat, true},
		{"unknown opcode", io.capsule(rw(0x7e, 1, 0, 1), nil, 512), nvme.InvalidOpcode, true},
		{"more than MDTS", io.capsule(rw(nvme.CmdRead, 1, 0, 4096), nil, 2<<20), nvme.InvalidField, true},
		{"SGL too short", io.capsule(rw(nvme.CmdRead, 1, 0, 2), nil, 512), nvme.DataSGLLengthInvalid, true},
		{"second half alone", io.capsule(with(rw(nvme.CmdWrite, 1, 0, 1),
			func(e *nvme.SQE) { e.SetFuse(nvme.FuseSecond) }), make([]byte, 512), 0), nvme.AbortedMissingFused, true},
		{"the last block", io.capsule(rw(nvme.CmdWrite, 1, last, 1), make([]byte, 512), 0), nvme.Success, false},
		{"zeroes up to the last block", io.capsule(rw(nvme.CmdWriteZeroes, 1, last, 1), nil, 0), nvme.Success, false},
	} {
		io.send(c.frame)
		if r := io.response(); r.Status().Code() != c.want || r.Status().DNR() != c.dnr {
			t.Errorf("%s: %v, want %v with DNR %t", c.name, r.Status(), c.want, c.dnr)
		}
	}
}
