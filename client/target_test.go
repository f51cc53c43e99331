package client

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/testutil/loopback"
	"jbofd/internal/units"
)

// script is a small target for tests of the socket side: it holds a byte array, answers Read and Write
// with blocks of 512 bytes, and everything else with success. It is neither complete nor strict.
type script struct {
	t testing.TB
	// address is for Options.Address; stop ends the listener.
	address   string
	stop      func()
	rdma      *rdmaNet // nil: over TCP
	wg        sync.WaitGroup
	inCapsule int
	maxH2C    uint32
	digests   bool
	mu        sync.Mutex
	disk      []byte
	conns     []func() // each cuts a connection
	// seen counts the commands by name. If tracing is set, trace lists them in order, as "QID name".
	seen    map[string]int
	tracing bool
	trace   []string
	// stalled, if set, drops the commands for which it returns true.
	stalled func(e *nvme.SQE) bool
	// answer, if set, may answer a command instead of the script: then it returns true.
	answer func(c *scriptConn, e *nvme.SQE) bool
	// credit, if not 0, is what the target grants and repeats with every completion of an I/O that has a
	// response of its own.
	credit nvme.Credit
	// cqtMS is the command quiesce time.
	cqtMS atomic.Uint32
	// capTO is CAP.TO beyond the least, in units of 500 ms.
	capTO atomic.Uint32
	// disconnects: the target announces the Disconnect command.
	disconnects atomic.Bool
	// log is the discovery log.
	log []byte
	cc  nvme.CC // of the latest association
	// aers are the Asynchronous Event Requests outstanding.
	aers []func(dw0 uint32)
}

// name names a command for script.seen.
func (c *scriptConn) name(e *nvme.SQE) string {
	if e.Opcode() == nvme.OpFabrics {
		return map[uint8]string{nvme.FabricsConnect: "connect", nvme.FabricsPropertyGet: "get",
			nvme.FabricsPropertySet: "set",
			nvme.FabricsDisconnect:  "disconnect"}[e.FCTYPE()]
	}
	if c.qid != 0 {
		return map[uint8]string{nvme.CmdRead: "read", nvme.CmdWrite: "write", nvme.CmdFlush: "flush",
			nvme.CmdCompare: "compare"}[e.Opcode()]
	}
	return map[uint8]string{nvme.AdminKeepAlive: "keepalive", nvme.AdminAbort: "abort", nvme.AdminIdentify: "identify",
		nvme.AdminGetLogPage:  "log",
		nvme.AdminSetFeatures: "setfeature", nvme.AdminAsyncEvent: "aer"}[e.Opcode()]
}

// traced is an entry of script.trace.
func (c *scriptConn) traced(e *nvme.SQE) string {
	qid, name := c.qid, c.name(e)
	switch name {
	case "connect":
		qid = e.Connect().QID()
	case "set":
		switch cc := nvme.CC(e.Property().VALUE()); {
		case !cc.EN():
			name = "reset"
		case cc.SHN() != 0:
			name = "shutdown"
		default:
			name = "enable"
		}
	}
	return fmt.Sprint(qid, " ", name)
}

func (s *script) count(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seen[name]
}

// notify completes an Asynchronous Event Request; false if there is none.
func (s *script) notify(dw0 uint32) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.aers) == 0 {
		return false
	}
	s.aers[0](dw0)
	s.aers = s.aers[1:]
	return true
}

// scriptConn is one queue pair of a script.
type scriptConn struct {
	s    *script
	wire scriptWire
	qid  uint16
	// raw: the first command was not a Connect; the queue counts as an I/O queue.
	raw bool
}

// scriptWire sends a script's responses.
type scriptWire interface {
	reply(cid uint16, st nvme.Status, result uint64)
	// read answers a command with data and success.
	read(e *nvme.SQE, data []byte)
	// event is reply from another goroutine.
	event(cid uint16, dw0 uint32)
}

func (c *scriptConn) reply(cid uint16, st nvme.Status, result uint64) { c.wire.reply(cid, st, result) }

// scriptTCP is the script's side of a TCP connection.
type scriptTCP struct {
	s    *script
	conn *scriptConn
	c    net.Conn
	in   []byte
	r, w int
	out  []byte
	// wmu guards writes of out to c, because other goroutines respond, too.
	wmu sync.Mutex
	// pending writes by CID: where the data goes.
	pending map[uint16]*pendingWrite
}

type pendingWrite struct {
	sqe nvme.SQE
	buf []byte
}

