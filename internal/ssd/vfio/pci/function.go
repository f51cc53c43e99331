package pci

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"jbofd/internal/eventfd"
	"jbofd/internal/ssd/vfio/pcie"
)

const (
	// maxVectors is how many interrupts are used at most: one for the admin queue, and one for each I/O queue.
	maxVectors = 17
	// firstAddress is the first IOVA that Map assigns. It is at 4 GiB, because the reserved regions of known IOMMUs,
	// such as the MSI window, are below.
	firstAddress = 1 << 32
	// registersBytes is how much of BAR 0 is mapped: the properties, and the doorbells of maxVectors queues.
	registersBytes = 0x2000

	// allOnes is what registers of a device that has vanished read as.
	allOnes = 0xFFFFFFFF

	// The command register in the configuration space.
	configCommand = 4
	commandMemory = 1 << 1
	commandMaster = 1 << 2
	commandNoINTx = 1 << 10

	containerDevice = "vfio/vfio"
	groupDevices    = "vfio"
)

// Function implements pcie.Function.
type Function struct {
	info                     *Info
	container, group, device int
	config                   uint64 // offset of the configuration space in device
	canReset                 bool

	// bar are the registers; nil: revoked. Revoke clears it, without a lock: the caller has made sure before that no
	// other goroutine uses the registers.
	bar     pcie.MMIO
	vectors []*eventfd.Event
	removed *eventfd.Event
	// memory are the mappings of MapBAR, which Revoke ends.
	memory []pcie.MMIO
	// masks is the table of MSI-X, with unmasked why there is none.
	masks    maskTable
	unmasked error

	// mu guards what follows.
	mu      sync.Mutex
	next    uint64 // the IOVA of the next Map, but for avoid
	avoid   []addresses
	maps    []mapped
	revoked bool
}

type mapped struct {
	at    uint64 // IOVA
	bytes int
}

// Open opens an NVMe controller that has the driver vfio-pci.
//
// Errors: ErrAddress, ErrAbsent (also if it is no NVMe controller), ErrDriver, ErrIOMMU and ErrInUse, each with what to
// do; the system's.
func (b Bus) Open(address string) (*Function, error) {
	i, err := b.Find(address)
	if err != nil {
		return nil, err
	}
	switch {
	case !i.NVMe():
		return nil, fmt.Errorf("%s: %w: its class is %#06x, want %#06x, an NVMe controller", i.Address, ErrAbsent,
			i.Class, nvmeClass)
	case i.Driver == "":
		return nil, fmt.Errorf("%s: %w, it has none: jbofctl ssd bind %s", i.Address, ErrDriver, i.Address)
	case i.Driver != Driver:
		return nil, fmt.Errorf("%s: %w, but %q: jbofctl ssd bind %s", i.Address, ErrDriver, i.Driver, i.Address)
	case i.Group == "":
		return nil, fmt.Errorf("%s: %w: switch the IOMMU on in the firmware, and with intel_iommu=on or amd_iommu=on "+
			"for the kernel", i.Address, ErrIOMMU)
	}
	avoid, err := b.barsOf(i.Address)
	if err != nil {
		return nil, err
	}
	f := &Function{info: i, container: -1, group: -1, device: -1, next: firstAddress, avoid: avoid}
	if err := f.open(b); err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", i.Address, err), f.Close())
	}
	return f, nil
}

func (f *Function) open(b Bus) (err error) {
	if f.container, err = unix.Open(b.dev(containerDevice), unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return fmt.Errorf("%s: %w", b.dev(containerDevice), err)
	}
	if v, err := request(f.container, getAPIVersion, 0); err != nil || v != 0 {
		return fmt.Errorf("the kernel's VFIO has version %d, want 0: %w", v, err)
	}
	path := filepath.Join(b.dev(groupDevices), f.info.Group)
	if f.group, err = unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0); errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%w: a process has %s", ErrInUse, path)
	} else if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	s, err := getGroupStatus(f.group)
	if err != nil {
		return fmt.Errorf("status of group %s: %w", f.info.Group, err)
	}
	if s.flags&groupViable == 0 {
		return fmt.Errorf("%w: other functions of IOMMU group %s have other drivers; all must have that one, or none",
			ErrDriver, f.info.Group)
	}
	if err := setContainer(f.group, f.container); err != nil {
		return fmt.Errorf("container of group %s: %w", f.info.Group, err)
	}
	if _, err := request(f.container, setIOMMU, type1v2); err != nil {
		return fmt.Errorf("IOMMU of type 1: %w", err)
	}
	if f.device, err = deviceFD(f.group, f.info.Address); err != nil {
		return fmt.Errorf("device of group %s: %w", f.info.Group, err)
	}
	unix.CloseOnExec(f.device)
	if err := f.openRegisters(); err != nil {
		return err
	}
	if err := f.openInterrupts(); err != nil {
		return err
	}
	f.masks, f.unmasked = f.openMasks()
	return nil
}

