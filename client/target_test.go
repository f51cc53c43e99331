package client

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
)

// script is a small target for tests of the socket side: it holds a byte array, answers Read and Write
// with blocks of 512 bytes, and everything else with success. It is neither complete nor strict.
type script struct {
	t         testing.TB
	ln        net.Listener
	wg        sync.WaitGroup
	inCapsule int
	maxH2C    uint32
	digests   bool
	// onCommand, if set, may take a command over: it returns true when it has answered or
	// wants no answer.
	onCommand func(c *scriptConn, sqe *nvme.SQE, data []byte) bool

	mu    sync.Mutex
	disk  []byte
	conns []net.Conn
}

type scriptConn struct {
	s    *script
	c    net.Conn
	in   []byte
	r, w int
	out  []byte
	// pending writes by CID: where the data goes.
	pending map[uint16]*pendingWrite
}

type pendingWrite struct {
	sqe nvme.SQE
	buf []byte
}

func newScript(t testing.TB, diskBytes int) *script {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &script{t: t, ln: ln, disk: make([]byte, diskBytes), maxH2C: 128 << 10, inCapsule: 8192}
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, c)
			s.mu.Unlock()
			s.wg.Add(1)
			go func() {
				defer s.wg.Done()
				defer c.Close()
				sc := &scriptConn{s: s, c: c, in: make([]byte, 2<<20), pending: map[uint16]*pendingWrite{}}
				if err := sc.run(); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
					var op *net.OpError
					if !errors.As(err, &op) {
						t.Errorf("script target: %v", err)
					}
				}
			}()
		}
	}()
	t.Cleanup(func() {
		ln.Close()
		s.cut()
		s.wg.Wait()
	})
	return s
}

func (s *script) addr() string { return s.ln.Addr().String() }

// cut closes every connection.
func (s *script) cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		c.Close()
	}
	s.conns = nil
}

func (c *scriptConn) fill(n int) ([]byte, error) {
	for c.w-c.r < n {
		if len(c.out) > 0 {
			if _, err := c.c.Write(c.out); err != nil {
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

func (c *scriptConn) format() pdu.Format {
	return pdu.Format{HeaderDigest: c.s.digests, DataDigest: c.s.digests}
}

func (c *scriptConn) put(t pdu.Type, flags uint8, rest []byte, data []byte) {
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

func (c *scriptConn) reply(cid uint16, st nvme.Status, result uint64) {
	var e nvme.CQE
	e.SetCID(cid)
	e.SetStatus(st)
	e.SetResult64(result)
	c.put(pdu.TypeCapsuleResp, 0, e[:], nil)
}

func (c *scriptConn) data(cid uint16, off uint32, data []byte, flags uint8) {
	var d pdu.Data
	d.SetCCCID(cid)
	d.SetOffset(off)
	d.SetLength(uint32(len(data)))
	c.put(pdu.TypeC2HData, flags, d[8:], data)
}

func (c *scriptConn) r2t(cid, ttag uint16, off, n uint32) {
	var d pdu.Data
	d.SetCCCID(cid)
	d.SetTTAG(ttag)
	d.SetOffset(off)
	d.SetLength(n)
	c.put(pdu.TypeR2T, 0, d[8:], nil)
}

func (c *scriptConn) run() error {
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

func (c *scriptConn) command(e nvme.SQE, data []byte) {
	toTarget := e.Opcode() != nvme.OpFabrics && e.Opcode()&3 == 1
	n := e.SGL().Length()
	if toTarget && n > 0 && data == nil {
		c.pending[e.CID()] = &pendingWrite{e, make([]byte, n)}
		half := n / 2 &^ 3
		c.r2t(e.CID(), e.CID()^0x5555, 0, half)
		c.r2t(e.CID(), e.CID()^0x5555, half, n-half)
		return
	}
	if c.s.onCommand != nil && c.s.onCommand(c, &e, data) {
		return
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	off := e.SLBA() * 512
	switch e.Opcode() {
	case nvme.CmdRead:
		b := c.s.disk[off : off+uint64(n)]
		c.data(e.CID(), 0, b, pdu.FlagLast|pdu.FlagSuccess)
	case nvme.CmdWrite:
		copy(c.s.disk[off:], data)
		c.reply(e.CID(), 0, 0)
	case nvme.CmdCompare:
		st := nvme.Success
		if !bytes.Equal(c.s.disk[off:off+uint64(n)], data) {
			st = nvme.CompareFailure | nvme.DNR
		}
		c.reply(e.CID(), st, 0)
	default:
		c.reply(e.CID(), 0, 0)
	}
}
