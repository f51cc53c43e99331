package pcie

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"jbofd/internal/nvme"
)

// Config describes how a controller is used.
type Config struct {
	Function Function
	// AdminTimeout bounds each admin command; 0: 10 s.
	AdminTimeout time.Duration
	// Activation is how long an activation of firmware may take at least, whatever the controller says; 0: 10 s.
	Activation time.Duration
	// PageBytes is the size of a memory page of the host; 0: that of the system.
	PageBytes int
}

// Properties are what a controller reports of itself, checked.
type Properties struct {
	Model, Serial, Firmware string
	// MaxTransfer is the longest data of a command in bytes; a multiple of the page size.
	MaxTransfer int
	// Entries is the greatest length of a Ring, a power of two.
	Entries int
	// SGL: data may be described by an SGL data block, whatever its length and alignment to 4.
	SGL bool
	// WriteZeroes and DSM: the controller has the commands. MaxZeroes bounds a Write Zeroes command in bytes, in
	// addition to its 65,536 blocks, and MaxRange a range of Dataset Management in blocks.
	WriteZeroes, DSM bool
	MaxZeroes        int64
	MaxRange         int64
	// VolatileCache: completed writes may be lost until a Flush.
	VolatileCache bool
	// AtomicBlocks is the longest write that a power loss does not tear, in blocks; at least 1.
	AtomicBlocks int
	// Events is how many event requests may be outstanding, at least 1. Notices are those of AECNamespace and
	// AECFirmware that it can report. Activation is how long it may pause to activate firmware:
	// what it says, or Config.Activation if that is more.
	Events     int
	Notices    uint32
	Activation time.Duration
	// WarningKelvin and CriticalKelvin are the temperatures from which on it is too warm; 0: it does not say.
	WarningKelvin, CriticalKelvin uint16
}

// Controller is an NVMe controller. One goroutine calls its methods, but any may call Alloc, and PageBytes, a constant.
type Controller struct {
	cfg    Config
	fn     Function
	cap    nvme.CAP
	page   int
	stride int

	admin *Ring
	// data is a page for the data of an admin command. dataAt and adminsAt are IOVAs, adminsAt of the admin queues.
	data     []byte
	dataAt   uint64
	adminsAt uint64
	// asked has the outstanding event requests, by slot, listen is how many there should be. events are the results
	// that Events has not returned yet.
	asked  map[int]bool
	listen int
	events []nvme.AER

	props Properties
	// shadows are the pages of shadow doorbells and event indexes, shadowsAt their IOVA. shadowing: the controller uses
	// them. The admin queue does not use them, as in other hosts.
	shadowing bool
	shadows   []byte
	shadowsAt uint64
	// mu guards taken, all memory of Alloc.
	mu    sync.Mutex
	taken [][]byte
	// queues is how many pairs of I/O queues the controller has granted.
	queues int
}

