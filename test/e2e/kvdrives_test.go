package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"jbofd/client/kv"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/nvme"
	"jbofd/internal/ssd/label"
)

// TestKVOnAFullFileSystem: writes fail while the drive's file system is full, existing values can be read, and writes
// succeed again as soon as there is space.
func TestKVOnAFullFileSystem(t *testing.T) {
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
	small := filepath.Join(d.dir, "small")
	if err := os.Mkdir(small, 0o700); err != nil {
		t.Fatal(err)
	}
	d.prefix = []string{unshare, "-Urm", "sh", "-c",
		`mount -t tmpfs -o size=24m tmpfs "$0" && head -c 12582912 /dev/zero > "$0/ballast" && exec "$@"`, small}
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
			if got, err := n.Value(ctx(t), key(i)); err != nil ||
				!bytes.Equal(got, value(fmt.Sprint(i), version, 20_000)) {
				t.Fatalf("%s: value %d: %d bytes, %v", when, i, len(got), err)
			}
		}
		for i := range maybe {
			got, err := n.Value(ctx(t), key(i))
			if !errors.Is(err, kv.ErrKeyNotFound) &&
				(err != nil || !bytes.Equal(got, value(fmt.Sprint(i), 1, 20_000))) {
				t.Fatalf("%s: value %d, whose put had failed: %d bytes, %v", when, i, len(got), err)
			}
		}
	}
	check("when full")
	if d.metric("jbof_ssd_no_space_errors_total", "ssd", "ssd0") == 0 {
		t.Error("not counted as want of space")
	}
	// The file system is mounted in the daemon's namespace only; /proc gives access to it.
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

// TestADaemonStopsInOrderWhileTheScrubReads, all the time and as fast as it can: its stores write their last
// checkpoints, also if nothing was written before.
func TestADaemonStopsInOrderWhileTheScrubReads(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	s := kvSetup(fileSSD)
	s.subsystems = strings.Replace(s.subsystems, "type: kv}", "type: kv, kv: {scrub_rate: 1TiB}}", 1)
	d := start(t, s)
	n := openKV(t, d.connect(d.options(hostA, nqnA)), 2)
	for i := range 600 { // only full chunks are scrubbed
		if err := n.Put(ctx(t), fmt.Appendf(nil, "%d", i), make([]byte, 10_000)); err != nil {
			t.Fatal(err)
		}
	}
	for range 4 {
		eventually(t, "the scrub reads",
			func() bool { return d.metric("jbof_kv_scrubbed_bytes_total", "nsid", "2") > 0 })
		d.term()
		if lines := d.log.find("key-value store not closed cleanly"); len(lines) > 0 {
			t.Fatal(lines)
		}
		d.launch()
	}
}

