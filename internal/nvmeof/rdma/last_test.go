package rdma_test

import (
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/qpair/qpairtest"
	"jbofd/internal/nvmeof/rdma/wr"
)

// eager is a driver that, when the data of slot has come, answers the read in slot reader with data that is held until
// sent.
type eager struct {
	*driver
	slot, reader int
	lent         int
}

func (e *eager) Fetched(slot int, ok bool) {
	if !ok {
		e.c.Respond(slot, nvme.TransientTransportError, 0)
		return
	}
	if slot == e.slot {
		e.c.RespondData(e.reader, e.data.take(512), 0)
		e.lent = e.c.Last()
	}
}

func (e *eager) Locate(b []byte) (uint64, uint32, bool) {
	addr, lkey, ok := e.driver.Locate(b)
	return addr, lkey, ok && addr != dataAddr+4096+1024 // where the second slot's is: behind Connect's
}

// TestLastIsTheResponseJustMade, even if others were made meanwhile: the end of a response makes room for a READ whose
// memory cannot be located, which causes another response. Otherwise the data would be held for the wrong response.
func TestLastIsTheResponseJustMade(t *testing.T) {
	d := newDriver(config)
	cfg := config
	cfg.Reads = 1
	cfg.Responses, cfg.Addr, cfg.LKey = d.responses.b, d.responses.addr, d.responses.lkey
	e := &eager{driver: d, lent: -1}
	d.start(cfg, e, e)
	d.attach(qpairtest.IOQueue(8, false))
	d.data.used = 4096
	write := request{op: nvme.CmdWrite, nsid: 1, nlb: 1, transfer: 512}
	for cid := range uint16(3) {
		r := write
		r.cid = cid
		if cid == 2 {
			r.op = nvme.CmdRead
		}
		d.receive(r.capsule())
	}
	e.slot, e.reader = 0, 2
	d.c.RequestData(0, d.data.take(512))
	d.data.used = 4096 + 1024
	d.c.RequestData(1, d.data.take(512)) // waits: one READ at a time
	d.post()
	if !d.complete(wr.StatusOK) {
		t.Fatal("no READ is posted")
	}
	// The data's WRITE and its SEND, and the SEND of the other.
	if len(d.out.Sends) != 3 || d.out.Sends[0].Op != wr.OpWrite {
		t.Fatalf("%d work requests", len(d.out.Sends))
	}
	if want := int(uint16(d.out.Sends[1].ID)); e.lent != want {
		t.Errorf("the data is lent to response %d, is of %d", e.lent, want)
	}
}