// openRegisters maps BAR 0, and lets the device access memory.
func (f *Function) openRegisters() error {
	d, err := getDeviceInfo(f.device)
	if err != nil {
		return fmt.Errorf("device info: %w", err)
	}
	f.canReset = d.flags&deviceCanReset != 0
	r, err := getRegionInfo(f.device, regionBAR0)
	if err != nil {
		return fmt.Errorf("BAR 0: %w", err)
	}
	if r.size < registersBytes || r.flags&regionMmap == 0 {
		return fmt.Errorf("BAR 0 has %d bytes and flags %#x, want %d that can be mapped", r.size, r.flags,
			registersBytes)
	}
	bar, err := unix.Mmap(f.device, int64(r.offset), registersBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mapping BAR 0: %w", err)
	}
	f.bar = bar
	c, err := getRegionInfo(f.device, regionConfig)
	if err != nil {
		return fmt.Errorf("configuration space: %w", err)
	}
	f.config = c.offset
	return f.setCommand(commandMemory|commandMaster|commandNoINTx, 0)
}

// setCommand changes bits of the command register.
func (f *Function) setCommand(set, reset uint16) error {
	var b [2]byte
	if _, err := unix.Pread(f.device, b[:], int64(f.config+configCommand)); err != nil {
		return fmt.Errorf("command register: %w", err)
	}
	v := binary.LittleEndian.Uint16(b[:])&^reset | set
	binary.LittleEndian.PutUint16(b[:], v)
	if _, err := unix.Pwrite(f.device, b[:], int64(f.config+configCommand)); err != nil {
		return fmt.Errorf("command register: %w", err)
	}
	return nil
}

func (f *Function) openInterrupts() error {
	i, err := getIRQInfo(f.device, irqMSIX)
	if err != nil {
		return fmt.Errorf("MSI-X: %w", err)
	}
	n := min(int(i.count), maxVectors)
	if n < 2 {
		return fmt.Errorf("it has %d MSI-X interrupts, want 2 or more", n)
	}
	fds := make([]int, 0, n)
	for range n {
		e, err := eventfd.New()
		if err != nil {
			return err
		}
		f.vectors = append(f.vectors, e)
		fds = append(fds, e.FD())
	}
	if err := setIRQs(f.device, irqMSIX, fds); err != nil {
		return fmt.Errorf("MSI-X: %w", err)
	}
	if f.removed, err = eventfd.New(); err != nil {
		return err
	}
	if err := setIRQs(f.device, irqRequest, []int{f.removed.FD()}); err != nil {
		return fmt.Errorf("event of the removal: %w", err)
	}
	return nil
}

// Load32 implements pcie.Registers.
func (f *Function) Load32(offset int) uint32 {
	if f.bar == nil {
		return allOnes
	}
	return f.bar.Load32(offset)
}

// Store32 implements pcie.Registers.
//
// hot: 0 allocs
func (f *Function) Store32(offset int, v uint32) {
	if f.bar != nil {
		f.bar.Store32(offset, v)
	}
}

// Map implements pcie.Function.
func (f *Function) Map(memory []byte) (uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.revoked {
		return 0, os.ErrClosed
	}
	at := place(f.next, len(memory), f.avoid)
	if err := mapDMA(f.container, memory, at); err != nil {
		err = fmt.Errorf("%d bytes for the device: %w", len(memory), err)
		var l unix.Rlimit
		if errors.Is(err, unix.ENOMEM) && unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l) == nil &&
			l.Cur != unix.RLIM_INFINITY {
			err = fmt.Errorf("%w: RLIMIT_MEMLOCK limits locked memory to %d bytes; raise it (LimitMEMLOCK=infinity)",
				err, l.Cur)
		}
		return 0, err
	}
	f.next = at + uint64(len(memory))
	f.maps = append(f.maps, mapped{at, len(memory)})
	return at, nil
}

