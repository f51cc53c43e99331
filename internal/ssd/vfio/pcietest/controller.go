// Package pcietest has an NVMe controller in memory, for tests of package pcie and of what builds on it. It reads
// queues and data where a device would, through addresses that were mapped for it, and keeps account of accesses to
// others. It may drop commands, lie, fail, or vanish.
package pcietest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"jbofd/internal/eventfd"
	"jbofd/internal/nvme"
	"jbofd/internal/ssd/vfio/pcie"
)

// Config describes a controller.
type Config struct {
	// SizeBytes is the capacity of its namespace, BlockShift the logarithm of the size of a block; 0: 9.
	SizeBytes  int64
	BlockShift uint8
	// MDTS limits transfers to 4096 << MDTS bytes; 0: it does not.
	MDTS uint8
	// WZSL limits Write Zeroes to 4096 << WZSL bytes, 0: it does not; negative: it does not say, and means MDTS.
	WZSL int
	// SGL, WriteZeroes, DSM and Shadows are what it can do.
	SGL, WriteZeroes, DSM, Shadows bool
	// Entries is the greatest length of a queue, 0: 1024. Vectors is how many interrupts it has, 0: 9.
	Entries, Vectors int
	// AERL is how many event requests it takes, less 1. Unmasked: it reports events again before their log page is
	// read.
	AERL     uint8
	Unmasked bool
	// PMR and CMB are the memory that it has; nil: it has none.
	PMR *PMR
	CMB *CMB
	// Manual: I/O commands are carried out by Serve only.
	Manual bool
	// NoMasks: interrupts cannot be masked. Forgets: interrupts that became due under a mask are not sent after it, as
	// of a device that does not keep to the specification.
	NoMasks, Forgets bool
	// AtUnmask has a Manual controller carry out what is in I/O queues when a mask is about to end.
	AtUnmask bool
	// Identify may change what the controller says of itself and of its namespace; nil: nothing.
	Identify func(c *nvme.IdentifyController, n *nvme.IdentifyNamespace)
}

var _ pcie.Function = (*Controller)(nil)

// Controller implements pcie.Function.
type Controller struct {
	cfg     Config
	vectors []*eventfd.Event
	// maskOf and dueOf are the bits of MSI-X for each vector: its mask, and whether its interrupt is pending.
	maskOf, dueOf []bool
	removed       *eventfd.Event
	kick          chan struct{}
	ended         chan struct{}

	mu         sync.Mutex
	disk       []byte
	regs       map[int]uint32
	maps       []mapping
	nextAt     uint64
	queues     map[uint16]*queue
	rung       map[uint16]bool // queues whose doorbell was written to
	requests   []uint16        // CIDs of event requests
	asked      int             // event requests since the beginning
	events     []nvme.AER      // not reported yet
	masked     map[uint8]bool  // log pages that must be read before their events are reported again
	wanted     uint32          // the Asynchronous Event Configuration
	smart      nvme.SMARTLog
	logs       map[uint8]int // log pages read
	shadowsAt  [2]uint64
	vanished   bool
	activating bool // no command is fetched
	revoked    bool
	closed     bool
	intercept  func(q uint16, e *nvme.SQE) Answer
	pmr, cmb   *memory
	sqe        nvme.SQE // the command that is being carried out
	cqe        nvme.CQE // its completion
	// What the driver has done.
	doorbells, masks int
	interrupts       []int // by vector
	commands         map[uint8]int
	resets           int
	strays           []string
	stuck            bool
	limit            int // of what serve carries out; 0: none
}

// Answer says what the controller does with a command.
type Answer struct {
	// Drop: it is never answered. Held: it is carried out, and never answered.
	Drop, Held bool
	// Status is what it ends with, without being carried out, unless it is Success.
	Status nvme.Status
	// Tell are events that are reported after the completion, with the same interrupt.
	Tell []nvme.AER
	// Corrupt may change the completion.
	Corrupt func(c *nvme.CQE)
}

type mapping struct {
	at     uint64
	memory []byte
}

type queue struct {
	id             uint16
	sqAt, cqAt     uint64
	entries        uint32
	head, tail     uint32 // of submissions
	cqTail, cqHead uint32
	phase          uint16
	vector         int
	created        bool // the submission queue, too
}

