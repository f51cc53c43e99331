package kvstore_test

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"testing"

	"jbofd/internal/kvstore"
)

// oldKey and oldValue are what testdata/version3.gz holds: a partition that a program of version 3 of the format has
// left when the power went.
func oldKey(i int) []byte { return fmt.Appendf(nil, "%x", i*7919) }

func oldValue(i, version int) []byte {
	n := []int{0, 1, 100, 256, 1000, 5000, 33000}[i%7]
	return bytes.Repeat(fmt.Appendf(nil, "%d.%d ", i, version), n/2+1)[:n]
}

// oldPartition opens it.
func oldPartition(t *testing.T) *model {
	t.Helper()
	r := newRig(t, 1, small(28))
	f, err := os.Open("testdata/version3.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	disk, err := io.ReadAll(z)
	if err != nil || int64(len(disk)) != r.cfg.PartitionBytes {
		t.Fatalf("%d bytes, %v", len(disk), err)
	}
	copy(r.dev.Durable, disk)
	copy(r.dev.Visible, disk)
	m := newModel(r, 1, func() int { return 0 })
	if err := r.open(); err != nil {
		t.Fatal(err)
	}
	return m
}

// TestAPartitionOfVersion3KeepsItsData through overwrites, splits, compaction, crashes and restarts. Its objects have
// version 1, and new ones have more.
func TestAPartitionOfVersion3KeepsItsData(t *testing.T) {
	m := oldPartition(t)
	now := make([]int, 300) // the version of the content of each key; 0: it does not exist
	given := make([]uint64, len(now))
	for i := range now {
		switch now[i] = 1; {
		case i%11 == 3:
			now[i] = 0
		case i%5 == 0:
			now[i] = 2
		}
		if now[i] > 0 {
			given[i] = 1
		}
	}
	last := uint64(1)
	do := func(i int, q kvstore.Request) kvstore.Reply {
		q.Key = oldKey(i)
		p := m.do(q)
		if p.Status == kvstore.OK && (q.Op == kvstore.Put || q.Op == kvstore.Delete) {
			if p.Version <= last {
				t.Fatalf("version %d was given after %d", p.Version, last)
			}
			last, given[i] = p.Version, p.Version
		}
		return p
	}
	buf := make([]byte, 64<<10)
	compare := func(when string) {
		t.Helper()
		m.settle()
		m.recount()
		for i := range now {
			p := do(i, kvstore.Request{Op: kvstore.Get, Value: buf})
			switch {
			case now[i] == 0 && p.Status == kvstore.NotFound:
			case now[i] == 0 || p.Status != kvstore.OK || p.Version != given[i] ||
				!bytes.Equal(buf[:p.ValueLen], oldValue(i, now[i])):
				t.Fatalf("%s: key %d: status %d, %d bytes, version %d, want content %d, version %d", when, i, p.Status,
					p.ValueLen, p.Version, now[i], given[i])
			}
		}
	}
	compare("opened")
	again := func() {
		t.Helper()
		if err := m.open(); err != nil {
			t.Fatal(err)
		}
	}
	m.stop()
	again()
	compare("opened again")
	for round := range 12 {
		for i := range now {
			if (i+round)%3 > 0 {
				continue
			}
			q := kvstore.Request{Op: kvstore.Put, Value: oldValue(i, round+3)}
			if i%16 == 5 {
				q = kvstore.Request{Op: kvstore.Delete}
			}
			switch p := do(i, q); {
			case q.Op == kvstore.Put && p.Status == kvstore.OK:
				now[i] = round + 3
			case q.Op == kvstore.Delete && (p.Status == kvstore.OK || p.Status == kvstore.NotFound && now[i] == 0):
				now[i] = 0
			default:
				t.Fatalf("op %d of key %d: status %d", q.Op, i, p.Status)
			}
		}
		compare("overwritten")
		m.settle()
		m.power = round%2 == 0
		if round == 8 {
			m.stop()
		}
		m.crash()
		again()
		compare("after a crash")
	}
	if st := m.s.Stats(); st.Damaged > 0 {
		t.Errorf("%+v", st)
	}
}

// TestOldValuesAreMoved: compaction moves values of version 3, and their keys keep their version.
func TestOldValuesAreMoved(t *testing.T) {
	m := oldPartition(t)
	// New keys fill the rest of the partition, and replace each other.
	moved := m.s.Stats().MovedBytes
	for n := 0; m.s.Stats().MovedBytes < moved+1<<20; n++ {
		if n == 20_000 {
			t.Fatalf("hardly anything is moved: %+v", m.s.Stats())
		}
		p := m.do(kvstore.Request{Op: kvstore.Put, Key: fmt.Appendf(nil, "new%d", n%700), Value: make([]byte, 900)})
		if p.Status != kvstore.OK {
			t.Fatalf("status %d", p.Status)
		}
	}
	m.settle()
	m.recount()
	buf := make([]byte, 64<<10)
	for i := range 300 {
		version := 1
		if i%5 == 0 {
			version = 2
		}
		p := m.do(kvstore.Request{Op: kvstore.Get, Key: oldKey(i), Value: buf})
		if i%11 == 3 && p.Status == kvstore.NotFound {
			continue
		}
		if p.Status != kvstore.OK || p.Version != 1 || !bytes.Equal(buf[:p.ValueLen], oldValue(i, version)) {
			t.Fatalf("key %d: status %d, %d bytes, version %d", i, p.Status, p.ValueLen, p.Version)
		}
	}
}