// NewController returns the controller of a function. Enable has to be called before it is used.
//
// Errors: ErrGone; ErrUnsuited, if it lacks the NVM command set, its smallest page is larger than the host's, or it has
// fewer than two interrupts; ErrInvalidResponse, if CAP.MPSMIN > CAP.MPSMAX, or CAP.MQES is 0; the system's for memory.
func NewController(cfg Config) (*Controller, error) {
	if cfg.AdminTimeout == 0 {
		cfg.AdminTimeout = 10 * time.Second
	}
	if cfg.Activation == 0 {
		cfg.Activation = 10 * time.Second
	}
	if cfg.PageBytes == 0 {
		cfg.PageBytes = unix.Getpagesize()
	}
	c := &Controller{cfg: cfg, fn: cfg.Function, asked: map[int]bool{}}
	c.cap = nvme.CAP(c.fn.Load32(nvme.PropCAP)) | nvme.CAP(c.fn.Load32(nvme.PropCAP+4))<<32
	c.stride = 4 << c.cap.DSTRD()
	least, most := 4096<<c.cap.MPSMIN(), 4096<<c.cap.MPSMAX()
	c.page = min(max(4096, least), most)
	switch {
	case c.fn.Load32(nvme.PropCSTS) == gone:
		return nil, ErrGone
	case c.cap.CSS()&nvme.CAPCSSNVM == 0:
		return nil, fmt.Errorf("%w: CAP.CSS is %#x, without the NVM command set", ErrUnsuited, c.cap.CSS())
	case least > most:
		return nil, fmt.Errorf("%w: CAP.MPSMIN is %d and CAP.MPSMAX %d", ErrInvalidResponse, c.cap.MPSMIN(),
			c.cap.MPSMAX())
	case c.page > cfg.PageBytes:
		return nil, fmt.Errorf("%w: its smallest page has %d bytes, the host's has %d", ErrUnsuited, c.page,
			cfg.PageBytes)
	case c.fn.Vectors() < 2:
		return nil, fmt.Errorf("%w: it has %d interrupts, want 2 or more", ErrUnsuited, c.fn.Vectors())
	case c.cap.MQES() == 0:
		return nil, fmt.Errorf("%w: CAP.MQES is 0, want 1 or more", ErrInvalidResponse)
	}
	sq, cq := ringBytes(adminEntries)
	memory, at, err := c.Alloc(sq + cq + pages(c.page))
	if err != nil {
		return nil, err
	}
	c.adminsAt = at
	c.admin = newRing(0, adminEntries, memory, c.fn, c.stride)
	c.data, c.dataAt = memory[sq+cq:], at+uint64(sq+cq)
	return c, nil
}

const (
	// gone is what registers read as when the device has vanished.
	gone = 0xFFFFFFFF
	// adminEntries is the length of the admin queues.
	adminEntries = 32
	// statusPoll is how often CSTS is read while it is to change.
	statusPoll = time.Millisecond
)

// pages rounds up to whole pages of the host.
func pages(n int) int {
	p := unix.Getpagesize()
	return (n + p - 1) / p * p
}

