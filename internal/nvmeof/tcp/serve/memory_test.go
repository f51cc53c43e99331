package serve_test

import (
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/serve"
)

// TestSmallWritesBehindLargeOnesNeverStopAConnection: the large ones hold all memory that their host may have and wait
// for data that comes behind the small ones. Those have data in their capsules, and need memory before they can be
// received.
func TestSmallWritesBehindLargeOnesNeverStopAConnection(t *testing.T) {
	r := newRig(t, func(c *serve.Config) { c.StallTimeout = time.Second })
	c, q, err := open(r.address, 128)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	large, small := make([]byte, 1<<20), make([]byte, blockBytes)
	cmds := make([]client.Command, 0, 128)
	for i := range 128 {
		data, lba := large, uint64(0)
		if i >= 60 && i%2 == 1 {
			data, lba = small, uint64(8192+i)
		}
		cmds = append(cmds, client.Command{Data: data, Tag: uint64(i)})
		client.SetRW(&cmds[i], nvme.CmdWrite, 1, lba, uint32(len(data)/blockBytes))
	}
	if n, err := q.Submit(cmds); err != nil || n != len(cmds) {
		t.Fatalf("submitted %d of %d: %v", n, len(cmds), err)
	}
	comps := make([]client.Completion, len(cmds))
	for done := 0; done < len(cmds); {
		n, err := q.Poll(comps, 10*time.Second)
		if err != nil || n == 0 {
			t.Fatalf("%d of %d writes are done: %v", done, len(cmds), err)
		}
		for _, c := range comps[:n] {
			if !c.Status.OK() {
				t.Fatalf("write %d: %v", c.Tag, c.Status)
			}
		}
		done += n
	}
}
