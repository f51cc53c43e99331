package e2e

import (
	"bytes"
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
)

// slowFile is fileSSD with some of its requests delayed.
func slowFile(fault string) string {
	return strings.Replace(fileSSD, "create: true", "create: true, fault: {"+fault+"}", 1)
}

// writers has a full queue of writes of one block each outstanding.
type writers struct {
	t      testing.TB
	q      *client.QPair
	blocks [][]byte
	acked  []bool
	left   int
}

const writersBlock = 4096

func startWriters(t testing.TB, d *daemon, n int) *writers {
	t.Helper()
	o := d.options(hostA, nqnA)
	o.QPairs, o.CtrlLossTimeout = 1, -1
	q, err := d.connect(o).OpenQPair(ctx(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = q.Close() })
	w := &writers{t: t, q: q, acked: make([]bool, n), left: n}
	cmds := make([]client.Command, n)
	for i := range cmds {
		b := make([]byte, writersBlock)
		fill(b, int64(i)*writersBlock, 7)
		w.blocks = append(w.blocks, b)
		client.SetRW(&cmds[i], client.OpWrite, 1, uint64(i)*writersBlock/512, writersBlock/512)
		cmds[i].Data, cmds[i].Tag = b, uint64(i)
	}
	if k, err := q.Submit(cmds); k != n || err != nil {
		t.Fatal(k, err)
	}
	return w
}

// poll collects completions, for a limited time. It returns the error of a queue that is lost.
func (w *writers) poll(patience time.Duration) error {
	w.t.Helper()
	comps := make([]client.Completion, len(w.blocks))
	k, err := w.q.Poll(comps, patience)
	for _, c := range comps[:k] {
		w.left--
		if w.acked[c.Tag] = c.Status.OK(); !c.Status.OK() {
			w.t.Errorf("write %d: %v", c.Tag, c.Status)
		}
	}
	return err
}

// check reads the blocks back. Acknowledged blocks have what was written, the others that or zeroes.
func (w *writers) check(n *client.Namespace) (acked int) {
	w.t.Helper()
	got := make([]byte, writersBlock)
	for i, want := range w.blocks {
		if _, err := n.ReadAt(ctx(w.t), got, int64(i)*writersBlock); err != nil {
			w.t.Fatal(err)
		}
		there := bytes.Equal(got, want)
		switch {
		case w.acked[i] && !there:
			w.t.Errorf("the write of block %d was acknowledged and is not there after the restart", i)
		case !there && !bytes.Equal(got, make([]byte, writersBlock)):
			w.t.Errorf("block %d holds neither what was written nor zeroes", i)
		}
		if w.acked[i] {
			acked++
		}
	}
	return acked
}

// TestAStopWaitsForTheWritesThatADriveHas: the writes are answered, and are on the drive after a restart. Meanwhile new
// connections are refused, /readyz says why, and existing connections continue.
func TestAStopWaitsForTheWritesThatADriveHas(t *testing.T) {
	t.Parallel()
	const delay = 3 * time.Second
	s := setup{ssds: slowFile("delay: 3s, delay_probability: 0.5"), subsystems: openSubsystem,
		limits: "drain_timeout: 30s"}
	d := start(t, s)
	other := d.connect(d.options(hostB, nqnA))
	const n = 32
	w := startWriters(t, d, n)
	eventually(t, "the drive has writes", func() bool { return d.metric("jbof_ssd_io_now") > 0 })
	began := time.Now()
	d.signal(syscall.SIGTERM)
	eventually(t, "/readyz says that the daemon drains", func() bool {
		code, body := d.get("/readyz")
		return code == 503 && strings.Contains(body, "draining")
	})
	eventually(t, "new connections are refused", func() bool {
		c, err := net.Dial("tcp", d.addr)
		if err == nil {
			_ = c.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	if !d.running() {
		t.Fatalf("the daemon has ended after %v, while writes are at the drive", time.Since(began))
	}
	if err := other.Identify(ctx(t), nvme.CNSController, 0, make([]byte, nvme.IdentifySize)); err != nil {
		t.Errorf("an admin command during the drain: %v", err)
	}
	for w.left > 0 {
		if err := w.poll(wait); err != nil {
			t.Fatalf("%d of %d writes are not answered: %v", w.left, n, err)
		}
	}
	<-d.exited
	if took := time.Since(began); !d.cmd.ProcessState.Success() || took > delay+stopLimit {
		t.Errorf("ended with %v after %v", d.cmd.ProcessState, took)
	}
	if len(d.log.find("within drain_timeout")) > 0 {
		t.Error("the log says that commands have not completed")
	}
	s.ssds = fileSSD
	d.write(s)
	d.launch()
	if acked := w.check(d.namespace(d.options(hostA, nqnA), 1)); acked != n {
		t.Errorf("%d of %d writes were acknowledged", acked, n)
	}
}

// TestAStopDoesNotWaitForAStuckDrive: after limits.drain_timeout the connections are closed, then the process ends with
// status 0 and says that a drive has not answered. Acknowledged writes are there after a restart.
func TestAStopDoesNotWaitForAStuckDrive(t *testing.T) {
	t.Parallel()
	const drain = time.Second
	s := setup{ssds: slowFile("delay: 10m, delay_probability: 0.5"), subsystems: openSubsystem,
		limits: "drain_timeout: 1s"}
	d := start(t, s)
	const n = 64
	w := startWriters(t, d, n)
	eventually(t, "the drive has only writes that it does not end", func() bool {
		if err := w.poll(20 * time.Millisecond); err != nil {
			t.Fatal(err)
		}
		return w.left > 0 && int(d.metric("jbof_ssd_io_now")) == w.left
	})
	took := d.term()
	if took < drain || took > stopLimit {
		t.Errorf("stopped after %v, want %v and not more than %v", took, drain, stopLimit)
	}
	for _, line := range [][]string{{"commands have not completed within drain_timeout"},
		{"a drive has not answered within the time limit", "ssd0"}} {
		if len(d.log.find(line...)) != 1 {
			t.Errorf("the log does not say once %q", line)
		}
	}
	for left := w.left; w.left > 0; left = w.left {
		if err := w.poll(wait); err == nil && w.left == left {
			t.Fatalf("%d writes of the closed connection have no outcome", left)
		} else if err != nil {
			break
		}
	}
	s.ssds = fileSSD
	d.write(s)
	d.launch()
	acked := w.check(d.namespace(d.options(hostA, nqnA), 1))
	t.Logf("%d of %d writes were acknowledged before the stop", acked, n)
	if acked == 0 {
		t.Error("no write was acknowledged: the test tests nothing")
	}
}
