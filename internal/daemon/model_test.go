package daemon

import (
	"bytes"
	"testing"
	"time"
)

// Emulated drives store data and have the latency of the drive that they emulate.
func TestEmulatedDrivesServe(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{
		"{name: flash0, backend: model, size: 64MiB}",
		"{name: flash1, backend: model, size: 16MiB, preset: dct983, condition: fragmented}",
		"{name: xp0, backend: model, size: 8GiB, preset: p4800x, condition: empty}",
	}, []string{"{nsid: 1, ssd: flash0, size: 32MiB}", "{nsid: 2, ssd: flash1, size: 4MiB}",
		"{nsid: 3, ssd: xp0, size: 4GiB}"})
	n := w.mustStart()
	c := n.connect()
	for nsid, least := range map[uint32]time.Duration{1: 70 * time.Microsecond, 2: 70 * time.Microsecond,
		3: 9 * time.Microsecond} {
		ns, err := c.Namespace(t.Context(), nsid)
		if err != nil {
			t.Fatal(err)
		}
		off := ns.Size() - 1<<20
		data, got := bytes.Repeat([]byte{byte(nsid), 2, 3, 5}, 64<<10), make([]byte, 256<<10)
		if _, err := ns.WriteAt(t.Context(), data, off, 0); err != nil {
			t.Fatal(err)
		}
		if _, err := ns.ReadAt(t.Context(), got, off); err != nil || !bytes.Equal(got, data) {
			t.Errorf("namespace %d reads back other data, %v", nsid, err)
		}
		const reads = 50
		start := time.Now()
		for i := range int64(reads) { // written by no host, only by preconditioning
			if _, err := ns.ReadAt(t.Context(), got[:4096], i*16<<10); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(start); took < reads*least {
			t.Errorf("namespace %d: a read took %v, want %v at least", nsid, took/reads, least)
		}
	}
}
