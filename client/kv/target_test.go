package kv

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/tcp/pdu"
	"jbofd/internal/testutil/loopback"
)

// target is a small key-value target over TCP: namespace 2 stores keys and values in a map, and namespace 1 has empty
// blocks. It is neither complete nor strict.
type target struct {
	t testing.TB
	// address is where it listens; stop ends the listener.
	address string
	stop    func()
	wg      sync.WaitGroup
	// mdts is MDTS, maxValue is KVVML, room, if not 0, is the maximum number of keys.
	mdts     uint8
	maxValue uint32
	room     int
	// maxListed bounds the keys of one List. errorOnDelete is the feature KVErrorOnDelete.
	maxListed     int
	errorOnDelete bool
	inCapsule     int
	csi           nvme.CSI
	credit        nvme.Credit
	// extended: it grants extended key-value. forgetful: it keeps no identities, and says so of every retry.
	extended, forgetful bool
	// quiet, if not nil, has I/O queue 3, that of an OpQueue, served by answerQuietly.
	quiet []byte

	mu     sync.Mutex
	cc     nvme.CC // of the latest association
	values map[string][]byte
	keys   []string // sorted
	conns  []net.Conn
	seen   map[uint8]int // I/O commands by opcode
	// about are the versions of values, done the results of writes by their identity, retries counts retries that have
	// found it, version is the last one given.
	about map[string]about
	done  map[[2]uint64]uint64
	// answered is what writers have said: no write with a lower sequence number comes.
	answered map[writer]uint64
	retries  int
	version  uint64
	keep     uint32 // of the last identity
	// before, if set, gets each I/O command first and may answer it, or drop it.
	before func(e *nvme.SQE) (st nvme.Status, how verdict)
	// ranges, if set, answers commands for ranges: with data and a result, or with a status.
	ranges func(q *nvme.KVRangeSQE, data []byte) (answer []byte, result uint64, st nvme.Status)
}

type about struct {
	version uint64
	expires uint32
}

type verdict uint8

const (
	carryOut    verdict = iota
	answer              // with the status
	drop                // no answer
	breakOff            // carry out the command, then cut the connection instead of responding
	breakBefore         // cut the connection
	interrupt           // carry out the command, and answer with the status
)

