package client

import (
	"context"
	"fmt"
	"sync/atomic"

	"jbofd/client/internal/host"
	"jbofd/internal/nvme"
	"jbofd/internal/units"
)

// Namespace is a block namespace of a controller. Any goroutine may call its methods. Offsets and lengths are in bytes
// and must be multiples of the block size.
//
// A method whose context ends returns at once, and its buffer is the caller's again. The host asks the target to abort
// the command, but the target may still carry it out, in part or in whole, after the call has returned
// (ErrIndeterminate): a program that cancels a write and then writes to the same place must expect either to be the
// last. See Controller for what happens to operations when the connection is lost.
//
// Errors of all methods: *StatusError (which matches ErrCompareFailed, ErrUnsupported, ErrNamespaceGone), ErrInvalid,
// ErrConnectionLost, ErrClosed, ErrIndeterminate, ErrProtocol; the context's.
type Namespace struct {
	c    *Controller
	nsid uint32
	geo  atomic.Pointer[geometry]
}

// geometry is the part of Identify that commands need.
type geometry struct {
	info        NamespaceInfo
	maxTransfer int // bytes of data per command
	shift       uint8
}

// setRW fills c with opcode for n bytes at off, which are whole blocks.
//
// hot: 0 allocs
func (g *geometry) setRW(c *Command, opcode uint8, off, n int64) {
	SetRW(c, opcode, g.info.NSID, uint64(units.ExtentOffset(off).LBA(g.shift)),
		uint32(units.Bytes(n).Blocks(g.shift)))
}

// NamespaceInfo describes a namespace.
type NamespaceInfo struct {
	NSID uint32
	// SizeBytes is the capacity, BlockSize the size of a logical block in bytes.
	SizeBytes int64
	BlockSize int
	// UUID, NGUID and EUI64 are zero where the target reports none.
	UUID, NGUID [16]byte
	EUI64       [8]byte
	// CSI is the command set: 0 NVM (blocks), 1 key value.
	CSI uint8
	// ANAGroup is the ANA group whose state applies to the namespace; 0: none.
	ANAGroup uint32
	// ReadOnly: the namespace is write protected.
	ReadOnly bool
	// SSD is the number of the drive in a jbofd node; 0 for other targets.
	SSD uint16
	// DeallocatedReadsZero: deallocated blocks read as zeroes.
	DeallocatedReadsZero bool
}

// maxDefaultTransfer bounds the data of one command if the target does not.
const maxDefaultTransfer = 1 << 20

// Namespace opens a namespace: it identifies it and learns its drive.
//
// Errors: ErrNamespaceGone if there is no namespace of this NSID; ErrUnsupported if it is not one of blocks; those of
// Namespace.
func (c *Controller) Namespace(ctx context.Context, nsid uint32) (*Namespace, error) {
	n := &Namespace{c: c, nsid: nsid}
	return n, n.Refresh(ctx)
}

// Refresh identifies the namespace again. Its size may have changed after an EventNamespaces.
func (n *Namespace) Refresh(ctx context.Context) error {
	d, err := n.c.Describe(ctx, n.nsid)
	if err != nil {
		return err
	}
	if d.CSI != uint8(nvme.CSINVM) {
		return fmt.Errorf("%w: namespace %d has command set %d, not blocks", ErrUnsupported, n.nsid, d.CSI)
	}
	g := geometry{info: NamespaceInfo{NSID: n.nsid, UUID: d.UUID, CSI: d.CSI}}
	var id nvme.IdentifyNamespace
	if err := n.c.Identify(ctx, nvme.CNSNamespace, n.nsid, id[:]); err != nil {
		return fmt.Errorf("namespace %d: %w", n.nsid, err)
	}
	if id.NSZE() == 0 {
		return fmt.Errorf("namespace %d: %w", n.nsid, ErrNamespaceGone)
	}
	if err := id.Check(); err != nil {
		return fmt.Errorf("%w: namespace %d: %w", ErrProtocol, n.nsid, err)
	}
	f := id.Format()
	if f.MetadataBytes() != 0 {
		return fmt.Errorf("%w: namespace %d has %d bytes of metadata per block", ErrUnsupported, n.nsid,
			f.MetadataBytes())
	}
	g.info.BlockSize, g.shift = 1<<f.Shift(), f.Shift()
	size, _ := id.NSZE().Bytes(f.Shift()) // Check has found it to be below 2^63
	g.info.SizeBytes = int64(size)
	g.info.NGUID, g.info.EUI64 = id.NGUID(), id.EUI64()
	g.info.ANAGroup = id.ANAGRPID()
	g.info.ReadOnly = id.NSATTR()&nvme.NSATTRWriteProtected != 0
	g.info.DeallocatedReadsZero = id.DLFEAT()&7 == nvme.DLFEATReadZeroes
	a, err := n.c.current(ctx)
	if err != nil {
		return err
	}
	if _, _, ok := a.id.Extension(); ok {
		g.info.SSD = id.SSD()
		if err := n.c.Locate(ctx, n.nsid, id.SSD()); err != nil {
			return fmt.Errorf("namespace %d: %w", n.nsid, err)
		}
	}
	g.maxTransfer = a.maxTransfer()
	if g.maxTransfer == 0 {
		g.maxTransfer = maxDefaultTransfer
	}
	g.maxTransfer = max(min(g.maxTransfer, g.info.BlockSize<<16), g.info.BlockSize)
	n.geo.Store(&g)
	return nil
}