// BARBytes implements pcie.Function.
func (f *Function) BARBytes(bar uint8) int64 {
	if bar >= bars {
		return 0
	}
	r, err := getRegionInfo(f.device, regionBAR0+uint32(bar))
	if err != nil || r.flags&regionMmap == 0 || r.size > math.MaxInt64 {
		return 0
	}
	return int64(r.size)
}

// MapBAR implements pcie.Function. The kernel maps BARs uncached, so that the processor neither combines accesses nor
// keeps them back.
func (f *Function) MapBAR(bar uint8, offset, bytes int64) (pcie.Memory, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.revoked {
		return nil, os.ErrClosed
	}
	if bar >= bars || bytes <= 0 || offset < 0 {
		return nil, fmt.Errorf("%d bytes at %#x of BAR %d", bytes, offset, bar)
	}
	m, first, err := f.mapBAR(uint32(bar), offset, bytes)
	if err != nil {
		return nil, err
	}
	f.memory = append(f.memory, m)
	return m[first:], nil
}

// mapBAR maps a range of a BAR, which begins at first of the mapping.
//
// Errors: the range is not in the BAR, or cannot be mapped.
func (f *Function) mapBAR(bar uint32, offset, bytes int64) (m pcie.MMIO, first int, err error) {
	r, err := getRegionInfo(f.device, regionBAR0+bar)
	if err != nil {
		return nil, 0, fmt.Errorf("BAR %d: %w", bar, err)
	}
	if r.flags&regionMmap == 0 || uint64(offset) > r.size || uint64(bytes) > r.size-uint64(offset) {
		return nil, 0, fmt.Errorf("BAR %d has %d bytes and flags %#x, want %d at %#x that can be mapped", bar, r.size,
			r.flags, bytes, offset)
	}
	from := offset &^ (int64(unix.Getpagesize()) - 1)
	first = int(offset - from)
	m, err = unix.Mmap(f.device, int64(r.offset)+from, first+int(bytes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	if err != nil {
		return nil, 0, fmt.Errorf("mapping %d bytes of BAR %d: %w", bytes, bar, err)
	}
	return m, first, nil
}

// Vectors implements pcie.Function.
func (f *Function) Vectors() int { return len(f.vectors) }

// Vector implements pcie.Function.
func (f *Function) Vector(i int) *eventfd.Event { return f.vectors[i] }

// Removed implements pcie.Function.
func (f *Function) Removed() *eventfd.Event { return f.removed }

// Reset implements pcie.Function.
func (f *Function) Reset() error {
	if !f.canReset {
		return errors.New("the function cannot be reset")
	}
	if _, err := request(f.device, deviceReset, 0); err != nil {
		return fmt.Errorf("reset of the function: %w", err)
	}
	return f.setCommand(commandMemory|commandMaster|commandNoINTx, 0)
}

// Revoke implements pcie.Function.
func (f *Function) Revoke() { _ = f.revoke() }

func (f *Function) revoke() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.revoked {
		return nil
	}
	f.revoked = true
	var errs []error
	if f.device >= 0 && f.bar != nil {
		_ = f.setCommand(0, commandMaster) // it may be gone
	}
	for _, m := range f.maps {
		errs = append(errs, unmapDMA(f.container, m.at, m.bytes))
	}
	f.maps = nil
	errs = append(errs, f.masks.close())
	for _, m := range f.memory {
		errs = append(errs, unix.Munmap(m))
	}
	f.memory = nil
	if f.bar != nil {
		errs = append(errs, unix.Munmap(f.bar))
		f.bar = nil
	}
	for _, fd := range []int{f.device, f.group, f.container} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	return errors.Join(errs...)
}

// Close implements pcie.Function.
func (f *Function) Close() error {
	errs := []error{f.revoke()}
	for _, e := range append(f.vectors, f.removed) {
		if e != nil {
			errs = append(errs, e.Close())
		}
	}
	f.vectors, f.removed = nil, nil
	return errors.Join(errs...)
}