// New returns a controller that was reset.
func New(cfg Config) (*Controller, error) {
	if cfg.BlockShift == 0 {
		cfg.BlockShift = 9
	}
	if cfg.Entries == 0 {
		cfg.Entries = 1024
	}
	if cfg.Vectors == 0 {
		cfg.Vectors = 9
	}
	c := &Controller{cfg: cfg, kick: make(chan struct{}, 1), ended: make(chan struct{}),
		disk: make([]byte, cfg.SizeBytes), regs: map[int]uint32{}, nextAt: 1 << 32, queues: map[uint16]*queue{},
		rung: map[uint16]bool{}, commands: map[uint8]int{}, masked: map[uint8]bool{}, logs: map[uint8]int{}}
	for range cfg.Vectors + 1 {
		e, err := eventfd.New()
		if err != nil {
			return nil, err
		}
		c.vectors = append(c.vectors, e)
	}
	c.removed, c.vectors = c.vectors[cfg.Vectors], c.vectors[:cfg.Vectors]
	c.interrupts = make([]int, cfg.Vectors)
	c.maskOf, c.dueOf = make([]bool, cfg.Vectors), make([]bool, cfg.Vectors)
	cp := nvme.CAP(0).WithMQES(uint16(cfg.Entries - 1)).WithCQR(true).WithTO(2).WithCSS(nvme.CAPCSSNVM).WithMPSMAX(4)
	cp = c.addMemory(cp)
	c.regs[nvme.PropCAP], c.regs[nvme.PropCAP+4] = uint32(cp), uint32(cp>>32)
	c.regs[nvme.PropVS] = uint32(nvme.Version1_4)
	go c.run()
	return c, nil
}

// Intercept has f decide what happens to commands; nil: they are carried out.
func (c *Controller) Intercept(f func(q uint16, e *nvme.SQE) Answer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.intercept = f
}

// Vanish has all registers read as ones from now on, and nothing be answered.
func (c *Controller) Vanish() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.vanished = true
}

// Stick has the controller not become disabled any more until the function is reset.
func (c *Controller) Stick() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stuck = true
}

// Counts are how often something has happened.
type Counts struct {
	// Doorbells are writes to those of I/O queues, Masks those of masks.
	Doorbells, Masks, Resets int
	// Interrupts are those of I/O queues.
	Interrupts int
	Commands   map[uint8]int // I/O commands, by opcode
	// Strays are accesses to memory that was not mapped, or transfers that were described wrongly.
	Strays []string
}

// Counts returns what has happened.
func (c *Controller) Counts() Counts {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := Counts{Doorbells: c.doorbells, Masks: c.masks, Resets: c.resets, Commands: map[uint8]int{},
		Strays: append([]string(nil), c.strays...)}
	for _, k := range c.interrupts[1:] {
		n.Interrupts += k
	}
	for op, k := range c.commands {
		n.Commands[op] = k
	}
	return n
}

// Load32 implements pcie.Registers.
func (c *Controller) Load32(offset int) uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.vanished || c.revoked {
		return 0xFFFFFFFF
	}
	if offset == nvme.PropPMRSTS && c.pmr != nil {
		c.readPMRSTS()
	}
	return c.regs[offset]
}

// Store32 implements pcie.Registers.
func (c *Controller) Store32(offset int, v uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.vanished || c.revoked {
		return
	}
	switch {
	case c.memoryRegister(offset, v):
	case offset == nvme.PropCC:
		c.configure(nvme.CC(v))
	case offset >= nvme.PropDoorbells:
		i := (offset - nvme.PropDoorbells) / 4
		if i >= 2 {
			c.doorbells++
		}
		q := c.queues[uint16(i/2)]
		switch {
		case q == nil || v >= q.entries:
			c.stray("doorbell %d of no queue, or beyond its end: %d", i, v)
		case i%2 == 0:
			q.tail = v
		default:
			q.cqHead = v
		}
		if q != nil {
			c.rung[q.id] = true
		}
		c.wake()
	default:
		c.regs[offset] = v
	}
}

func (c *Controller) wake() {
	select {
	case c.kick <- struct{}{}:
	default:
	}
}

func (c *Controller) stray(format string, args ...any) {
	c.strays = append(c.strays, fmt.Sprintf(format, args...))
}

func (c *Controller) configure(cc nvme.CC) {
	was := nvme.CC(c.regs[nvme.PropCC])
	c.regs[nvme.PropCC] = uint32(cc)
	switch {
	case cc.EN() && !was.EN():
		aqa := c.regs[nvme.PropAQA]
		c.queues = map[uint16]*queue{0: {sqAt: c.reg64(nvme.PropASQ), cqAt: c.reg64(nvme.PropACQ),
			entries: aqa&0xfff + 1, phase: 1, created: true}}
		c.regs[nvme.PropCSTS] = uint32(nvme.CSTSRDY)
	case !cc.EN() && was.EN():
		if c.stuck {
			return
		}
		c.disable()
	case cc.SHN() != 0:
		c.regs[nvme.PropCSTS] = uint32(nvme.CSTS(c.regs[nvme.PropCSTS]).WithSHST(2))
	}
}

func (c *Controller) disable() {
	c.resets++
	c.queues, c.requests, c.shadowsAt = map[uint16]*queue{}, nil, [2]uint64{}
	c.events, c.masked, c.wanted, c.activating = nil, map[uint8]bool{}, 0, false
	c.regs[nvme.PropCSTS] = 0
}