// Info returns what the latest Refresh has found.
func (n *Namespace) Info() NamespaceInfo { return n.geo.Load().info }

// NSID returns the namespace identifier.
func (n *Namespace) NSID() uint32 { return n.nsid }

// Size returns the capacity in bytes.
func (n *Namespace) Size() int64 { return n.geo.Load().info.SizeBytes }

// BlockSize returns the size of a logical block in bytes.
func (n *Namespace) BlockSize() int { return n.geo.Load().info.BlockSize }

// MaxTransfer returns the most data in bytes of one command; longer reads and writes are split.
func (n *Namespace) MaxTransfer() int { return n.geo.Load().maxTransfer }

// WriteFlags modify a write.
type WriteFlags uint8

const (
	// FUA: the write is durable when it completes.
	FUA WriteFlags = 1 << iota
	// Deallocate, for WriteZeroes: the target may free the blocks, if they then read as zeroes.
	Deallocate
)

func (f WriteFlags) cdw12() (v uint32) {
	if f&FUA != 0 {
		v |= nvme.CDW12FUA
	}
	if f&Deallocate != 0 {
		v |= nvme.CDW12Deallocate
	}
	return v
}

// ReadAt reads len(p) bytes at offset off. It returns how many were read before an error.
func (n *Namespace) ReadAt(ctx context.Context, p []byte, off int64) (int, error) {
	return n.transfer(ctx, op{name: "Read", repeat: true}, nvme.CmdRead, 0, p, off)
}

// WriteAt writes p at offset off. It returns how many bytes were written before an error. Writes longer than
// MaxTransfer are split and not atomic.
func (n *Namespace) WriteAt(ctx context.Context, p []byte, off int64, flags WriteFlags) (int, error) {
	return n.transfer(ctx, op{name: "Write", repeat: true}, nvme.CmdWrite, flags.cdw12()&nvme.CDW12FUA, p, off)
}

// Compare compares p with the data at off.
//
// Errors: ErrCompareFailed if they differ.
func (n *Namespace) Compare(ctx context.Context, p []byte, off int64) error {
	_, err := n.transfer(ctx, op{name: "Compare", repeat: true}, nvme.CmdCompare, 0, p, off)
	return err
}

// transfer moves p in commands of at most MaxTransfer.
func (n *Namespace) transfer(
	ctx context.Context, o op, opcode uint8, cdw12 uint32, p []byte, off int64,
) (done int, err error) {
	g := n.geo.Load()
	if err := g.check(o.name, off, int64(len(p))); err != nil {
		return 0, err
	}
	for done < len(p) {
		k := min(len(p)-done, g.maxTransfer)
		cmds := [1]Command{{Data: p[done : done+k]}}
		var comps [1]Completion
		e := &cmds[0].SQE
		g.setRW(&cmds[0], opcode, off+int64(done), int64(k))
		e.SetCDW(12, e.CDW(12)|cdw12)
		if err := n.c.do(ctx, o, cmds[:], comps[:]); err != nil {
			return done, err
		}
		if err := host.CheckStatus(o.name, comps[0].Status); err != nil {
			return done, err
		}
		if opcode == nvme.CmdRead && int(comps[0].Received) != k {
			return done, fmt.Errorf("%w: Read: %d bytes of data, want %d", ErrProtocol, comps[0].Received, k)
		}
		done += k
	}
	return done, nil
}

// check returns an error unless a range consists of whole blocks of the namespace.
func (g *geometry) check(name string, off, n int64) error {
	bs := int64(g.info.BlockSize)
	if off < 0 || n < 0 || off%bs != 0 || n%bs != 0 || n > g.info.SizeBytes || off > g.info.SizeBytes-n {
		return fmt.Errorf("%w: %s of %d bytes at %d: must be whole blocks of %d within %d bytes", ErrInvalid, name, n,
			off,
			bs, g.info.SizeBytes)
	}
	return nil
}

// plain runs an operation of one command.
func (n *Namespace) plain(ctx context.Context, o op, c Command) error {
	cmds := [1]Command{c}
	var comps [1]Completion
	if err := n.c.do(ctx, o, cmds[:], comps[:]); err != nil {
		return err
	}
	return host.CheckStatus(o.name, comps[0].Status)
}

