package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
)

// A stamped sector says which write it belongs to and proves that it is whole:
//
//	0..7 sector | 8..15 version | 16..507 noise | 508..511 CRC-32 of the rest
func stamp(s []byte, sector, version uint64) {
	fill(s, int64(sector), version)
	binary.LittleEndian.PutUint64(s, sector)
	binary.LittleEndian.PutUint64(s[8:], version)
	binary.LittleEndian.PutUint32(s[508:], crc32.ChecksumIEEE(s[:508]))
}

// versionOf returns a stamped sector's version; a sector of zeroes has version 0.
func versionOf(s []byte, sector uint64) (version uint64, err error) {
	if bytes.Count(s, []byte{0}) == len(s) {
		return 0, nil
	}
	if crc32.ChecksumIEEE(s[:508]) != binary.LittleEndian.Uint32(s[508:]) {
		return 0, fmt.Errorf("sector %d is torn", sector)
	}
	if got := binary.LittleEndian.Uint64(s); got != sector {
		return 0, fmt.Errorf("sector %d holds what was written to %d", sector, got)
	}
	return binary.LittleEndian.Uint64(s[8:]), nil
}

// journal is what a worker knows of its region. For each sector it holds the version last written and the minimum
// version that a read must return.
type journal struct {
	begun, durable []uint64
	// written holds the versions whose writes completed. They are durable after the next flush.
	written map[int]uint64
}

// check reads a region and compares it with the journal. Without a crash in between, every completed write must be
// there.
func (j *journal) check(t *testing.T, n *client.Namespace, first int) {
	t.Helper()
	p := make([]byte, 512*len(j.begun))
	if _, err := n.ReadAt(ctx(t), p, int64(first)*512); err != nil {
		t.Error(err)
		return
	}
	for i := range j.begun {
		v, err := versionOf(p[512*i:][:512], uint64(first+i))
		switch {
		case err != nil:
			t.Error(err)
		case v < j.durable[i]:
			t.Errorf("sector %d holds version %d, %d was durable", first+i, v, j.durable[i])
		case v > j.begun[i]:
			t.Errorf("sector %d holds version %d, only %d was begun", first+i, v, j.begun[i])
		}
	}
}

// TestNothingDurableIsLost: kill -9 under load, several times. Hosts reconnect and continue their I/O. Data that was
// flushed or written with FUA is there, and no sector is torn.
func TestNothingDurableIsLost(t *testing.T) {
	t.Parallel()
	d := start(t, setup{ssds: fileSSD, subsystems: openSubsystem})
	rng := random(t)
	const workers, sectors = 6, 1024
	var wg sync.WaitGroup
	var stop atomic.Bool
	var ops atomic.Int64
	journals := make([]*journal, workers)
	var hosts []*client.Controller
	for range 2 {
		o := d.options(hostA, nqnA)
		o.Queues = 2
		hosts = append(hosts, d.connect(o))
	}
	for w := range workers {
		n := open(t, hosts[w%2], 1)
		j := &journal{make([]uint64, sectors), make([]uint64, sectors), map[int]uint64{}}
		journals[w] = j
		luck := rand.New(rand.NewPCG(rng.Uint64(), uint64(w)))
		first := w * sectors
		wg.Go(func() {
			for version := uint64(1); !stop.Load(); version++ {
				k := 1 + luck.IntN(64)
				at := luck.IntN(sectors - k)
				p := make([]byte, 512*k)
				for i := range k {
					stamp(p[512*i:][:512], uint64(first+at+i), version)
					j.begun[at+i] = version
				}
				fua := luck.IntN(4) == 0
				flags := client.WriteFlags(0)
				if fua {
					flags = client.FUA
				}
				losses := hosts[w%2].Losses()
				if _, err := n.WriteAt(ctx(t), p, int64(first+at)*512, flags); err != nil {
					t.Errorf("worker %d: write: %v", w, err)
					return
				}
				for i := range k {
					j.written[at+i] = version
					if fua {
						j.durable[at+i] = version
					}
				}
				if luck.IntN(8) == 0 {
					covered := map[int]uint64{}
					for i, v := range j.written {
						covered[i] = v
					}
					if err := n.Flush(ctx(t)); err != nil {
						t.Errorf("worker %d: flush: %v", w, err)
						return
					}
					// A flush that was repeated on another connection does not cover writes from before the crash.
					if hosts[w%2].Losses() == losses {
						for i, v := range covered {
							j.durable[i] = max(j.durable[i], v)
						}
					}
					clear(j.written)
				}
				ops.Add(1)
			}
		})
	}
	const kills = 6
	for range kills {
		goal := ops.Load() + 100 + rng.Int64N(400)
		eventually(t, "I/O goes on", func() bool { return ops.Load() >= goal || t.Failed() })
		d.kill()
		d.launch()
	}
	goal := ops.Load() + 200
	eventually(t, "I/O goes on after the last kill", func() bool { return ops.Load() >= goal || t.Failed() })
	d.kill() // with outstanding I/O
	stop.Store(true)
	d.launch()
	wg.Wait()
	for i, h := range hosts {
		if n := h.Losses(); n != kills+1 {
			t.Logf("host %d lost its connection %d times in %d kills", i, n, kills+1)
		}
	}
	n := d.namespace(d.options(hostB, nqnA), 1)
	for w, j := range journals {
		j.check(t, n, w*sectors)
	}
	t.Logf("%d writes and %d kills", ops.Load(), kills+1)
}