// Alloc returns n bytes of zeroed memory, rounded up to whole pages, which is mapped for the device, and its IOVA. It
// stays allocated until Free. Any goroutine may call it.
//
// Errors: the system's.
func (c *Controller) Alloc(n int) (memory []byte, address uint64, err error) {
	memory, err = unix.Mmap(-1, 0, pages(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, 0, fmt.Errorf("%d bytes of memory: %w", n, err)
	}
	if address, err = c.fn.Map(memory); err != nil {
		return nil, 0, errors.Join(err, unix.Munmap(memory))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.taken = append(c.taken, memory)
	return memory, address, nil
}

// Free returns all memory of Alloc to the system. Before, the device must have lost its access to it (Revoke), and
// nobody may use a Ring after it.
//
// Errors: the system's.
func (c *Controller) Free() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var errs []error
	for _, m := range c.taken {
		errs = append(errs, unix.Munmap(m))
	}
	c.taken = nil
	return errors.Join(errs...)
}

// PageBytes is the size of a page of the controller.
func (c *Controller) PageBytes() int { return c.page }

// Properties are those of the controller, after Enable.
func (c *Controller) Properties() Properties { return c.props }

// Queues is how many pairs of I/O queues there may be, after Enable; each has an interrupt of its own.
func (c *Controller) Queues() int { return c.queues }

// Disable resets the controller (CC.EN = 0): outstanding commands are not completed any more, and it does not access
// memory. It waits for at most CAP.TO, which is up to 128 s.
//
// Errors: ErrGone; ErrTimeout: then the function has to be reset.
func (c *Controller) Disable() error {
	cc := nvme.CC(c.fn.Load32(nvme.PropCC))
	if cc.EN() {
		c.fn.Store32(nvme.PropCC, uint32(cc.WithEN(false).WithSHN(nvme.SHNNone)))
	}
	return c.await("CSTS.RDY to be 0", func(s nvme.CSTS) bool { return !s.RDY() })
}

// Shutdown shuts the controller down normally (CC.SHN), so that it makes the data in its volatile cache durable. It
// waits for at most CAP.TO. RTD3E, the controller's own bound for a shutdown, may be longer.
//
// Errors: as Disable.
func (c *Controller) Shutdown() error {
	cc := nvme.CC(c.fn.Load32(nvme.PropCC))
	if !cc.EN() {
		return nil
	}
	c.fn.Store32(nvme.PropCC, uint32(cc.WithSHN(nvme.SHNNormal)))
	return c.await("the shutdown", func(s nvme.CSTS) bool { return s.SHST() == 2 })
}

// Alive reads CSTS.
//
// Errors: ErrGone; ErrFatal.
func (c *Controller) Alive() error {
	switch s := c.fn.Load32(nvme.PropCSTS); {
	case s == gone:
		return ErrGone
	case nvme.CSTS(s).CFS():
		return fmt.Errorf("%w: CSTS is %#x", ErrFatal, s)
	}
	return nil
}

func (c *Controller) await(what string, is func(nvme.CSTS) bool) error {
	limit := time.Duration(max(c.cap.TO(), 1)) * 500 * time.Millisecond
	for end := time.Now().Add(limit); ; time.Sleep(statusPoll) {
		s := c.fn.Load32(nvme.PropCSTS)
		switch late := time.Now().After(end); {
		case s == gone:
			return ErrGone
		case is(nvme.CSTS(s)):
			return nil
		case late:
			return fmt.Errorf("%w: %s, CSTS is %#x after %v", ErrTimeout, what, s, limit)
		}
	}
}

// Enable resets the controller, creates the admin queue, enables the controller, identifies it, and sets the number of
// queues. All rings but the admin queue are lost by it.
//
// Errors: ErrGone, ErrTimeout, ErrFatal, ErrInvalidResponse, ErrUnsuited; a StatusError; the system's for memory.
func (c *Controller) Enable() error {
	if err := c.Disable(); err != nil {
		return err
	}
	clear(c.asked)
	c.events = c.events[:0]
	c.admin.reset()
	c.admin.shadow = nil
	c.fn.Store32(nvme.PropAQA, nvme.AQA(adminEntries))
	sq, _ := ringBytes(adminEntries)
	c.store64(nvme.PropASQ, c.adminsAt)
	c.store64(nvme.PropACQ, c.adminsAt+uint64(sq))
	mps := uint8(bits.Len(uint(c.page)) - 13)
	cc := nvme.CC(0).WithCSS(nvme.CCCSSNVM).WithMPS(mps).WithIOSQES(nvme.CCIOSQES64).WithIOCQES(nvme.CCIOCQES16)
	c.fn.Store32(nvme.PropCC, uint32(cc.WithEN(true)))
	err := c.await("CSTS.RDY to be 1", func(s nvme.CSTS) bool { return s.RDY() || s.CFS() })
	if err != nil {
		return err
	}
	if err := c.Alive(); err != nil {
		return err
	}
	if err := c.identify(); err != nil {
		return err
	}
	if err := c.askQueues(); err != nil {
		return err
	}
	if err := c.askEvents(); err != nil {
		return err
	}
	return c.askShadows()
}

func (c *Controller) store64(offset int, v uint64) {
	c.fn.Store32(offset, uint32(v))
	c.fn.Store32(offset+4, uint32(v>>32))
}

// identify sets the properties.
func (c *Controller) identify() error {
	err := c.Do(func(e *nvme.SQE) {
		e.SetOpcode(nvme.AdminIdentify)
		e.Identify().SetCNS(nvme.CNSController)
		e.SetPRP1(c.dataAt)
	}, nil)
	if err != nil {
		return fmt.Errorf("identify controller: %w", err)
	}
	id := nvme.IdentifyController(c.data[:nvme.IdentifySize])
	c.shadowing = id.OACS()&nvme.OACSDoorbellBuffer != 0
	c.props, err = MakeProperties(&id, c.cap)
	c.props.Activation = max(c.props.Activation, c.cfg.Activation)
	if err != nil || !c.props.WriteZeroes && !c.props.DSM {
		return err
	}
	err = c.Do(func(e *nvme.SQE) {
		e.SetOpcode(nvme.AdminIdentify)
		e.Identify().SetCNS(nvme.CNSControllerCSI)
		e.Identify().SetCSI(nvme.CSINVM)
		e.SetPRP1(c.dataAt)
	}, nil)
	var refused StatusError
	switch {
	case err == nil:
		limits := nvme.IdentifyControllerNVM(c.data[:nvme.IdentifySize])
		c.props.limit(&limits, c.cap)
	case !errors.As(err, &refused):
		return fmt.Errorf("identify controller of the NVM command set: %w", err)
	}
	return nil
}

// limit sets the limits of the NVM command set that MDTS does not cover: WZSL and DMRSL. A controller that does not
// report them, as those before NVMe 2.0, may mean MDTS; MakeProperties has set that.
func (p *Properties) limit(c *nvme.IdentifyControllerNVM, caps nvme.CAP) {
	p.MaxZeroes, p.MaxRange = math.MaxInt64, math.MaxUint32
	if z := c.WZSL(); z > 0 && z < 40 {
		p.MaxZeroes = int64(4096) << caps.MPSMIN() << z
	}
	if n := c.DMRSL(); n > 0 {
		p.MaxRange = int64(n)
	}
}

// MakeProperties returns the properties that Identify Controller and CAP report.
//
// Errors: ErrUnsuited, if the queue entries have other sizes than 64 and 16 bytes.
func MakeProperties(id *nvme.IdentifyController, caps nvme.CAP) (Properties, error) {
	if sq, cq := id.SQES(), id.CQES(); sq&15 > nvme.CCIOSQES64 || cq&15 > nvme.CCIOCQES16 {
		return Properties{}, fmt.Errorf("%w: SQES is %#x and CQES %#x, want entries of 64 and 16 bytes", ErrUnsuited,
			sq, cq)
	}
	p := Properties{Model: id.MN(), Serial: id.SN(), Firmware: id.FR(), SGL: id.SGLS()&3 == nvme.SGLSSupported,
		WriteZeroes: id.ONCS()&nvme.ONCSWriteZeroes != 0, DSM: id.ONCS()&nvme.ONCSDSM != 0,
		VolatileCache: id.VWC()&nvme.VWCPresent != 0, AtomicBlocks: int(id.AWUPF()) + 1, MaxTransfer: maxTransfer,
		MaxRange: math.MaxUint32, Events: int(id.AERL()) + 1,
		Notices:    id.OAES() & (nvme.AECNamespace | nvme.AECFirmware),
		Activation: time.Duration(id.MTFA()) * 100 * time.Millisecond, WarningKelvin: id.WCTEMP(),
		CriticalKelvin: id.CCTEMP()}
	least := 4096 << caps.MPSMIN()
	if m := id.MDTS(); m > 0 && m < 32 && least<<m < maxTransfer {
		p.MaxTransfer = least << m
	}
	p.MaxZeroes = int64(p.MaxTransfer)
	p.Entries = 1 << (bits.Len(uint(min(int(caps.MQES())+1, MaxEntries))) - 1)
	return p, nil
}

// maxTransfer bounds a transfer in bytes: a PRP list in one page of 4 KiB describes it, wherever it begins in a page.
const maxTransfer = 1 << 20

// askQueues asks for as many pairs of I/O queues as there are interrupts for.
func (c *Controller) askQueues() error {
	want := max(c.fn.Vectors()-1, 1)
	var dw0 uint32
	err := c.Do(func(e *nvme.SQE) {
		e.SetOpcode(nvme.AdminSetFeatures)
		e.Features().SetFID(nvme.FIDNumberOfQueues)
		e.Features().SetValue(nvme.NumberOfQueues(uint16(want), uint16(want)))
	}, &dw0)
	if err != nil {
		return fmt.Errorf("number of queues: %w", err)
	}
	sqs, cqs := nvme.ParseNumberOfQueues(dw0)
	c.queues = min(want, sqs, cqs)
	return nil
}

// askShadows gives the controller pages for shadow doorbells, if it can use them.
func (c *Controller) askShadows() error {
	if !c.shadowing {
		return nil
	}
	if c.shadows == nil {
		memory, at, err := c.Alloc(2 * c.page)
		if err != nil {
			return err
		}
		c.shadows, c.shadowsAt = memory, at
	}
	clear(c.shadows)
	err := c.Do(func(e *nvme.SQE) {
		e.SetOpcode(nvme.AdminDoorbellBuffer)
		e.SetPRP1(c.shadowsAt)
		e.SetPRP2(c.shadowsAt + uint64(c.page))
	}, nil)
	var refused StatusError
	if errors.As(err, &refused) { // the controller works without them
		c.shadowing = false
		return nil
	}
	return err
}

// share makes an empty ring use the shadow doorbells, if the controller uses them.
func (c *Controller) share(r *Ring) {
	at := 2 * int(r.id) * c.stride
	if !c.shadowing || at+2*c.stride > c.page {
		r.shadow = nil
		return
	}
	w := func(offset int) *atomic.Uint32 { return word(c.shadows, offset) }
	r.shadow = &shadow{sq: w(at), cq: w(at + c.stride), sqEvent: w(c.page + at), cqEvent: w(c.page + at + c.stride)}
	// With the values of an earlier ring of this QID, the first commands would not reach the doorbell register.
	for _, of := range [...]*atomic.Uint32{r.shadow.sq, r.shadow.cq, r.shadow.sqEvent, r.shadow.cqEvent} {
		of.Store(0)
	}
}

// Do carries out an admin command, which set fills in, and waits for it, at most AdminTimeout. If the controller is
// activating firmware then, Do waits for the end of that, for at most Properties.Activation, and for AdminTimeout from
// there. It stores DW0 of the completion in result, unless that is nil.
//
// Errors: a StatusError; ErrGone, ErrTimeout and ErrInvalidResponse, after which the controller has to be reset.
func (c *Controller) Do(set func(e *nvme.SQE), result *uint32) error {
	if c.admin.Free() == 0 {
		return fmt.Errorf("%w: all admin commands are under way", ErrTimeout)
	}
	e, want := c.admin.Next()
	set(e)
	c.admin.Submit()
	end := time.Now().Add(c.cfg.AdminTimeout)
	paused := end.Add(c.props.Activation)
	for ; ; c.fn.Vector(0).Wait(end) {
		for {
			place, cqe, ok, err := c.admin.Reap()
			switch {
			case err != nil:
				return err
			case !ok:
			case place == want:
				c.admin.Seen()
				if result != nil {
					*result = cqe.DW0()
				}
				if !cqe.Status().OK() {
					return StatusError(cqe.Status())
				}
				return nil
			default:
				c.told(place, &cqe)
				continue
			}
			break
		}
		c.admin.Seen()
		if c.fn.Load32(nvme.PropCSTS) == gone {
			return ErrGone
		}
		switch now := time.Now(); {
		case now.Before(end):
		case c.Paused() && now.Before(paused):
			end = now.Add(c.cfg.AdminTimeout)
		default:
			return fmt.Errorf("%w: admin command %#02x after %v", ErrTimeout, e.Opcode(), c.cfg.AdminTimeout)
		}
	}
}

// StatusError is the status of an admin command that was not successful.
type StatusError nvme.Status

func (e StatusError) Error() string { return "status " + nvme.Status(e).String() }

// Namespace returns the NSID and the Identify data of a namespace, which is checked. nsid 0 means the first active one.
//
// Errors: as Do; ErrInvalidResponse also if the data is invalid; ErrUnsuited, if the namespace is not active, or has
// metadata.
func (c *Controller) Namespace(nsid uint32) (uint32, *nvme.IdentifyNamespace, error) {
	if nsid == 0 {
		err := c.Do(func(e *nvme.SQE) {
			e.SetOpcode(nvme.AdminIdentify)
			e.Identify().SetCNS(nvme.CNSActiveNSList)
			e.SetPRP1(c.dataAt)
		}, nil)
		if err != nil {
			return 0, nil, fmt.Errorf("list of namespaces: %w", err)
		}
		if nsid = binary.LittleEndian.Uint32(c.data); nsid == 0 {
			return 0, nil, fmt.Errorf("%w: no namespace is active", ErrUnsuited)
		}
	}
	err := c.Do(func(e *nvme.SQE) {
		e.SetOpcode(nvme.AdminIdentify)
		e.SetNSID(nsid)
		e.Identify().SetCNS(nvme.CNSNamespace)
		e.SetPRP1(c.dataAt)
	}, nil)
	if err != nil {
		return 0, nil, fmt.Errorf("identify namespace %d: %w", nsid, err)
	}
	id := nvme.IdentifyNamespace(c.data[:nvme.IdentifySize])
	switch {
	case id.Inactive():
		return 0, nil, fmt.Errorf("%w: namespace %d is not active", ErrUnsuited, nsid)
	case id.Check() != nil:
		return 0, nil, fmt.Errorf("%w: namespace %d: %w", ErrInvalidResponse, nsid, id.Check())
	case id.Format().MetadataBytes() > 0:
		return 0, nil, fmt.Errorf("%w: namespace %d has %d bytes of metadata a block, want 0", ErrUnsuited, nsid,
			id.Format().MetadataBytes())
	}
	return nsid, &id, nil
}

// NewRing makes a ring, for which CreateRing creates the controller's queues, and returns its IOVA. id, the QID, is
// from 1 to Queues, entries at most Properties.Entries. Its memory is kept until Free.
//
// Errors: the system's.
func (c *Controller) NewRing(id uint16, entries int) (r *Ring, address uint64, err error) {
	sq, cq := ringBytes(entries)
	memory, address, err := c.Alloc(sq + cq)
	if err != nil {
		return nil, 0, err
	}
	return newRing(id, entries, memory, c.fn, c.stride), address, nil
}

// CreateRing empties a ring, whose IOVA is address, and creates its two queues, with an interrupt vector.
//
// Errors: as Do.
func (c *Controller) CreateRing(r *Ring, address uint64, vector int) error {
	r.shadow = nil
	r.reset()
	c.share(r)
	sq, _ := ringBytes(len(r.places))
	err := c.Do(func(e *nvme.SQE) {
		e.SetOpcode(nvme.AdminCreateIOCQ)
		e.SetPRP1(address + uint64(sq))
		q := e.Queue()
		q.SetQID(r.id)
		q.SetEntries(len(r.places))
		q.SetCompletion(vector)
	}, nil)
	if err != nil {
		return fmt.Errorf("completion queue %d: %w", r.id, err)
	}
	err = c.Do(func(e *nvme.SQE) {
		e.SetOpcode(nvme.AdminCreateIOSQ)
		e.SetPRP1(address)
		q := e.Queue()
		q.SetQID(r.id)
		q.SetEntries(len(r.places))
		q.SetSubmission(r.id)
	}, nil)
	if err != nil {
		err = fmt.Errorf("submission queue %d: %w", r.id, err)
		var status StatusError
		if errors.As(err, &status) {
			err = errors.Join(err, c.deleteQueue(r, nvme.AdminDeleteIOCQ))
		}
	}
	return err
}

// DeleteRing deletes the queues of a ring. The controller does not access its memory any more. Its commands are lost.
//
// Errors: as Do.
func (c *Controller) DeleteRing(r *Ring) error {
	if err := c.deleteQueue(r, nvme.AdminDeleteIOSQ); err != nil {
		return err
	}
	return c.deleteQueue(r, nvme.AdminDeleteIOCQ)
}

func (c *Controller) deleteQueue(r *Ring, op uint8) error {
	err := c.Do(func(e *nvme.SQE) {
		e.SetOpcode(op)
		e.Queue().SetQID(r.id)
	}, nil)
	if err != nil {
		return fmt.Errorf("deleting queue %d: %w", r.id, err)
	}
	return nil
}

// Abort asks the controller to abort a command, by its CID. The controller may complete the command or not.
//
// Errors: as Do.
func (c *Controller) Abort(r *Ring, cid uint16) error {
	return c.Do(func(e *nvme.SQE) {
		e.SetOpcode(nvme.AdminAbort)
		e.Abort().SetSQID(r.id)
		e.Abort().SetCID(cid)
	}, nil)
}