func newScript(t testing.TB, diskBytes int) *script {
	ln := loopback.Listen(t)
	s := &script{t: t, address: ln.Addr().String(), disk: make([]byte, diskBytes), maxH2C: 128 << 10, inCapsule: 8192,
		seen: map[string]int{}}
	s.stop = func() { ln.Close() }
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, func() { c.Close() })
			s.mu.Unlock()
			s.wg.Add(1)
			go func() {
				defer s.wg.Done()
				defer c.Close()
				w := &scriptTCP{s: s, c: c, in: make([]byte, 2<<20), pending: map[uint16]*pendingWrite{}}
				w.conn = &scriptConn{s: s, wire: w, raw: true}
				if err := w.run(); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
					var op *net.OpError
					if !errors.As(err, &op) {
						t.Errorf("script target: %v", err)
					}
				}
			}()
		}
	}()
	t.Cleanup(func() {
		s.stop()
		s.cut()
		s.wg.Wait()
	})
	return s
}

// addr returns what Options.Address needs. Connections see what was set before it was called.
func (s *script) addr() string {
	s.mu.Lock() // as every connection does
	defer s.mu.Unlock()
	return s.address
}

// cut closes every connection.
func (s *script) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, cut := range s.conns {
		cut()
	}
	s.conns = nil
}

func (c *scriptTCP) fill(n int) ([]byte, error) {
	for c.w-c.r < n {
		if len(c.out) > 0 {
			c.wmu.Lock()
			_, err := c.c.Write(c.out)
			c.wmu.Unlock()
			if err != nil {
				return nil, err
			}
			c.out = c.out[:0]
		}
		if c.r > 0 {
			c.w = copy(c.in, c.in[c.r:c.w])
			c.r = 0
		}
		k, err := c.c.Read(c.in[c.w:])
		if err != nil {
			return nil, err
		}
		c.w += k
	}
	return c.in[c.r : c.r+n], nil
}

func (c *scriptTCP) format() pdu.Format {
	return pdu.Format{HeaderDigest: c.s.digests, DataDigest: c.s.digests}
}

func (c *scriptTCP) put(t pdu.Type, flags uint8, rest []byte, data []byte) {
	f := c.format()
	h := make([]byte, 8, 32)
	h = append(h, rest...)
	plen, pdo := len(h), 0
	if f.HeaderDigest {
		flags |= pdu.FlagHDGST
		plen += 4
	}
	if len(data) > 0 {
		pdo = plen
		plen += len(data)
		if f.DataDigest {
			flags |= pdu.FlagDDGST
			plen += 4
		}
	}
	(*pdu.Common)(h).Set(t, flags, uint8(len(h)), uint8(pdo), uint32(plen))
	if f.HeaderDigest {
		h = binary.LittleEndian.AppendUint32(h, pdu.Digest(h))
	}
	c.out = append(append(c.out, h...), data...)
	if len(data) > 0 && f.DataDigest {
		c.out = binary.LittleEndian.AppendUint32(c.out, pdu.Digest(data))
	}
}

func (c *scriptTCP) reply(cid uint16, st nvme.Status, result uint64) {
	var e nvme.CQE
	e.SetCID(cid)
	e.SetStatus(st)
	e.SetResult64(result)
	c.put(pdu.TypeCapsuleResp, 0, e[:], nil)
}

func (c *scriptTCP) data(cid uint16, off uint32, data []byte, flags uint8) {
	var d pdu.Data
	d.SetCCCID(cid)
	d.SetOffset(off)
	d.SetLength(uint32(len(data)))
	c.put(pdu.TypeC2HData, flags, d[8:], data)
}

func (c *scriptTCP) r2t(cid, ttag uint16, off, n uint32) {
	var d pdu.Data
	d.SetCCCID(cid)
	d.SetTTAG(ttag)
	d.SetOffset(off)
	d.SetLength(n)
	c.put(pdu.TypeR2T, 0, d[8:], nil)
}