// TestAHostGivesUpAtItsDeadline when the daemon does not come back, and returns the reason.
func TestAHostGivesUpAtItsDeadline(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	o := d.options(hostA, nqnA)
	o.CtrlLossTimeout = time.Second
	n := d.namespace(o, 1)
	d.kill()
	began := time.Now()
	_, err := n.ReadAt(ctx(t), make([]byte, 512), 0)
	if !errors.Is(err, client.ErrConnectionLost) {
		t.Errorf("%v, want ErrConnectionLost", err)
	}
	if took := time.Since(began); took < 700*time.Millisecond || took > 10*time.Second {
		t.Errorf("gave up after %v, its deadline is 1 s", took)
	}
}

// twoDrives has namespace 1 on ssd0, to which a test does damage, and namespace 2 on ssd1, which must not be affected.
const twoDrives = `  - nqn: nqn.2026-11.example.jbofd:a
    allow_any_host: true
    namespaces:
      - {nsid: 1, ssd: ssd0, size: 32MiB, block_size: 512}
      - {nsid: 2, ssd: ssd1, size: 32MiB, block_size: 512}
`

// statusOf returns the status in an error, or Success for nil.
func statusOf(t testing.TB, err error) nvme.Status {
	t.Helper()
	var st *client.StatusError
	switch {
	case err == nil:
		return nvme.Success
	case errors.As(err, &st):
		return st.Status
	}
	t.Fatalf("no status: %v", err)
	return 0
}