func (c *Controller) reg64(offset int) uint64 {
	return uint64(c.regs[offset]) | uint64(c.regs[offset+4])<<32
}

// Map implements pcie.Function.
func (c *Controller) Map(memory []byte) (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.nextAt
	c.maps = append(c.maps, mapping{at, memory})
	c.nextAt += uint64(len(memory)+8191)&^4095 + 4096 // with a gap
	return at, nil
}

// Vectors implements pcie.Function.
func (c *Controller) Vectors() int { return len(c.vectors) }

// Vector implements pcie.Function.
func (c *Controller) Vector(i int) *eventfd.Event { return c.vectors[i] }

// Removed implements pcie.Function.
func (c *Controller) Removed() *eventfd.Event { return c.removed }

// Reset implements pcie.Function.
func (c *Controller) Reset() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stuck = false
	clear(c.maskOf)
	c.disable()
	c.resetMemory()
	c.regs[nvme.PropCC] = 0
	return nil
}

// Revoke implements pcie.Function.
func (c *Controller) Revoke() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.revoked, c.maps = true, nil
}

// Close implements pcie.Function.
func (c *Controller) Close() error {
	c.Revoke()
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.mu.Unlock()
	c.wake()
	<-c.ended
	errs := []error{c.removed.Close()}
	for _, e := range c.vectors {
		errs = append(errs, e.Close())
	}
	return errors.Join(errs...)
}

// memory returns n bytes at an address, or nil.
func (c *Controller) memory(at uint64, n int) []byte {
	for _, m := range c.maps {
		if at >= m.at && at+uint64(n) <= m.at+uint64(len(m.memory)) {
			return m.memory[at-m.at:][:n]
		}
	}
	if !c.revoked {
		c.stray("%d bytes at %#x were not mapped", n, at)
	}
	return nil
}

// run carries out commands.
func (c *Controller) run() {
	defer close(c.ended)
	for range c.kick {
		c.mu.Lock()
		if c.closed {
			c.mu.Unlock()
			return
		}
		for id := range c.rung {
			if c.activating {
				break
			}
			delete(c.rung, id)
			if id != 0 && c.cfg.Manual {
				continue
			}
			for q := c.queues[id]; q != nil && !c.vanished && c.serve(q); q = c.queues[id] {
			}
		}
		c.mu.Unlock()
	}
}

// serve carries out what is in a queue, and reports whether there was anything.
func (c *Controller) serve(q *queue) (any bool) {
	answered := false
	c.readShadows(q)
	for n := 0; q.created && q.head != q.tail && !c.revoked && (c.limit == 0 || n < c.limit); n++ {
		b := c.memory(q.sqAt+uint64(q.head)*nvme.SQESize, nvme.SQESize)
		if b == nil {
			return false
		}
		c.sqe = nvme.SQE(b)
		e := &c.sqe
		q.head = (q.head + 1) % q.entries
		any = true
		var a Answer
		if c.intercept != nil {
			a = c.intercept(q.id, e)
		}
		if a.Drop {
			continue
		}
		c.cqe = nvme.CQE{}
		cqe := &c.cqe
		st := a.Status
		if st.OK() {
			var later bool
			st, later = c.carryOut(q.id, e, cqe)
			if later || a.Held {
				continue
			}
		}
		cqe.SetCID(e.CID())
		cqe.SetStatus(st)
		if a.Corrupt != nil {
			a.Corrupt(cqe)
		}
		answered = c.complete(q, cqe) || answered
		c.events = append(c.events, a.Tell...)
	}
	if any && q.id == 0 {
		answered = c.report() || answered // with one interrupt
	}
	if answered && q.vector >= 0 {
		c.interrupt(q.vector)
	}
	return any
}

// readShadows takes the doorbells of a queue from memory, and asks to be told of the next change.
func (c *Controller) readShadows(q *queue) {
	if c.shadowsAt[0] == 0 || q.id == 0 {
		return
	}
	at := uint64(q.id) * 8
	if b := c.memory(c.shadowsAt[0]+at, 8); b != nil {
		if v := word(b).Load(); v < q.entries {
			q.tail = v
		}
		if v := word(b[4:]).Load(); v < q.entries {
			q.cqHead = v
		}
	}
	if b := c.memory(c.shadowsAt[1]+at, 8); b != nil {
		word(b).Store(q.tail)
		word(b[4:]).Store(q.cqHead)
	}
	// The host may have added to the queue meanwhile, and have read the old index.
	if b := c.memory(c.shadowsAt[0]+at, 8); b != nil && word(b).Load() != q.tail {
		c.rung[q.id] = true
		c.wake()
	}
}