func (c *scriptTCP) run() error {
	b, err := c.fill(128)
	if err != nil {
		return err
	}
	c.r += 128
	want := (*pdu.IC)(b).DGST()
	c.s.digests = want != 0
	var ic pdu.IC
	ic.Common().Set(pdu.TypeICResp, 0, 128, 0, 128)
	ic.SetDGST(want)
	ic.SetMAXH2CDATA(c.s.maxH2C)
	c.out = append(c.out, ic[:]...)
	f := c.format()
	for {
		b, err := c.fill(8)
		if err != nil {
			return err
		}
		if (*pdu.Common)(b).Type() == pdu.TypeH2CTermReq {
			return io.EOF
		}
		if err := pdu.CheckHeader(b, true, f); err != nil {
			return err
		}
		plen := int((*pdu.Common)(b).PLEN())
		if b, err = c.fill(plen); err != nil {
			return err
		}
		c.r += plen
		hlen := int((*pdu.Common)(b).HLEN())
		if f.HeaderDigest && pdu.GetDigest(b[hlen:]) != pdu.Digest(b[:hlen]) {
			return errors.New("header digest")
		}
		var data []byte
		if n := pdu.DataLength(b, f); n > 0 {
			pdo := int((*pdu.Common)(b).PDO())
			data = b[pdo : pdo+n]
			if f.DataDigest && pdu.GetDigest(b[pdo+n:]) != pdu.Digest(data) {
				return errors.New("data digest")
			}
		}
		switch (*pdu.Common)(b).Type() {
		case pdu.TypeCapsuleCmd:
			c.command(*(*pdu.CapsuleCmd)(b).SQE(), data)
		case pdu.TypeH2CData:
			d := (*pdu.Data)(b)
			p := c.pending[d.CCCID()]
			if p == nil || d.TTAG() != d.CCCID()^0x5555 {
				return errors.New("H2CData for nothing")
			}
			copy(p.buf[d.Offset():], data)
			if d.Common().Flags()&pdu.FlagLast != 0 && int(d.Offset()+d.Length()) == len(p.buf) {
				delete(c.pending, d.CCCID())
				c.command(p.sqe, p.buf)
			}
		}
	}
}

// command fetches a command's data, if they are not in its capsule, and has it carried out.
func (c *scriptTCP) command(e nvme.SQE, data []byte) {
	n := e.SGL().Length()
	if toTarget(&e) && n > 0 && data == nil {
		c.pending[e.CID()] = &pendingWrite{e, make([]byte, n)}
		half := n / 2 &^ 3
		c.r2t(e.CID(), e.CID()^0x5555, 0, half)
		c.r2t(e.CID(), e.CID()^0x5555, half, n-half)
		return
	}
	c.conn.command(e, data)
}

func (c *scriptTCP) read(e *nvme.SQE, data []byte) {
	c.data(e.CID(), 0, data, pdu.FlagLast|pdu.FlagSuccess)
}

func (c *scriptTCP) event(cid uint16, dw0 uint32) {
	o := scriptTCP{s: c.s, c: c.c}
	o.reply(cid, 0, uint64(dw0))
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if _, err := c.c.Write(o.out); err != nil {
		c.s.t.Errorf("script target: event: %v", err)
	}
}

func toTarget(e *nvme.SQE) bool {
	if e.Opcode() == nvme.OpFabrics {
		return e.FCTYPE()&3 == 1
	}
	return e.Opcode()&3 == 1
}

// dataLen is how much data a command transfers.
func dataLen(e *nvme.SQE) uint32 {
	if e.SGL().Type() == nvme.SGLTypeKeyedDataBlock {
		return e.SGL().KeyedLength()
	}
	return e.SGL().Length()
}

// command carries out a command; data are those to the target.
func (c *scriptConn) command(e nvme.SQE, data []byte) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.s.seen[c.name(&e)]++
	if c.s.tracing {
		c.s.trace = append(c.s.trace, c.traced(&e))
	}
	if c.s.stalled != nil && c.s.stalled(&e) {
		return
	}
	if c.s.answer != nil && c.s.answer(c, &e) {
		return
	}
	switch {
	case e.Opcode() == nvme.OpFabrics:
		c.fabrics(&e, data)
	case c.qid == 0 && !c.raw:
		c.admin(&e)
	default:
		c.io(&e, data)
	}
}

func (c *scriptConn) fabrics(e *nvme.SQE, data []byte) {
	switch e.FCTYPE() {
	case nvme.FabricsConnect:
		c.qid = e.Connect().QID()
		c.raw = false
		if d := (*nvme.ConnectData)(data); d.Check() != nil {
			var cqe nvme.CQE
			cqe.SetConnectInvalid(d.Check())
			c.reply(e.CID(), cqe.Status(), cqe.Result64())
			return
		}
		if c.qid == 0 {
			c.s.cc = 0
		}
		c.reply(e.CID(), 0, 7)
	case nvme.FabricsPropertySet:
		c.s.cc = nvme.CC(e.Property().VALUE())
		c.reply(e.CID(), 0, 0)
	case nvme.FabricsPropertyGet:
		v := uint64(0)
		switch e.Property().OFST() {
		case nvme.PropCAP:
			v = uint64(nvme.CAP(0).WithMQES(63).WithTO(1 + uint8(c.s.capTO.Load())).WithCSS(nvme.CAPCSSNVM))
		case nvme.PropVS:
			v = uint64(nvme.Version2_0)
		case nvme.PropCSTS:
			if c.s.cc.EN() {
				v |= uint64(nvme.CSTSRDY)
			}
			if c.s.cc.SHN() != 0 {
				v |= uint64(nvme.CSTSSHSTComplete)
			}
		}
		c.reply(e.CID(), 0, v)
	default:
		c.reply(e.CID(), 0, 0)
	}
}

