package flash

import (
	"math/rand/v2"
	"testing"
)

// volatile returns an empty drive whose buffer loses its data with the power.
func volatile(t *testing.T, sizeBytes int64, c Condition) *Drive {
	t.Helper()
	cfg, err := Preset("sata", sizeBytes)
	if err != nil {
		t.Fatal(err)
	}
	d, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	d.Precondition(c)
	return d
}

// finish lets time pass until everything is done, and returns the completions by tag.
func finish(d *Drive, now int64) map[uint64]Completion {
	done := map[uint64]Completion{}
	for at, ok := d.NextEvent(); ok; at, ok = d.NextEvent() {
		now = max(now, at)
		for _, c := range d.Advance(now, nil) {
			done[c.Tag] = c
		}
	}
	return done
}

// TestAVolatileBufferIsFlushed: a flush, and a write with FUA, waits for the programs of what is in the buffer. Other
// writes, and both on a drive with capacitors, do not.
func TestAVolatileBufferIsFlushed(t *testing.T) {
	const write, fua, flush, early = 1, 2, 3, 4
	for _, c := range []struct {
		volatile bool
		bytes    int64
	}{{true, 4 << 10}, {true, 64 << 10}, {true, 1 << 20}, {false, 64 << 10}} {
		d := volatile(t, 256<<20, Clean)
		if !c.volatile {
			d.cfg.VolatileBuffer = false
		}
		d.Submit(0, Request{Op: Flush, Tag: early})
		d.Submit(0, Request{Op: Write, LenBytes: c.bytes, Tag: write})
		d.Submit(0, Request{Op: Write, OffsetBytes: 32 << 20, LenBytes: c.bytes, FUA: true, Tag: fua})
		d.Advance(0, nil)
		d.Submit(5*ms, Request{Op: Write, OffsetBytes: 64 << 20, LenBytes: c.bytes, Tag: 99})
		d.Submit(5*ms, Request{Op: Flush, Tag: flush})
		done := finish(d, 5*ms)
		if len(done) != 5 {
			t.Fatalf("%+v: %d commands end", c, len(done))
		}
		program := d.cfg.ProgramNS * (100 - d.cfg.JitterPercent) / 100
		if done[early].LatencyNS > 100_000 || done[write].LatencyNS > 3*ms {
			t.Errorf("%+v: a flush of nothing takes %d ns, a write %d", c, done[early].LatencyNS, done[write].LatencyNS)
		}
		for _, tag := range []uint64{fua, flush} {
			if got := done[tag].LatencyNS; got >= program != c.volatile {
				t.Errorf("%+v: command %d takes %d ns, a program %d", c, tag, got, program)
			}
		}
	}
}

// TestAFlushDoesNotWaitForWhatIsTrimmed: a large buffer holds more than the dies have queued, and loses it.
func TestAFlushDoesNotWaitForWhatIsTrimmed(t *testing.T) {
	d := volatile(t, 2<<30, Empty)
	const n = 6 << 20
	for i, op := range []Op{Write, Flush, Deallocate} {
		now := int64(i) * 2 * ms
		for at, ok := d.NextEvent(); ok && at <= now; at, ok = d.NextEvent() {
			d.Advance(at, nil)
		}
		d.Submit(now, Request{Op: op, LenBytes: n, Tag: uint64(i)})
	}
	if done := finish(d, 4*ms); len(done) != 3 || d.InFlight() != 0 {
		t.Errorf("%d commands end, %d do not", len(done), d.InFlight())
	}
}

// TestADurableCommandAlwaysEnds: whatever is written, trimmed and flushed at the same time.
func TestADurableCommandAlwaysEnds(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 40 {
		d := volatile(t, 256<<20, Fragmented)
		const n = 400
		now := int64(0)
		for tag := range uint64(n) {
			r := Request{Op: []Op{Write, Write, Flush, Deallocate, WriteZeroes, Read}[rng.IntN(6)], Tag: tag,
				FUA: rng.IntN(3) == 0}
			if r.Op != Flush { // in a small region, so that what is in the buffer is overwritten and trimmed
				r.OffsetBytes, r.LenBytes = rng.Int64N(2048)<<12, (1+rng.Int64N(256))<<12
			}
			now += rng.Int64N(100_000)
			for at, ok := d.NextEvent(); ok && at <= now; at, ok = d.NextEvent() {
				d.Advance(at, nil)
			}
			d.Submit(now, r)
		}
		finish(d, now)
		if d.InFlight() != 0 || len(d.durable.waits) != 0 || d.durable.programming != 0 {
			t.Fatalf("%d commands never end, %d of them wait for programs; %d slots are being programmed", d.InFlight(),
				len(d.durable.waits), d.durable.programming)
		}
	}
}

// TestPresetsHaveTheirRates: the rates of reads, and of sequential writes to a clean drive, are as far apart as those
// in the data sheets of such drives.
func TestPresetsHaveTheirRates(t *testing.T) {
	for _, c := range []struct {
		preset              string
		read4K, read, write float64 // thousand IOPS, MB/s, MB/s of sequential writes
	}{
		{"sata", 95, 490, 500},
		{"qlc", 280, 4250, 725},
		{"gen4", 1500, 6800, 2700},
		{"gen5", 1700, 11_200, 3150},
	} {
		small := &stream{op: Read, bytes: 4 << 10, depth: 512}
		run(t, preset(t, c.preset, 1<<30, Clean), 10*ms, 50*ms, small)
		within(t, c.preset+": 4 KiB reads, thousand IOPS", float64(small.ops)/50, c.read4K)
		large := &stream{op: Read, bytes: 128 << 10, depth: 64}
		run(t, preset(t, c.preset, 1<<30, Clean), 10*ms, 50*ms, large)
		within(t, c.preset+": 128 KiB reads, MB/s", large.mbps(50*ms), c.read)
		write := &stream{op: Write, bytes: 128 << 10, depth: 32, sequential: true}
		run(t, preset(t, c.preset, 1<<30, Clean), 50*ms, 100*ms, write)
		within(t, c.preset+": sequential writes, MB/s", write.mbps(100*ms), c.write)
	}
}