// Flush makes all writes that have completed durable.
func (n *Namespace) Flush(ctx context.Context) error {
	var c Command
	c.SQE.SetOpcode(nvme.CmdFlush)
	c.SQE.SetNSID(n.nsid)
	return n.plain(ctx, op{name: "Flush", repeat: true}, c)
}

// WriteZeroes makes length bytes at off read as zeroes.
func (n *Namespace) WriteZeroes(ctx context.Context, off, length int64, flags WriteFlags) error {
	return n.ranged(ctx, op{name: "Write Zeroes", repeat: true}, nvme.CmdWriteZeroes, flags.cdw12(), off, length)
}

// Verify makes the target read length bytes at off and check their integrity, without transferring them.
func (n *Namespace) Verify(ctx context.Context, off, length int64) error {
	return n.ranged(ctx, op{name: "Verify", repeat: true}, nvme.CmdVerify, 0, off, length)
}

// ranged runs a command without data over a range, in pieces of at most MaxTransfer. The limits of such commands (WZSL,
// VSL) are not less than MDTS.
func (n *Namespace) ranged(ctx context.Context, o op, opcode uint8, cdw12 uint32, off, length int64) error {
	g := n.geo.Load()
	if err := g.check(o.name, off, length); err != nil {
		return err
	}
	for length > 0 {
		k := min(length, int64(g.maxTransfer))
		var c Command
		g.setRW(&c, opcode, off, k)
		c.SQE.SetCDW(12, c.SQE.CDW(12)|cdw12)
		if err := n.plain(ctx, o, c); err != nil {
			return err
		}
		off += k
		length -= k
	}
	return nil
}

// Range is a range of a namespace in bytes.
type Range struct{ Offset, Length int64 }

// maxRangeBlocks bounds one range of a Deallocate command in blocks. Longer ranges are split.
const maxRangeBlocks = 1 << 31

// Deallocate tells the target that the data of the ranges is no longer needed. The target may ignore it. See
// NamespaceInfo.DeallocatedReadsZero for what deallocated blocks read as.
func (n *Namespace) Deallocate(ctx context.Context, ranges ...Range) error {
	const name = "Deallocate"
	g := n.geo.Load()
	var data []byte
	send := func() error {
		var c Command
		c.SQE.SetOpcode(nvme.CmdDSM)
		c.SQE.SetNSID(n.nsid)
		c.SQE.SetDSMRanges(len(data) / nvme.DSMRangeSize)
		c.SQE.SetCDW(11, nvme.DSMDeallocate)
		c.Data = data
		err := n.plain(ctx, op{name: name, repeat: true}, c)
		data = nil
		return err
	}
	for _, r := range ranges {
		if err := g.check(name, r.Offset, r.Length); err != nil {
			return err
		}
		for r.Length > 0 {
			k := min(r.Length, maxRangeBlocks<<g.shift)
			var d nvme.DSMRange
			d.SetSLBA(units.ExtentOffset(r.Offset).LBA(g.shift))
			d.SetNLB(units.Bytes(k).Blocks(g.shift))
			data = append(data, d[:]...)
			r.Offset += k
			r.Length -= k
			if len(data) == nvme.MaxDSMRanges*nvme.DSMRangeSize {
				if err := send(); err != nil {
					return err
				}
			}
		}
	}
	if len(data) == 0 {
		return nil
	}
	return send()
}

// CompareAndWrite writes replacement at off if the data there is equal to expected, as one fused operation. Both have
// the same length, at most MaxTransfer; to be atomic, at most the target's ACWU.
//
// It is never repeated: after ErrIndeterminate it may or may not have taken effect.
//
// Errors: ErrCompareFailed if the data is not equal to expected.
func (n *Namespace) CompareAndWrite(ctx context.Context, expected, replacement []byte, off int64) error {
	const name = "Compare and Write"
	g := n.geo.Load()
	if err := g.check(name, off, int64(len(expected))); err != nil {
		return err
	}
	if len(expected) != len(replacement) || len(expected) == 0 || len(expected) > g.maxTransfer {
		return fmt.Errorf("%w: %s of %d and %d bytes: must be equal and 1 block to %d bytes", ErrInvalid, name,
			len(expected), len(replacement), g.maxTransfer)
	}
	cmds := [2]Command{{Data: expected}, {Data: replacement}}
	var comps [2]Completion
	g.setRW(&cmds[0], nvme.CmdCompare, off, int64(len(expected)))
	g.setRW(&cmds[1], nvme.CmdWrite, off, int64(len(expected)))
	cmds[0].SQE.SetFuse(nvme.FuseFirst)
	cmds[1].SQE.SetFuse(nvme.FuseSecond)
	if err := n.c.do(ctx, op{name: name}, cmds[:], comps[:]); err != nil {
		return err
	}
	if err := host.CheckStatus(name, comps[0].Status); err != nil {
		return err
	}
	return host.CheckStatus(name, comps[1].Status)
}
