package serve_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/testutil/hangup"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// testTimeout is how long a test waits for what must happen.
const testTimeout = 20 * time.Second

// rawQueue is one queue of a host that sends bare PDUs and does nothing by itself.
type rawQueue struct {
	t testing.TB
	c net.Conn
	// answers are the responses that wait has not returned yet, by CID.
	answers map[uint16]nvme.CQE
	data    map[uint16][]byte
	cid     uint16
	// r2ts are the R2Ts that are not answered yet, oldest first.
	r2ts []pdu.Data
	// digest: data has a digest.
	digest bool
}

// rawHost is an association of raw queues.
type rawHost struct {
	r      *rig
	t      testing.TB
	nqn    string
	id     uuid.UUID
	cntlid uint16
	admin  *rawQueue
	// digest: its queues have data digests.
	digest bool
}

const rawNQN = "nqn.2014-08.org.nvmexpress:uuid:aaaaaaaa-0000-0000-0000-00000000000a"

// raw connects an admin queue and enables its controller.
func (r *rig) raw(t testing.TB) *rawHost {
	t.Helper()
	h := r.rawIdle(t)
	if s := h.connectAdmin(0); !s.OK() {
		t.Fatalf("Connect: %v", s)
	}
	h.setCC(rawEnable)
	return h
}

// rawIdle is a host that has not connected yet.
func (r *rig) rawIdle(t testing.TB) *rawHost {
	return &rawHost{r: r, t: t, nqn: rawNQN, id: uuid.UUID{7}}
}

const rawEnable = nvme.CC(1 | 6<<16 | 4<<20)

// dial opens a connection and initializes it.
func (h *rawHost) dial() *rawQueue {
	h.t.Helper()
	c, err := net.Dial("tcp", h.r.address)
	if err != nil {
		h.t.Fatal(err)
	}
	q := &rawQueue{t: h.t, c: c, answers: map[uint16]nvme.CQE{}, data: map[uint16][]byte{}}
	h.t.Cleanup(func() { _ = c.Close() })
	var ic pdu.IC
	ic.Common().Set(pdu.TypeICReq, 0, pdu.ICLen, 0, pdu.ICLen)
	if q.digest = h.digest; q.digest {
		ic.SetDGST(2) // of data only
	}
	q.write(ic[:])
	if p, err := q.next(); err != nil || (*pdu.Common)(p).Type() != pdu.TypeICResp {
		h.t.Fatalf("instead of an ICResp: %x, %v", p, err)
	}
	return q
}

// sendConnect sends the Connect of queue qid.
func (h *rawHost) sendConnect(q *rawQueue, qid uint16, katoMS uint32) (cid uint16) {
	h.t.Helper()
	var e nvme.SQE
	c := e.Connect()
	c.Init()
	c.SetQID(qid)
	c.SetSQSIZE(63)
	c.SetKATO(katoMS)
	var d nvme.ConnectData
	d.SetHostID(h.id)
	d.SetHostNQN(h.nqn)
	d.SetSubNQN(testNQN)
	d.SetCNTLID(nvme.CNTLIDDynamic)
	if qid != 0 {
		d.SetCNTLID(h.cntlid)
	}
	return q.send(e, d[:])
}

// connectAdmin connects the admin queue.
func (h *rawHost) connectAdmin(katoMS uint32) nvme.Status {
	h.t.Helper()
	q := h.dial()
	e := q.wait(h.sendConnect(q, 0, katoMS))
	if e.Status().OK() {
		h.admin, h.cntlid = q, e.ConnectCNTLID()
	}
	return e.Status()
}

// queue connects an I/O queue.
func (h *rawHost) queue(qid uint16) *rawQueue {
	h.t.Helper()
	q := h.dial()
	if e := q.wait(h.sendConnect(q, qid, 0)); !e.Status().OK() {
		h.t.Fatalf("Connect of queue %d: %v", qid, e.Status())
	}
	return q
}

func (h *rawHost) setCC(cc nvme.CC) {
	h.t.Helper()
	var e nvme.SQE
	e.Property().Init(nvme.FabricsPropertySet, nvme.PropCC)
	e.Property().SetVALUE(uint64(cc))
	if c := h.admin.do(e); !c.Status().OK() {
		h.t.Fatalf("Property Set of CC %#x: %v", uint32(cc), c.Status())
	}
}