// TestErrorsOfADriveStayWithIt: commands to the drive fail with a media error, those to the other drive do not; metrics
// count the errors.
func TestErrorsOfADriveStayWithIt(t *testing.T) {
	t.Parallel()
	d := start(t, setup{subsystems: twoDrives,
		ssds: `  - {name: ssd0, backend: mem, size: 64MiB,
      fault: {seed: 3, read_error_probability: 0.5, write_error_probability: 0.5, flush_error_probability: 1.0}}
  - {name: ssd1, backend: mem, size: 64MiB}
`})
	c := d.connect(d.options(hostA, nqnA))
	bad, good := open(t, c, 1), open(t, c, 2)
	var reads, writes float64
	p := make([]byte, 4096)
	for i := range 200 {
		_, err := bad.WriteAt(ctx(t), p, int64(i)*4096, 0)
		switch st := statusOf(t, err); st.Code() {
		case nvme.Success:
		case nvme.WriteFault:
			writes++
		default:
			t.Fatalf("write: %v", st)
		}
		_, err = bad.ReadAt(ctx(t), p, int64(i)*4096)
		switch st := statusOf(t, err); st.Code() {
		case nvme.Success:
		case nvme.UnrecoveredReadError:
			reads++
		default:
			t.Fatalf("read: %v", st)
		}
		if _, err := good.WriteAt(ctx(t), p, int64(i)*4096, 0); err != nil {
			t.Fatalf("the other drive: %v", err)
		}
	}
	if st := statusOf(t, bad.Flush(ctx(t))); st.SCT() != nvme.SCTMedia {
		t.Errorf("flush: %v, want a media error", st)
	}
	if err := good.Flush(ctx(t)); err != nil {
		t.Errorf("the other drive: %v", err)
	}
	if reads < 50 || writes < 50 {
		t.Errorf("%v reads and %v writes of 200 failed, half should", reads, writes)
	}
	f := d.scrape()
	if n := sum(f["jbof_ssd_errors_total"], "ssd", "ssd0"); n != reads+writes+1 {
		t.Errorf("%v errors of the drive are counted, want %v", n, reads+writes+1)
	}
	if n := sum(f["jbof_ssd_errors_total"], "ssd", "ssd1"); n != 0 {
		t.Errorf("%v errors of the good drive are counted", n)
	}
	if n := sum(f["jbof_io_errors_total"], "tenant", hostA, "sct", "0x2"); n != reads+writes+1 {
		t.Errorf("%v media errors of the host are counted, want %v: %v", n, reads+writes+1, f["jbof_io_errors_total"])
	}
}

// TestAFullFileSystem: writes fail with Capacity Exceeded and are counted until there is space again. Reads, the other
// drive, and data already written are not affected.
func TestAFullFileSystem(t *testing.T) {
	t.Parallel()
	unshare, err := exec.LookPath("unshare")
	if err == nil {
		err = exec.Command(unshare, "-Urm", "sh", "-c", "mount -t tmpfs -o size=8m tmpfs /mnt").Run()
	}
	if err != nil {
		t.Skipf("no small file system to be had: unshare -Urm and mounting a tmpfs: %v", err)
	}
	d := newDaemon(t, setup{subsystems: twoDrives,
		ssds: `  - {name: ssd0, backend: file, path: "@DIR@/small/ssd0.img", size: 64MiB, create: true}
  - {name: ssd1, backend: mem, size: 64MiB}
`})
	small := filepath.Join(d.dir, "small")
	if err := os.Mkdir(small, 0o700); err != nil {
		t.Fatal(err)
	}
	d.prefix = []string{unshare, "-Urm", "sh", "-c",
		`mount -t tmpfs -o size=8m tmpfs "$0" && head -c 2097152 /dev/zero > "$0/ballast" && exec "$@"`, small}
	d.launch()
	c := d.connect(d.options(hostA, nqnA))
	full, good := open(t, c, 1), open(t, c, 2)
	p, q := make([]byte, 256<<10), make([]byte, 256<<10)
	written := int64(0)
	var st nvme.Status
	for ; written < full.Size() && st == nvme.Success; written += int64(len(p)) {
		fill(p, written, 1)
		_, err := full.WriteAt(ctx(t), p, written, 0)
		st = statusOf(t, err)
	}
	written -= int64(len(p))
	if st.Code() != nvme.CapacityExceeded {
		t.Fatalf("a file system of 8 MiB took %d bytes, then %v; want Capacity Exceeded", written, st)
	}
	for off := int64(0); off < written; off += int64(len(p)) {
		fill(p, off, 1)
		if _, err := full.ReadAt(ctx(t), q, off); err != nil || !bytes.Equal(p, q) {
			t.Fatalf("reading at %d: other data, or %v", off, err)
		}
	}
	if _, err := good.WriteAt(ctx(t), p, 0, 0); err != nil {
		t.Errorf("the other drive: %v", err)
	}
	if d.metric("jbof_ssd_no_space_errors_total", "ssd", "ssd0") == 0 {
		t.Error("not counted as want of space")
	}
	if n := strings.Count(d.log.String(), "no space left for the file of the drive"); n < 1 || n > 10 {
		t.Errorf("the full drive has left %d lines in the log", n)
	}
	// The file system is mounted in the daemon's namespace only; /proc gives access to it.
	if err := os.Remove(fmt.Sprintf("/proc/%d/root%s/ballast", d.cmd.Process.Pid, small)); err != nil {
		t.Fatal(err)
	}
	fill(p, written, 1)
	if _, err := full.WriteAt(ctx(t), p, written, 0); err != nil {
		t.Errorf("with room again: %v", err)
	}
	if code, body := d.get("/readyz"); code != 200 {
		t.Errorf("with room again /readyz is %d %s", code, body)
	}
}