func (c *Controller) complete(q *queue, cqe *nvme.CQE) bool {
	b := c.memory(q.cqAt+uint64(q.cqTail)*nvme.CQESize, nvme.CQESize)
	if b == nil {
		return false
	}
	if (q.cqTail+1)%q.entries == q.cqHead {
		c.stray("completion queue %d is full", q.id)
	}
	cqe.SetSQHD(uint16(q.head))
	cqe.SetSQID(q.id)
	copy(b[:12], cqe[:12])
	last := binary.LittleEndian.Uint32(cqe[12:])&^(1<<16) | uint32(q.phase)<<16
	word(b[12:]).Store(last)
	if q.cqTail = (q.cqTail + 1) % q.entries; q.cqTail == 0 {
		q.phase ^= 1
	}
	return true
}

func (c *Controller) carryOut(qid uint16, e *nvme.SQE, cqe *nvme.CQE) (st nvme.Status, later bool) {
	if qid == 0 {
		return c.admin(e, cqe)
	}
	c.commands[e.Opcode()]++
	if e.Opcode() == nvme.CmdFlush {
		return nvme.Success, false
	}
	if e.Opcode() == nvme.CmdDSM {
		return c.deallocate(e), false
	}
	first, ok1 := e.SLBA().Offset(c.cfg.BlockShift)
	n, ok2 := e.NLB().Bytes(c.cfg.BlockShift)
	if !ok1 || !ok2 || int64(first)+int64(n) > int64(len(c.disk)) {
		return nvme.LBAOutOfRange | nvme.DNR, false
	}
	at := c.disk[first:][:n]
	switch e.Opcode() {
	case nvme.CmdRead, nvme.CmdWrite:
		if c.cfg.MDTS > 0 && int(n) > 4096<<c.cfg.MDTS {
			c.stray("a transfer of %d bytes", n)
			return nvme.InvalidField | nvme.DNR, false
		}
		return c.transfer(e, at, e.Opcode() == nvme.CmdRead), false
	case nvme.CmdWriteZeroes:
		if c.cfg.WriteZeroes {
			if most := c.zeroes(); most > 0 && int(n) > most {
				c.stray("%d bytes of zeroes, at most %d", n, most)
			}
			clear(at)
			return nvme.Success, false
		}
	}
	return nvme.InvalidOpcode | nvme.DNR, false
}

func (c *Controller) deallocate(e *nvme.SQE) nvme.Status {
	b := c.memory(e.PRP1(), nvme.DSMRangeSize)
	if b == nil || !c.cfg.DSM {
		return nvme.InvalidField | nvme.DNR
	}
	r := nvme.DSMRange(b)
	first, ok1 := r.SLBA().Offset(c.cfg.BlockShift)
	n, ok2 := r.NLB().Bytes(c.cfg.BlockShift)
	if c.cfg.WZSL >= 0 && r.NLB() > 100 {
		c.stray("a range of %d blocks, at most 100", r.NLB())
	}
	if !ok1 || !ok2 || int64(first)+int64(n) > int64(len(c.disk)) {
		return nvme.LBAOutOfRange | nvme.DNR
	}
	clear(c.disk[first:][:n])
	return nvme.Success
}

// transfer moves the data of a command.
func (c *Controller) transfer(e *nvme.SQE, at []byte, toHost bool) nvme.Status {
	move := func(address uint64, n int) bool {
		b := c.memory(address, n)
		if b == nil {
			return false
		}
		if toHost {
			copy(b, at[:n])
		} else {
			copy(at[:n], b)
		}
		at = at[n:]
		return true
	}
	if e.PSDT() == nvme.PSDTSGL {
		if !c.cfg.SGL || e.SGL().Type() != nvme.SGLTypeDataBlock || int(e.SGL().Length()) != len(at) {
			c.stray("an SGL of type %d and %d bytes for %d", e.SGL().Type(), e.SGL().Length(), len(at))
			return nvme.InvalidField | nvme.DNR
		}
		if !move(e.SGL().Address(), len(at)) {
			return nvme.DataTransferError
		}
		return nvme.Success
	}
	const page = 4096
	ok := move(e.PRP1(), min(len(at), page-int(e.PRP1()%page)))
	switch {
	case !ok || len(at) == 0:
	case len(at) <= page:
		ok = e.PRP2()%page == 0 && move(e.PRP2(), len(at))
	default:
		for list := e.PRP2(); ok && len(at) > 0; list += 8 {
			b := c.memory(list, 8)
			if ok = b != nil; ok {
				p := binary.LittleEndian.Uint64(b)
				ok = p%page == 0 && move(p, min(len(at), page))
			}
		}
	}
	if !ok {
		c.stray("PRPs %#x, %#x", e.PRP1(), e.PRP2())
		return nvme.DataTransferError
	}
	return nvme.Success
}

// Revoked reports whether the controller has lost its access to memory.
func (c *Controller) Revoked() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.revoked
}