func (c *scriptConn) admin(e *nvme.SQE) {
	send := func(b []byte) { c.wire.read(e, b) }
	switch e.Opcode() {
	case nvme.AdminIdentify:
		b := make([]byte, nvme.IdentifySize)
		switch e.Identify().CNS() {
		case nvme.CNSController:
			id := (*nvme.IdentifyController)(b)
			id.SetSQES(0x66)
			id.SetCQES(0x44)
			id.SetIOCCSZ(uint32(64+c.s.inCapsule) / 16)
			id.SetIORCSZ(1)
			id.SetOAES(nvme.AECNamespace)
			id.SetACL(3)
			id.SetMDTS(8)
			id.SetCQT(uint16(c.s.cqtMS.Load()))
			if c.s.disconnects.Load() {
				id.SetOFCS(nvme.OFCSDisconnect)
			}
			if c.s.credit != 0 {
				id.SetExtension(1, nvme.ExtCredits)
			}
			if c.s.log != nil {
				id.SetCNTRLTYPE(nvme.CNTRLTYPEDiscovery)
				id.SetOAES(nvme.AECDiscovery)
			}
		case nvme.CNSNamespace:
			if e.NSID() != 1 {
				break
			}
			n := (*nvme.IdentifyNamespace)(b)
			n.SetNSZE(units.Blocks(len(c.s.disk) / 512))
			n.SetNCAP(n.NSZE())
			n.SetLBAF(0, nvme.MakeLBAFormat(9))
			n.SetSSD(c.s.credit.SSD())
		case nvme.CNSActiveNSList:
			(*nvme.NSList)(b).Fill(e.NSID(), []uint32{1})
		}
		send(b)
	case nvme.AdminSetFeatures:
		v := uint64(e.Features().Value())
		if e.Features().FID() == nvme.FIDExtensions {
			v |= uint64(c.s.credit) << 32
		}
		c.reply(e.CID(), 0, v)
	case nvme.AdminGetLogPage:
		b := make([]byte, e.GetLog().LenBytes())
		switch e.GetLog().LID() {
		case nvme.LIDChangedNS:
			(*nvme.NSList)(b).Fill(0, []uint32{1, 5})
		case nvme.LIDDiscovery:
			if off := e.GetLog().LPO(); off < uint64(len(c.s.log)) {
				copy(b, c.s.log[off:])
			}
		}
		send(b)
	case nvme.AdminAsyncEvent:
		cid := e.CID()
		c.s.aers = append(c.s.aers, func(dw0 uint32) { c.wire.event(cid, dw0) })
	default:
		c.reply(e.CID(), 0, 0)
	}
}

func (c *scriptConn) io(e *nvme.SQE, data []byte) {
	n := dataLen(e)
	off := uint64(e.SLBA()) * 512
	switch e.Opcode() {
	case nvme.CmdRead:
		b := c.s.disk[off : off+uint64(n)]
		c.wire.read(e, b)
	case nvme.CmdWrite:
		copy(c.s.disk[off:], data)
		c.reply(e.CID(), 0, uint64(c.s.credit)<<32)
	case nvme.CmdCompare:
		st := nvme.Success
		if !bytes.Equal(c.s.disk[off:off+uint64(n)], data) {
			st = nvme.CompareFailure | nvme.DNR
		}
		c.reply(e.CID(), st, 0)
	case nvme.CmdDSM:
		size, st := units.Blocks(len(c.s.disk)/512), nvme.Success
		for ; len(data) > 0; data = data[nvme.DSMRangeSize:] {
			if r := (*nvme.DSMRange)(data); size.Contains(r.SLBA(), r.NLB()) {
				clear(c.s.disk[r.SLBA()*512:][:r.NLB()*512])
			} else {
				st = nvme.LBAOutOfRange | nvme.DNR
			}
		}
		c.reply(e.CID(), st, 0)
	default:
		c.reply(e.CID(), 0, 0)
	}
}
