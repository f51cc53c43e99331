package partition

import (
	"encoding/binary"
	"strings"
	"testing"
	"time"

	"jbofd/internal/buildtags"
	"jbofd/internal/kvstore"
	"jbofd/internal/lab"
	"jbofd/internal/ssd"
)

// simHost is a Sink that counts what has ended.
type simHost struct{ ended int }

func (h *simHost) KVDone(*Request) bool { h.ended++; return false }
func (h *simHost) Kick()                {}

// simulated opens a store with a long checkpoint on a simulated drive: its table has a segment for each key.
func simulated(t *testing.T, told func(written, of int64)) (*lab.Sim, *lab.Drive, *Partition) {
	t.Helper()
	if buildtags.Race {
		t.Skip("one goroutine, and 50,000 keys; the builds without the race detector run it")
	}
	const size, keys = 24 << 20, 50_000
	sim, disk, p := onDisk(t, size, size, func(c *Config) {
		c.Closing, c.Store.KeysPerSegment = told, 1
		c.Store.CheckpointBytes = size // none before the last one, which would then have only what has changed since
	})
	h := &simHost{}
	reqs := make([]Request, 200)
	for key := 0; key < keys; key += len(reqs) {
		var b Batch
		for i := range reqs {
			reqs[i] = Request{Op: kvstore.Put, KeyLen: 16, Sink: h, Tenant: 1}
			binary.LittleEndian.PutUint64(reqs[i].Key[:], uint64(key+i))
			b.Add(&reqs[i])
		}
		p.Submit(&b)
		if !sim.Run(sim.Now()+1e12, func() bool { return h.ended == key+len(reqs) }) {
			t.Fatal("the requests do not end")
		}
	}
	if !sim.Run(sim.Now()+1e12, p.Idle) {
		t.Fatal("the store does not come to rest")
	}
	return sim, disk, p
}

// TestALongCheckpointHasTimeForItsBytes: how long a store may take for its last checkpoint follows what it has written
// of it.
func TestALongCheckpointHasTimeForItsBytes(t *testing.T) {
	const patience = 2 * time.Millisecond
	for _, c := range []struct {
		name    string
		sharing int
		// rate is how many bytes a second the drive writes, at least, and stuck is after how many writes it answers no
		// more.
		rate   int64
		stuck  int
		closes bool
	}{
		{name: "fast enough", rate: MinCheckpointRate * 3 / 2, closes: true},
		{name: "too slow", rate: MinCheckpointRate / 2},
		{name: "too slow for one, fast enough for three", rate: MinCheckpointRate / 2, sharing: 3, closes: true},
		{name: "stuck", rate: MinCheckpointRate * 3 / 2, stuck: 4},
		{name: "stuck from the first write on", rate: MinCheckpointRate, stuck: 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			sim, disk, p := simulated(t, nil)
			writes, written := 0, int64(0)
			disk.Hold = func(r *ssd.Request) int64 {
				if r.Op != ssd.Write {
					return 0
				}
				writes++
				if c.stuck > 0 && writes >= c.stuck {
					return int64(time.Hour)
				}
				written += r.Len
				return r.Len*1e9/c.rate - 70e3 // besides the drive's own 5 to 65 µs
			}
			bytes := p.LastCheckpointBytes()
			if bytes < 200e3 {
				t.Fatalf("the checkpoint has only %d bytes", bytes)
			}
			began := sim.Now()
			err := p.CloseWith(CloseOptions{Patience: patience, Sharing: c.sharing})
			took := time.Duration(sim.Now() - began)
			t.Logf("%d of %d bytes in %v: %v", written, bytes, took, err)
			most := patience + time.Duration(int64(max(c.sharing, 1))*written*1e9/MinCheckpointRate) + 2*takeOutTimeout
			if (err == nil) != c.closes || took > most {
				t.Errorf("%v in %v, want %v at most", err, took, most)
			}
			if err != nil && !strings.Contains(err.Error(), "the next start replays the log") {
				t.Error(err)
			}
			disk.Hold = nil
			sim.Run(sim.Now()+2*int64(time.Hour), func() bool { return len(disk.Flights) == 0 })
		})
	}
}

// TestALongCheckpointIsReported, every few seconds, with what is written and how much there is.
func TestALongCheckpointIsReported(t *testing.T) {
	var all [][2]int64
	sim, disk, p := simulated(t, func(written, of int64) { all = append(all, [2]int64{written, of}) })
	bytes := p.LastCheckpointBytes()
	disk.Hold = func(*ssd.Request) int64 { return int64(time.Second) }
	began := sim.Now()
	if err := p.Close(time.Minute); err != nil {
		t.Fatal(err)
	}
	if want := int((sim.Now() - began) / int64(closingEvery)); len(all) < want-1 || len(all) > want+1 || want < 2 {
		t.Errorf("%d reports, want %d", len(all), want)
	}
	for i, r := range all {
		if r[0] <= 0 || r[0] > r[1] || i > 0 && r[0] <= all[i-1][0] || r[1] < bytes || r[1] > bytes+bytes/4 {
			t.Errorf("report %d: %d of %d bytes; the checkpoint has %d", i, r[0], r[1], bytes)
		}
	}
}