// TestADriveThatVanishes: its commands fail, /readyz and jbof_ssd_up name the drive, and the other drive continues to
// serve.
func TestADriveThatVanishes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		harm func(path string) error
	}{
		{"truncated", func(p string) error { return os.Truncate(p, 1<<20) }},
		{"deleted", os.Remove},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d := start(t, setup{ssds: twoFiles, subsystems: twoDrives})
			cl := d.connect(d.options(hostA, nqnA))
			bad, good := open(t, cl, 1), open(t, cl, 2)
			p := make([]byte, 4096)
			for i := range int64(16) {
				if _, err := bad.WriteAt(ctx(t), p, i<<20, client.FUA); err != nil {
					t.Fatal(err)
				}
			}
			var stop atomic.Bool
			var wg sync.WaitGroup
			var ops atomic.Int64
			wg.Go(func() {
				for q := make([]byte, 4096); !stop.Load(); ops.Add(1) {
					if _, err := good.WriteAt(ctx(t), q, 0, 0); err != nil {
						t.Errorf("the other drive: %v", err)
						return
					}
				}
			})
			if err := c.harm(filepath.Join(d.dir, "ssd0.img")); err != nil {
				t.Fatal(err)
			}
			if c.name == "truncated" {
				if st := statusOf(t, second(bad.ReadAt(ctx(t), p, 16<<20))); st.SCT() != nvme.SCTMedia {
					t.Errorf("reading what is gone: %v, want a media error", st)
				}
			}
			eventually(t, "/readyz names the drive", func() bool {
				code, body := d.get("/readyz")
				return code == 503 && strings.Contains(body, "ssd0") && !strings.Contains(body, "ssd1")
			})
			if d.metric("jbof_ssd_up", "ssd", "ssd0") != 0 || d.metric("jbof_ssd_up", "ssd", "ssd1") != 1 {
				t.Error("jbof_ssd_up does not tell")
			}
			if code, _ := d.get("/healthz"); code != 200 {
				t.Errorf("/healthz is %d", code)
			}
			goal := ops.Load() + 100
			eventually(t, "the other drive goes on", func() bool { return ops.Load() >= goal || t.Failed() })
			stop.Store(true)
			wg.Wait()
		})
	}
}

func second[A, B any](_ A, b B) B { return b }

// TestASlowDriveDoesNotSlowItsNeighbour.
func TestASlowDriveDoesNotSlowItsNeighbour(t *testing.T) {
	t.Parallel()
	d := start(t, setup{subsystems: twoDrives,
		ssds: `  - {name: ssd0, backend: mem, size: 64MiB, fault: {delay: 1s, delay_probability: 1}}
  - {name: ssd1, backend: mem, size: 64MiB}
`})
	c := d.connect(d.options(hostA, nqnA))
	slow, fast := open(t, c, 1), open(t, c, 2)
	var wg sync.WaitGroup
	cx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	for range 32 {
		wg.Go(func() {
			if _, err := slow.ReadAt(cx, make([]byte, 4096), 0); err != nil {
				t.Error(err)
			}
		})
	}
	eventually(t, "the slow drive is busy", func() bool { return d.metric("jbof_ssd_io_now", "ssd", "ssd0") == 32 })
	var lat []time.Duration
	for range 200 {
		began := time.Now()
		if _, err := fast.ReadAt(ctx(t), make([]byte, 4096), 0); err != nil {
			t.Fatal(err)
		}
		lat = append(lat, time.Since(began))
	}
	slices.Sort(lat)
	if p99 := lat[len(lat)*99/100]; p99 > 200*time.Millisecond {
		t.Errorf("p99 %v at the fast drive beside one that takes 1 s", p99)
	}
	wg.Wait()
}
