package e2e

import (
	"bytes"
	"fmt"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// TestHalvesOfAFusedPairMayUseDifferentTransfers: the data of one half is in its capsule and that of the other follows
// an R2T, also while another host holds all memory that it may use.
func TestHalvesOfAFusedPairMayUseDifferentTransfers(t *testing.T) {
	t.Parallel()
	s := oneMem
	s.limits = "buffers: 8MiB, min_transfer_rate: 0"
	d := start(t, s)
	d.laneBytes = 4 * 128 << 10
	_, hoarder := d.rawQueue(hostB, nqnA, 0, 64)
	var p []byte
	for k := range 60 {
		p = append(p, hoarder.capsule(rw(nvme.CmdWrite, uint16(k), 8192, 2048), nil, 1<<20)...)
	}
	_, h := d.rawQueue(hostA, nqnA, 0, 32)
	old := make([]byte, 4096)
	for round := range 6 {
		if round == 2 {
			hoarder.send(p)
			hoarder.r2t()
		}
		inline := round % 2 // which half's data is in its capsule
		next := bytes.Repeat([]byte{byte(round + 1)}, 4096)
		halves := [2][]byte{old, next}
		var out []byte
		for i, data := range halves {
			e := rw([]uint8{nvme.CmdCompare, nvme.CmdWrite}[i], uint16(10+i), 0, 8)
			e.SetFuse([]nvme.Fuse{nvme.FuseFirst, nvme.FuseSecond}[i])
			if i == inline {
				out = append(out, h.capsule(e, data, 0)...)
			} else {
				out = append(out, h.capsule(e, nil, len(data))...)
			}
		}
		h.send(out)
		other := 1 - inline
		h.send(h.frame(pdu.TypeH2CData, pdu.FlagLast, h2cData(uint16(10+other), h.r2t(), 0, 4096), halves[other]))
		for range 2 {
			if c := h.response(); !c.Status().OK() {
				t.Fatal(fmt.Sprintf("round %d, command %d: %v", round, c.CID(), c.Status()))
			}
		}
		old = next
	}
	hoarder.close()
}