// TestTheScrubFindsDamage: a value is modified on the drive while the daemon runs. The scrub counts and logs the
// damage, Retrieve of that value fails, and no other command does. The log says so at a bounded rate, although this
// scrub passes several times a second.
func TestTheScrubFindsDamage(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	s := kvSetup(fileSSD)
	s.subsystems = strings.Replace(s.subsystems, "type: kv}", "type: kv, kv: {scrub_rate: 1GiB}}", 1)
	d := start(t, s)
	n := openKV(t, d.connect(d.options(hostA, nqnA)), 2)
	const keys, bad = 300, 17
	begin := time.Now()
	size := func(i int) int { return 500 + 10*i }
	for i := range keys {
		if err := n.Put(ctx(t), fmt.Appendf(nil, "%d", i), value(fmt.Sprint(i), 1, size(i))); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 400 { // only full chunks are scrubbed, not those being written
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
	eventually(t, "the damage is counted",
		func() bool { return d.metric("jbof_kv_damaged_records_total", "nsid", "2") > 0 })
	if d.metric("jbof_kv_scrubbed_bytes_total", "nsid", "2") == 0 {
		t.Error("no bytes are scrubbed")
	}
	if lines := d.log.find("damaged value: it is not what was written", "level=ERROR", "nsid=2",
		fmt.Sprintf("offset=%d", at-format.ValueHeaderBytes-label.AlignBytes-16<<20)); len(lines) == 0 {
		t.Errorf("the log does not say where; it is at %d of the drive: %s", at,
			d.log.find("damaged value: it is not what was written"))
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
	for _, what := range []string{"damaged value", "damaged chunk"} { // 10 equal lines in 10 s
		if got, most := len(d.log.find(what)), 10*(1+int(time.Since(begin)/(10*time.Second))); got > most {
			t.Errorf("%d lines about a %s, want at most %d", got, what, most)
		}
	}
}

// TestASizeThatIsNotPossibleAtAStartChangesNothing: if the configured size is too small for the values, the daemon
// serves the store as it is and is not ready; with one larger than the drive it does not start. Both are said in
// numbers, and a reload refuses them. With the old size everything is as before.
func TestASizeThatIsNotPossibleAtAStartChangesNothing(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	right := kvSetup(fileSSD)
	d := start(t, right)
	c := d.connect(d.options(hostA, nqnA))
	n := openKV(t, c, 2)
	const keys = 60
	key := func(i int) []byte { return fmt.Appendf(nil, "%d", i) }
	for i := range keys {
		if err := n.Put(ctx(t), key(i), value(fmt.Sprint(i), 1, 1<<20)); err != nil {
			t.Fatal(err)
		}
	}
	unchanged := func(when string) {
		t.Helper()
		for i := range keys {
			if got, err := n.Value(ctx(t), key(i)); err != nil || !bytes.Equal(got, value(fmt.Sprint(i), 1, 1<<20)) {
				t.Fatalf("%s: value %d: %d bytes, %v", when, i, len(got), err)
			}
		}
		if got := d.extentBytes(2); got != 96<<20 {
			t.Errorf("%s: the namespace has %d bytes, want 96 MiB", when, got)
		}
	}
	reset := func() {
		t.Helper()
		d.write(right)
		d.launch()
		if code, body := d.get("/readyz"); code != 200 {
			t.Errorf("with 96MiB again /readyz is %d %s", code, body)
		}
		unchanged("with 96MiB again")
	}
	sized := func(size string) {
		t.Helper()
		other := right
		other.subsystems = strings.Replace(right.subsystems, "96MiB", size, 1)
		if d.reload(other) {
			t.Errorf("a reload with %s succeeds", size)
		}
		unchanged("after a reload with " + size)
	}
	sized("64MiB")
	d.term()
	d.launch()
	var s status
	eventually(t, "the daemon is not ready",
		func() bool { return d.admin("GET", "/v1/status", &s) == nil && !s.Ready && len(s.Reasons) > 0 })
	if len(s.Reasons) != 1 || s.Reasons[0].Component != "sizes of namespaces" ||
		!strings.Contains(s.Reasons[0].Reason, "size 64MiB") ||
		!strings.Contains(s.Reasons[0].Reason, "MiB are in use") {
		t.Errorf("with 64MiB the daemon says %+v", s.Reasons)
	}
	unchanged("after a start with 64MiB")
	d.term()
	reset()

	sized("200MiB")
	d.term()
	d.spawn()
	eventually(t, "the daemon has ended", func() bool { return !d.running() })
	if d.cmd.ProcessState.Success() || len(d.log.find("jbofd: ", "200MiB", "126MiB together")) == 0 {
		t.Errorf("with 200MiB the daemon ends with %v and says %s", d.cmd.ProcessState, d.log.tail(1000))
	}
	reset()
}

// TestTwoDaemonsOnOneDrive: the second daemon cannot open the drive, and the keys of the first one stay intact.
func TestTwoDaemonsOnOneDrive(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	d := start(t, kvSetup(fileSSD))
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

// TestKVOnADriveWith4KiBBlocks: a block device of 4 KiB blocks, through a stop and a kill -9.
func TestKVOnADriveWith4KiBBlocks(t *testing.T) {
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