func (h *rawHost) csts() nvme.CSTS {
	h.t.Helper()
	var e nvme.SQE
	e.Property().Init(nvme.FabricsPropertyGet, nvme.PropCSTS)
	c := h.admin.do(e)
	if !c.Status().OK() {
		h.t.Fatalf("Property Get of CSTS: %v", c.Status())
	}
	return nvme.CSTS(c.Result64())
}

// awaitCSTS polls CSTS until it is as wanted, as hosts do.
func (h *rawHost) awaitCSTS(what string, so func(nvme.CSTS) bool) {
	h.t.Helper()
	late := time.Now().Add(testTimeout)
	for got := h.csts(); !so(got); got = h.csts() {
		if time.Now().After(late) {
			h.t.Fatalf("CSTS %#x after %v, want %s", uint32(got), testTimeout, what)
		}
		time.Sleep(time.Millisecond)
	}
}

// lose closes the connections of some queues and then that of the admin queue.
func (h *rawHost) lose(queues ...*rawQueue) {
	h.t.Helper()
	for _, q := range append(queues, h.admin) {
		hangup.Close(h.t, q.c)
	}
}

func (q *rawQueue) write(b []byte) {
	q.t.Helper()
	_ = q.c.SetWriteDeadline(time.Now().Add(testTimeout))
	if _, err := q.c.Write(b); err != nil {
		q.t.Fatal(err)
	}
}

// next reads one PDU.
func (q *rawQueue) next() ([]byte, error) {
	_ = q.c.SetReadDeadline(time.Now().Add(testTimeout))
	b := make([]byte, 1<<17)
	if _, err := io.ReadFull(q.c, b[:pdu.CommonLen]); err != nil {
		return nil, err
	}
	n := int((*pdu.Common)(b).PLEN())
	if n < pdu.CommonLen || n > len(b) {
		return nil, fmt.Errorf("a PDU of %d bytes", n)
	}
	_, err := io.ReadFull(q.c, b[pdu.CommonLen:n])
	return b[:n], err
}

// send sends a command with data in its capsule, or none, and returns its CID.
func (q *rawQueue) send(e nvme.SQE, data []byte) (cid uint16) {
	q.t.Helper()
	q.cid++
	e.SetCID(q.cid)
	e.SetPSDT(nvme.PSDTSGL)
	if len(data) > 0 {
		e.SGL().SetType(nvme.SGLTypeDataBlock, nvme.SGLSubtypeOffset)
		e.SGL().SetLength(uint32(len(data)))
	}
	flags, plen, pdo := uint8(0), pdu.CommonLen+nvme.SQESize, 0
	if len(data) > 0 {
		pdo = plen
		plen += len(data)
		if q.digest {
			flags, plen = pdu.FlagDDGST, plen+pdu.DigestLen
			data = binary.LittleEndian.AppendUint32(bytes.Clone(data), pdu.Digest(data))
		}
	}
	b := make([]byte, pdu.CommonLen, plen)
	(*pdu.Common)(b).Set(pdu.TypeCapsuleCmd, flags, pdu.CommonLen+nvme.SQESize, uint8(pdo), uint32(plen))
	q.write(append(append(b, e[:]...), data...))
	return q.cid
}

// sendToFetch sends a command whose n bytes of data the target requests by R2T, and returns its CID.
func (q *rawQueue) sendToFetch(e nvme.SQE, n int) (cid uint16) {
	q.t.Helper()
	e.SGL().SetType(nvme.SGLTypeTransportData, nvme.SGLSubtypeTransport)
	e.SGL().SetLength(uint32(n))
	return q.send(e, nil)
}

// answer sends the data that the oldest R2T requests, filled with a byte.
func (q *rawQueue) answer(fill byte) {
	q.t.Helper()
	q.answerWith(fill, 0)
}

