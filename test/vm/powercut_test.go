//go:build vm

package vm

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
)

// cutBlocks is how many blocks the host writes to before the power cut.
const cutBlocks = 256

// writer is a host that writes blocks with a version each, and knows which must be there after a power cut.
type writer struct {
	ns *client.Namespace
	// issued is the version of a block that was written last, done the one whose write has ended, and safe the one that
	// a flush has made durable.
	issued, done, safe [cutBlocks]uint64
	flushes            atomic.Int64
}

// blockOf is block b in a version.
func blockOf(b int, version uint64) []byte {
	p := make([]byte, volatileBlock)
	for i := 0; i < len(p); i += 16 {
		binary.LittleEndian.PutUint64(p[i:], uint64(b)<<32|uint64(i))
		binary.LittleEndian.PutUint64(p[i+8:], version)
	}
	return p
}

// run writes until the context ends, or the node is gone. It does not use FUA: QEMU's drives ignore it.
func (w *writer) run(ctx context.Context, rng *rand.Rand) {
	for version := uint64(1); ctx.Err() == nil; version++ {
		b := rng.IntN(cutBlocks)
		w.issued[b] = version
		if _, err := w.ns.WriteAt(ctx, blockOf(b, version), int64(b)*volatileBlock, 0); err != nil {
			return
		}
		w.done[b] = version
		// Many writes between two flushes, so that the cut finds some that are in the cache only.
		if rng.IntN(200) != 0 && w.flushes.Load() > 0 {
			continue
		}
		if err := w.ns.Flush(ctx); err != nil {
			return
		}
		w.safe = w.done
		w.flushes.Add(1)
	}
}

// connect connects a host on this machine to the daemon in the guest.
func (g *nvmeGuest) connect(ctx context.Context, nsid uint32) (*client.Controller, *client.Namespace) {
	g.Helper()
	c, err := client.Connect(ctx, client.Options{Address: fmt.Sprintf("127.0.0.1:%d", g.port),
		SubNQN: "nqn.2026-11.example.jbofd:drives"})
	if err != nil {
		g.Fatal(err)
	}
	ns, err := c.Namespace(ctx, nsid)
	if err != nil {
		g.Fatal(err)
	}
	return c, ns
}

const powerCutConfig = `node: {name: vm, data_dir: /tmp/data}
metrics: {address: ""}
admin: {socket: /tmp/admin.sock}
discovery: {address: ""}
listeners: [{address: "10.0.2.15:%d"}]
ssds:
  - {name: c, backend: nvme, address: "0000:01:00.0"}
subsystems:
  - nqn: nqn.2026-11.example.jbofd:drives
    allow_any_host: true
    namespaces:
      - {nsid: 3, ssd: c, size: 8MiB}
`

// powerCut cuts the power of a node whose drive has a volatile write cache, while a host writes. After another start,
// what was flushed is there, or what was written later. again starts the machine again, with that drive alone.
func (g *nvmeGuest) powerCut(d *volatileDrive, again func() *nvmeGuest) {
	seed := uint64(time.Now().UnixNano())
	g.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	c, ns := g.connect(ctx, 3)
	var id nvme.IdentifyController
	if err := c.Identify(ctx, nvme.CNSController, 0, id[:]); err != nil || id.VWC()&nvme.VWCPresent == 0 {
		g.Errorf("the host is not told of the volatile write cache: VWC is %#x, %v", id.VWC(), err)
	}
	w := &writer{ns: ns}
	writing, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.run(writing, rng)
	}()
	// The cut comes when some flushes have ended, and the cache has something.
	for flushed, _ := d.counts(); ; {
		flushes, dirty := d.counts()
		if w.flushes.Load() >= 4 && flushes-flushed >= 4 && dirty >= 16 {
			break
		}
		select {
		case <-ended:
			g.Fatal("the host cannot write")
		case <-time.After(10 * time.Millisecond):
		}
	}
	g.Close()
	lost := d.cut(rng)
	stop()
	<-ended
	_ = c.Close()
	g.Logf("the host had flushed %d times; the cut lost %d blocks", w.flushes.Load(), lost)

	next := again()
	next.run("modprobe -a vfio_pci 2>/dev/null; jbofctl ssd bind 0000:01:00.0") // it holds a drive of jbofd
	next.run("jbofctl ssd bind 0000:02:00.0 --force")
	next.memoryIsThere("0000:02:00.0")
	next.startWith(fmt.Sprintf(powerCutConfig, next.port))
	if log := next.run("cat /tmp/log"); !strings.Contains(log, "volatile_cache=true") {
		g.Errorf("the daemon does not know of the volatile write cache:\n%s", log)
	}
	c, ns = next.connect(ctx, 3)
	defer c.Close()
	old := 0
	for b := range cutBlocks {
		p := make([]byte, volatileBlock)
		if _, err := ns.ReadAt(ctx, p, int64(b)*volatileBlock); err != nil {
			g.Fatal(err)
		}
		version := binary.LittleEndian.Uint64(p[8:])
		if version < w.safe[b] || version > w.issued[b] {
			g.Errorf("block %d has version %d; durable was %d, done %d, and issued %d", b, version, w.safe[b],
				w.done[b], w.issued[b])
		}
		if want := blockOf(b, version); version > 0 && string(p) != string(want) {
			g.Errorf("block %d is not as it was written in version %d", b, version)
		}
		if version < w.done[b] {
			old++
		}
	}
	if lost == 0 || old == 0 {
		g.Errorf("the cut has lost %d blocks, of which the host sees %d: it has shown nothing", lost, old)
	}
}

// volatileArgs are QEMU's arguments for a drive that a volatileDrive serves, number i.
func volatileArgs(i int, socket string) []string {
	return []string{"-device", fmt.Sprintf("pcie-root-port,id=port%d,chassis=%[1]d,slot=%[1]d,bus=pcie.0", i),
		"-drive", fmt.Sprintf("if=none,format=raw,cache=writeback,id=drive%d,file=nbd+unix:///?socket=%s", i, socket),
		"-device", fmt.Sprintf("nvme,id=nvme%d,serial=volatile,drive=drive%[1]d,bus=port%[1]d,"+
			"logical_block_size=4096,physical_block_size=4096", i)}
}

// newVolatile starts the server of a volatile drive for a test.
func newVolatile(t *testing.T) (*volatileDrive, string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "nbd")
	d, err := newVolatileDrive(socket, 32<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.close(); err != nil {
			t.Error(err)
		}
	})
	return d, socket
}