func newTarget(t testing.TB) *target {
	ln := loopback.Listen(t)
	s := &target{t: t, address: ln.Addr().String(), mdts: 8, maxValue: 1 << 20, maxListed: 1 << 20, inCapsule: 8192,
		csi:    nvme.CSIKV,
		values: map[string][]byte{}, seen: map[uint8]int{}, about: map[string]about{}, done: map[[2]uint64]uint64{},
		answered: map[writer]uint64{}}
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
			s.conns = append(s.conns, c)
			s.mu.Unlock()
			s.wg.Add(1)
			go func() {
				defer s.wg.Done()
				defer c.Close()
				w := &conn{s: s, c: c, in: make([]byte, 2<<20), pending: map[uint16]pending{}}
				var op *net.OpError
				if err := w.run(); err != nil && !errors.Is(err, io.EOF) && !errors.As(err, &op) {
					t.Errorf("target: %v", err)
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

// addr returns what client.Options needs. Connections see what was set before it was called.
func (t *target) addr() string {
	t.mu.Lock() // as every connection does
	defer t.mu.Unlock()
	return t.address
}

// cut closes every connection.
func (t *target) cut() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.conns {
		c.Close()
	}
	t.conns = nil
}

func (t *target) count(opcode uint8) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.seen[opcode]
}

// with changes the target's configuration.
func (t *target) with(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f()
}

// set stores a value without a command.
func (t *target) set(key string, value []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.store(key, value)
}

func (t *target) store(key string, value []byte) {
	if i, found := slices.BinarySearch(t.keys, key); !found {
		t.keys = slices.Insert(t.keys, i, key)
	}
	t.values[key] = bytes.Clone(value)
	t.version++
	t.about[key] = about{version: t.version}
}

func (t *target) remove(key string) {
	delete(t.values, key)
	delete(t.about, key)
	if i, found := slices.BinarySearch(t.keys, key); found {
		t.keys = slices.Delete(t.keys, i, i+1)
	}
}

// onIO sets before.
func (t *target) onIO(f func(e *nvme.SQE) (nvme.Status, verdict)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.before = f
}

type pending struct {
	sqe nvme.SQE
	buf []byte
}

// conn is one connection of a target.
type conn struct {
	s       *target
	c       net.Conn
	in, out []byte
	r, w    int
	qid     uint16
	pending map[uint16]pending
	broken  bool
	wide    bool // the command has a completion with a result of 64 bits
}

func (c *conn) fill(n int) ([]byte, error) {
	for c.w-c.r < n {
		if len(c.out) > 0 {
			if _, err := c.c.Write(c.out); err != nil {
				return nil, err
			}
			c.out = c.out[:0]
		}
		if c.broken {
			return nil, io.EOF
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

func (c *conn) put(t pdu.Type, flags uint8, rest, data []byte) {
	var h [32]byte
	n := 8 + copy(h[8:], rest)
	pdo := 0
	if len(data) > 0 {
		pdo = n
	}
	(*pdu.Common)(h[:]).Set(t, flags, uint8(n), uint8(pdo), uint32(n+len(data)))
	c.out = append(append(c.out, h[:n]...), data...)
}

func (c *conn) reply(cid uint16, st nvme.Status, dw0 uint64) {
	var e nvme.CQE
	e.SetCID(cid)
	e.SetStatus(st)
	if c.wide {
		e.SetSQID(uint16(c.s.credit.Units()))
	} else if c.qid != 0 {
		dw0 |= uint64(c.s.credit) << 32
	}
	e.SetResult64(dw0)
	c.put(pdu.TypeCapsuleResp, 0, e[:], nil)
}

// data sends data, and then a completion with dw0.
func (c *conn) data(cid uint16, data []byte, dw0 uint64) {
	if len(data) > 0 {
		var d pdu.Data
		d.SetCCCID(cid)
		d.SetLength(uint32(len(data)))
		c.put(pdu.TypeC2HData, pdu.FlagLast, d[8:], data)
	}
	c.reply(cid, 0, dw0)
}

func (c *conn) run() error {
	if _, err := c.fill(pdu.ICLen); err != nil {
		return err
	}
	c.r += pdu.ICLen
	var ic pdu.IC
	ic.Common().Set(pdu.TypeICResp, 0, pdu.ICLen, 0, pdu.ICLen)
	ic.SetMAXH2CDATA(128 << 10)
	c.out = append(c.out, ic[:]...)
	for {
		if c.qid == 3 && c.r == c.w {
			c.s.mu.Lock()
			quiet := c.s.quiet
			c.s.mu.Unlock()
			if quiet != nil {
				if _, err := c.c.Write(c.out); err != nil {
					return err
				}
				return answerQuietly(c.c, quiet)
			}
		}
		b, err := c.fill(8)
		if err != nil {
			return err
		}
		if (*pdu.Common)(b).Type() == pdu.TypeH2CTermReq {
			return errors.New("the host ends the connection for a fault")
		}
		if err := pdu.CheckHeader(b, true, pdu.Format{}); err != nil {
			return err
		}
		n := int((*pdu.Common)(b).PLEN())
		if b, err = c.fill(n); err != nil {
			return err
		}
		c.r += n
		var data []byte
		if n := pdu.DataLength(b, pdu.Format{}); n > 0 {
			data = b[(*pdu.Common)(b).PDO():][:n]
		}
		switch (*pdu.Common)(b).Type() {
		case pdu.TypeCapsuleCmd:
			c.capsule(*(*pdu.CapsuleCmd)(b).SQE(), data)
		case pdu.TypeH2CData:
			d := (*pdu.Data)(b)
			p := c.pending[d.CCCID()]
			copy(p.buf[d.Offset():], data)
			if int(d.Offset()+d.Length()) == len(p.buf) {
				delete(c.pending, d.CCCID())
				c.command(&p.sqe, p.buf)
			}
		}
	}
}

// capsule fetches a command's data if they are not with it, and has it carried out.
func (c *conn) capsule(e nvme.SQE, data []byte) {
	toTarget, _ := nvme.DataDirection(e.Opcode())
	if n := e.SGL().Length(); e.Opcode() != nvme.OpFabrics && toTarget && n > 0 && data == nil {
		c.pending[e.CID()] = pending{e, make([]byte, n)}
		var d pdu.Data
		d.SetCCCID(e.CID())
		d.SetLength(n)
		c.put(pdu.TypeR2T, 0, d[8:], nil)
		return
	}
	c.command(&e, data)
}

func (c *conn) command(e *nvme.SQE, data []byte) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	switch {
	case e.Opcode() == nvme.OpFabrics:
		c.fabrics(e)
	case c.qid == 0:
		c.admin(e)
	default:
		c.s.seen[e.Opcode()]++
		how, st := carryOut, nvme.Success
		if c.s.before != nil {
			if st, how = c.s.before(e); how == answer {
				c.reply(e.CID(), st, 0)
			}
		}
		at := len(c.out)
		if how == carryOut || how == breakOff || how == interrupt {
			c.io(e, data)
		}
		if how == interrupt {
			c.out = c.out[:at]
			c.reply(e.CID(), st, 0)
		}
		if how == breakOff || how == breakBefore {
			c.out, c.broken = c.out[:at], true
		}
	}
}

func (c *conn) fabrics(e *nvme.SQE) {
	v := uint64(0)
	switch e.FCTYPE() {
	case nvme.FabricsConnect:
		if c.qid = e.Connect().QID(); c.qid == 0 {
			c.s.cc = 0
		}
		v = 7
	case nvme.FabricsPropertyGet:
		switch e.Property().OFST() {
		case nvme.PropCAP:
			v = uint64(nvme.CAP(0).WithMQES(255).WithTO(4).WithCSS(nvme.CAPCSSNVM | nvme.CAPCSSIOCS))
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
	case nvme.FabricsPropertySet:
		if cc := nvme.CC(e.Property().VALUE()); e.Property().OFST() == nvme.PropCC && cc.CSS() != nvme.CCCSSIOCS {
			c.s.t.Errorf("CC.CSS is %d, want %d: all I/O command sets", cc.CSS(), nvme.CCCSSIOCS)
		}
		c.s.cc = nvme.CC(e.Property().VALUE())
	}
	var q nvme.CQE
	q.SetCID(e.CID())
	q.SetResult64(v)
	c.put(pdu.TypeCapsuleResp, 0, q[:], nil)
}

func (c *conn) admin(e *nvme.SQE) {
	switch e.Opcode() {
	case nvme.AdminIdentify:
		c.identify(e)
	case nvme.AdminSetFeatures, nvme.AdminGetFeatures:
		v := uint64(e.Features().Value())
		if e.Features().FID() == nvme.FIDExtensions {
			v = uint64(c.s.extensions()&e.Features().Value()) | uint64(c.s.credit)<<32
		}
		c.reply(e.CID(), 0, v)
	default:
		c.reply(e.CID(), 0, 0)
	}
}

func (c *conn) identify(e *nvme.SQE) {
	b := make([]byte, nvme.IdentifySize)
	switch i := e.Identify(); {
	case i.CNS() == nvme.CNSController:
		id := (*nvme.IdentifyController)(b)
		id.SetSQES(0x66)
		id.SetCQES(0x44)
		id.SetIOCCSZ(uint32(64+c.s.inCapsule) / 16)
		id.SetIORCSZ(1)
		id.SetMDTS(c.s.mdts)
		if x := c.s.extensions(); x != 0 {
			id.SetExtension(1, x)
		}
	case i.CNS() == nvme.CNSNSDescriptors:
		csi := nvme.CSINVM
		if e.NSID() == 2 {
			csi = c.s.csi
		}
		copy(b, nvme.AppendNSDescriptor(nil, nvme.NIDTCSI, []byte{byte(csi)}))
	case i.CNS() == nvme.CNSNamespaceCSI && i.CSI() == nvme.CSIKV && e.NSID() == 2:
		id := (*nvme.IdentifyNamespaceKV)(b)
		id.SetNSZE(1 << 30)
		id.SetNUSE(uint64(len(c.s.keys)))
		id.SetSSD(c.s.credit.SSD())
		var f nvme.KVFormat
		f.SetKVKML(nvme.MaxKVKey)
		f.SetKVVML(c.s.maxValue)
		id.SetKVF(0, f)
	}
	var d pdu.Data
	d.SetCCCID(e.CID())
	d.SetLength(uint32(len(b)))
	c.put(pdu.TypeC2HData, pdu.FlagLast|pdu.FlagSuccess, d[8:], b)
}

func (c *conn) io(e *nvme.SQE, data []byte) {
	s, k, cid := c.s, e.KV(), e.CID()
	c.wide = s.extended && nvme.KVVersioned(e.Opcode())
	defer func() { c.wide = false }()
	var buf [nvme.MaxKVKey]byte
	key := string(k.Key(&buf))
	old, exists := s.values[key]
	switch {
	case e.NSID() != 2:
		c.reply(cid, nvme.InvalidNamespaceOrFormat|nvme.DNR, 0)
	case nvme.KVRangeCommand(e.Opcode()) && s.ranges != nil:
		c.ranged(e, data)
	case !k.ValidKey():
		c.reply(cid, nvme.InvalidKeySize|nvme.DNR, 0)
	case k.LenBytes() != e.SGL().Length():
		c.reply(cid, nvme.InvalidField|nvme.DNR, 0)
	case nvme.KVExtended(e.Opcode()) && !s.extended:
		c.reply(cid, nvme.InvalidOpcode|nvme.DNR, 0)
	case nvme.KVVersioned(e.Opcode()):
		c.write(e, key, data)
	case e.Opcode() == nvme.CmdKVList:
		list := nvme.NewKVList(make([]byte, k.LenBytes()))
		at, _ := slices.BinarySearch(s.keys, key)
		for _, key := range s.keys[at:min(at+s.maxListed, len(s.keys))] {
			list, _ = list.Append([]byte(key))
		}
		c.data(cid, list, 0)
	case e.Opcode() == nvme.CmdKVStore:
		switch o := k.Options(); {
		case o&nvme.KVStoreMustExist != 0 && !exists:
			c.reply(cid, nvme.KeyDoesNotExist|nvme.DNR, 0)
		case o&nvme.KVStoreMustNotExist != 0 && exists:
			c.reply(cid, nvme.KeyExists|nvme.DNR, 0)
		case k.LenBytes() > s.maxValue:
			c.reply(cid, nvme.InvalidValueSize|nvme.DNR, 0)
		case !exists && s.room > 0 && len(s.keys) >= s.room:
			c.reply(cid, nvme.CapacityExceeded|nvme.DNR, 0)
		default:
			s.store(key, data)
			c.reply(cid, 0, 0)
		}
	case e.Opcode() == nvme.CmdKVDelete && (exists || !s.errorOnDelete):
		if exists {
			s.remove(key)
		}
		c.reply(cid, 0, 0)
	case !exists:
		c.reply(cid, nvme.KeyDoesNotExist|nvme.DNR, 0)
	case e.Opcode() == nvme.CmdKVXRetrieve:
		var h nvme.KVReadHeader
		h.SetVersion(s.about[key].version)
		h.SetExpires(s.about[key].expires)
		c.data(cid, append(h[:], old[:min(len(old), int(k.LenBytes())-len(h))]...), uint64(len(old)))
	case e.Opcode() == nvme.CmdKVRetrieve:
		c.data(cid, old[:min(len(old), int(k.LenBytes()))], uint64(len(old)))
	default: // Exist
		c.reply(cid, 0, 0)
	}
}

// open connects to s and opens namespace 2.
func open(t testing.TB, s *target, o Options) *Namespace {
	t.Helper()
	ctx := testContext(t)
	c, err := client.Connect(ctx, client.Options{Address: s.addr(), SubNQN: "nqn.2026-11.example.jbofd:test", Queues: 2,
		QPairs: 1, QueueDepth: 128,
		ReconnectDelay: time.Millisecond, CtrlLossTimeout: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	n, err := Open(ctx, c, 2, o)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func openQueue(t testing.TB, n *Namespace) *OpQueue {
	t.Helper()
	q, err := n.OpenQueue(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { q.Close() })
	return q
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// pattern returns n bytes that depend on a seed.
func pattern(n int, seed uint64) []byte {
	b := make([]byte, 0, n+8)
	for i := uint64(0); len(b) < n; i++ {
		b = binary.LittleEndian.AppendUint64(b, seed<<32+i)
	}
	return b[:n]
}

// oneHash gives all keys of the same first byte the same hash.
func oneHash(key []byte) (h [nvme.MaxKVKey]byte) {
	copy(h[:], fmt.Sprintf("hash of %c", key[0]))
	return h
}