// answerWith is answer with a wrong data digest: wrong is added to it.
func (q *rawQueue) answerWith(fill byte, wrong uint32) {
	q.t.Helper()
	r := q.r2ts[0]
	q.r2ts = q.r2ts[1:]
	data := bytes.Repeat([]byte{fill}, int(r.Length()))
	flags, n := uint8(pdu.FlagLast), len(data)
	if q.digest {
		flags |= pdu.FlagDDGST
		data = binary.LittleEndian.AppendUint32(data, pdu.Digest(data)+wrong)
	}
	var d pdu.Data
	d.Common().Set(pdu.TypeH2CData, flags, pdu.DataLen, pdu.DataLen, uint32(pdu.DataLen+len(data)))
	d.SetCCCID(r.CCCID())
	d.SetTTAG(r.TTAG())
	d.SetLength(uint32(n))
	q.write(append(d[:], data...))
}

// receive reads PDUs up to the next response or R2T and records that.
func (q *rawQueue) receive() error {
	for {
		p, err := q.next()
		if err != nil {
			return err
		}
		switch (*pdu.Common)(p).Type() {
		case pdu.TypeCapsuleResp:
			e := (*pdu.CapsuleResp)(p).CQE()
			q.answers[e.CID()] = *e
			return nil
		case pdu.TypeC2HData:
			d := (*pdu.Data)(p)
			q.data[d.CCCID()] = append(q.data[d.CCCID()], p[(*pdu.Common)(p).PDO():]...)
			if (*pdu.Common)(p).Flags()&pdu.FlagSuccess != 0 {
				var e nvme.CQE
				e.SetCID(d.CCCID())
				q.answers[d.CCCID()] = e
				return nil
			}
		case pdu.TypeR2T:
			q.r2ts = append(q.r2ts, *(*pdu.Data)(p))
			return nil
		default:
			return fmt.Errorf("a %v", (*pdu.Common)(p).Type())
		}
	}
}

// answered reports whether the response to cid was received.
func (q *rawQueue) answered(cid uint16) bool {
	_, ok := q.answers[cid]
	return ok
}

// answeredByNow receives what has come by now, and then is answered.
func (q *rawQueue) answeredByNow(cid uint16) bool {
	q.t.Helper()
	for q.readable() && q.receive() == nil {
	}
	return q.answered(cid)
}

// readable reports whether the target has sent something that was not read yet, or has closed the connection.
func (q *rawQueue) readable() (readable bool) {
	q.t.Helper()
	raw, err := q.c.(*net.TCPConn).SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(p, 0)
			readable = err == nil && n > 0
		})
	}
	if err != nil {
		q.t.Fatal(err)
	}
	return readable
}

// wait waits for the response to cid.
func (q *rawQueue) wait(cid uint16) nvme.CQE {
	q.t.Helper()
	for !q.answered(cid) {
		if err := q.receive(); err != nil {
			q.t.Fatalf("instead of the response to %d: %v", cid, err)
		}
	}
	return q.answers[cid]
}

func (q *rawQueue) do(e nvme.SQE) nvme.CQE {
	q.t.Helper()
	return q.wait(q.send(e, nil))
}

// ended waits until the target has closed the connection.
func (q *rawQueue) ended() {
	q.t.Helper()
	for {
		err := q.receive()
		if ne, ok := err.(net.Error); ok && ne.Timeout() {
			q.t.Fatalf("the target has not closed the connection after %v", testTimeout)
		}
		if err != nil {
			return
		}
	}
}

// writeBlock sends a Write of one block filled with a byte.
func (q *rawQueue) writeBlock(lba units.LBA, fill byte) (cid uint16) {
	q.t.Helper()
	var e nvme.SQE
	e.SetOpcode(nvme.CmdWrite)
	e.SetNSID(1)
	e.SetSLBA(lba)
	e.SetNLB(1)
	return q.send(e, bytes.Repeat([]byte{fill}, blockBytes))
}

// blocks reads the first byte of each of n blocks, through a host of its own.
func (r *rig) blocks(t testing.TB, n int) []byte {
	t.Helper()
	ns := namespace(t, connect(t, client.Options{Address: r.address, SubNQN: testNQN, Queues: 1, CtrlLossTimeout: -1}),
		1)
	firsts := make([]byte, n)
	for i := range firsts {
		b := make([]byte, blockBytes)
		if _, err := ns.ReadAt(t.Context(), b, int64(i)*blockBytes); err != nil {
			t.Fatal(err)
		}
		firsts[i] = b[0]
	}
	return firsts
}
