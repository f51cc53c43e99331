package client

import (
	"context"
	"fmt"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hostverbs"
	"jbofd/internal/nvme"
)

// Identity describes a controller.
type Identity struct {
	CNTLID                          uint16
	SubNQN, Serial, Model, Firmware string
	// Version is major, minor and tertiary version of the specification: 0x00020000 is 2.0.
	Version uint32
	// MaxTransferBytes is the most data of one command; 0: no limit.
	MaxTransferBytes int
	// MaxQueueDepth is how many commands one I/O queue may have outstanding, InCapsuleBytes how many bytes of data the
	// capsule of a write may carry, IOQueues how many I/O queues the target has granted.
	MaxQueueDepth, InCapsuleBytes, IOQueues int
	// VolatileWriteCache: a write is durable only after Flush or with FUA.
	VolatileWriteCache                                          bool
	Compare, CompareAndWrite, WriteZeroes, Deallocate, VerifyOp bool
	// Discovery: it is a discovery controller.
	Discovery bool
	// Extensions: the target is a jbofd and announces the extensions ExtensionBits: see docs/wire-extensions.md.
	Extensions    bool
	ExtensionBits uint32
	// ExtendedKV: the target has granted extended key-value: see package kv.
	ExtendedKV bool
}

// Identity returns the identity of the controller as it was when the current association was built.
//
// Errors: ErrConnectionLost; ErrClosed; the context's.
func (c *Controller) Identity(ctx context.Context) (Identity, error) {
	a, err := c.current(ctx)
	if err != nil {
		return Identity{}, err
	}
	id := &a.id
	_, ext, extended := id.Extension()
	return Identity{
		CNTLID: a.cntlid, SubNQN: id.SubNQN(), Serial: id.SN(), Model: id.MN(), Firmware: id.FR(),
		Version:          uint32(a.vs),
		MaxTransferBytes: a.maxTransfer(), MaxQueueDepth: a.depth, InCapsuleBytes: a.inCapsuleFor(1),
		IOQueues:           a.ioQueues,
		VolatileWriteCache: id.VWC()&nvme.VWCPresent != 0,
		Compare:            id.ONCS()&nvme.ONCSCompare != 0,
		CompareAndWrite:    id.FUSES()&nvme.FUSESCompareAndWrite != 0,
		WriteZeroes:        id.ONCS()&nvme.ONCSWriteZeroes != 0,
		Deallocate:         id.ONCS()&nvme.ONCSDSM != 0,
		VerifyOp:           id.ONCS()&nvme.ONCSVerify != 0,
		Discovery:          id.CNTRLTYPE() == nvme.CNTRLTYPEDiscovery,
		Extensions:         extended,
		ExtensionBits:      ext,
		ExtendedKV:         a.granted&nvme.ExtKV != 0,
	}, nil
}

// maxTransfer returns MDTS in bytes; 0: no limit. Over RDMA it is at most the bounce memory that one command can get.
func (a *association) maxTransfer() int {
	m := int(a.id.MDTS())
	n := 0
	if m != 0 && m <= 20 {
		n = 1 << (m + 12 + int(a.cap.MPSMIN()))
	}
	if a.opts.Transport == RDMA && (n == 0 || n > hostverbs.MaxBounceBytes) {
		n = hostverbs.MaxBounceBytes
	}
	return n
}

// AdminPassthru runs any admin command. The opcode tells the direction of data, which is the caller's again on return.
// The command is not repeated after a loss of the connection.
//
// Errors: *StatusError, with which the Completion is valid too; ErrConnectionLost, ErrClosed, ErrIndeterminate;
// ErrInvalid; the context's.
func (c *Controller) AdminPassthru(ctx context.Context, e SQE, data []byte) (Completion, error) {
	return c.passthru(ctx, op{name: fmt.Sprintf("admin command %#02x", e.Opcode()), admin: true}, e, data)
}

// IOPassthru is AdminPassthru for an I/O command.
func (c *Controller) IOPassthru(ctx context.Context, e SQE, data []byte) (Completion, error) {
	return c.passthru(ctx, op{name: fmt.Sprintf("I/O command %#02x", e.Opcode())}, e, data)
}

// Do runs an I/O command as the methods of Namespace do: on any of the I/O queues and within credits. With repeat it is
// repeated after a loss of the connection and after a status of a transient nature: see Controller. cmd.Data is the
// caller's again on return. name is for error messages. A nil error means that the command has completed, with whatever
// status.
//
// Errors: ErrConnectionLost, ErrClosed, ErrIndeterminate, ErrInvalid, ErrUnsupported; the context's.
func (c *Controller) Do(ctx context.Context, name string, repeat bool, cmd *Command) (Completion, error) {
	cmds := [1]Command{*cmd}
	var comps [1]Completion
	err := c.do(ctx, op{name: name, repeat: repeat}, cmds[:], comps[:])
	return comps[0], err
}

// DoOnce is Do, with repeat, for a command that carries an identity. resend is called when the command was sent and not
// answered and is about to be sent again: it marks the command as a retry. If resend returns an error, the command is
// not sent again, and the error comes with ErrIndeterminate.
func (c *Controller) DoOnce(ctx context.Context, name string, cmd *Command, resend func() error) (Completion, error) {
	cmds := [1]Command{*cmd}
	var comps [1]Completion
	err := c.do(ctx, op{name: name, repeat: true, resend: resend}, cmds[:], comps[:])
	return comps[0], err
}

func (c *Controller) passthru(ctx context.Context, o op, e SQE, data []byte) (Completion, error) {
	cmds := [1]Command{{SQE: e, Data: data}}
	var comps [1]Completion
	if err := c.do(ctx, o, cmds[:], comps[:]); err != nil {
		return Completion{}, err
	}
	return comps[0], host.CheckStatus(o.name, comps[0].Status)
}

// admin runs an admin command that may be repeated.
func (c *Controller) admin(ctx context.Context, name string, e SQE, data []byte) (Completion, error) {
	return c.passthru(ctx, op{name: name, admin: true, repeat: true}, e, data)
}

// Property reads the controller property (register) at an offset: 0 CAP, 8 VS, 14h CC, 1Ch CSTS.
func (c *Controller) Property(ctx context.Context, offset uint32) (uint64, error) {
	var e SQE
	e.Property().Init(nvme.FabricsPropertyGet, offset)
	comp, err := c.admin(ctx, fmt.Sprintf("Property Get %#x", offset), e, nil)
	return comp.Result, err
}

// SetProperty writes a controller property. Disabling the controller ends the association. It is not repeated after a
// loss of the connection.
func (c *Controller) SetProperty(ctx context.Context, offset uint32, value uint64) error {
	var e SQE
	e.Property().Init(nvme.FabricsPropertySet, offset)
	e.Property().SetVALUE(value)
	_, err := c.passthru(ctx, op{name: fmt.Sprintf("Property Set %#x", offset), admin: true}, e, nil)
	return err
}

// Identify reads an Identify data structure into data, which must have 4096 bytes.
func (c *Controller) Identify(ctx context.Context, cns uint8, nsid uint32, data []byte) error {
	return c.IdentifyCSI(ctx, cns, uint8(nvme.CSINVM), nsid, data)
}

// IdentifyCSI is Identify for a data structure of a command set: 0 NVM (blocks), 1 Key Value.
func (c *Controller) IdentifyCSI(ctx context.Context, cns, csi uint8, nsid uint32, data []byte) error {
	if len(data) != nvme.IdentifySize {
		return fmt.Errorf("%w: Identify needs %d bytes, has %d", ErrInvalid, nvme.IdentifySize, len(data))
	}
	var e SQE
	e.SetOpcode(nvme.AdminIdentify)
	e.SetNSID(nsid)
	e.Identify().SetCNS(cns)
	e.Identify().SetCSI(nvme.CSI(csi))
	comp, err := c.admin(ctx, fmt.Sprintf("Identify (CNS %02xh)", cns), e, data)
	if err == nil && comp.Received != nvme.IdentifySize {
		err = fmt.Errorf("%w: Identify: %d bytes of data", ErrProtocol, comp.Received)
	}
	return err
}

// Description holds the identification descriptors of a namespace.
type Description struct {
	// CSI is the command set: 0 NVM (Namespace), 1 Key Value (package kv).
	CSI uint8
	// UUID is zero if the target reports none.
	UUID [16]byte
}

// Describe reads the identification descriptors of a namespace. Targets older than NVMe 1.3 have none, and the NVM
// command set only.
//
// Errors: ErrNamespaceGone; those of Identify.
func (c *Controller) Describe(ctx context.Context, nsid uint32) (d Description, err error) {
	a, err := c.current(ctx)
	if err != nil || a.vs < nvme.Version1_3 {
		return d, err
	}
	var b [nvme.IdentifySize]byte
	if err := c.Identify(ctx, nvme.CNSNSDescriptors, nsid, b[:]); err != nil {
		return d, fmt.Errorf("namespace %d: %w", nsid, err)
	}
	for t, nid := range nvme.NSDescriptors(b[:]).All() {
		switch {
		case t == nvme.NIDTUUID && len(nid) == 16:
			copy(d.UUID[:], nid)
		case t == nvme.NIDTCSI && len(nid) == 1:
			d.CSI = nid[0]
		}
	}
	return d, nil
}

// LogPage names a log page, or the part of it from Offset on.
type LogPage struct {
	LID, LSP uint8
	NSID     uint32
	Offset   uint64
	// KeepEvent retains the asynchronous event that points to the page (RAE).
	KeepEvent bool
}

// GetLogPage reads a log page, or a part of it, into data. len(data) and Offset must be multiples of 4.
func (c *Controller) GetLogPage(ctx context.Context, p LogPage, data []byte) error {
	if len(data) == 0 || len(data)%4 != 0 || p.Offset%4 != 0 {
		return fmt.Errorf("%w: log page of %d bytes at %d, must be multiples of 4", ErrInvalid, len(data), p.Offset)
	}
	var e SQE
	e.SetOpcode(nvme.AdminGetLogPage)
	e.SetNSID(p.NSID)
	g := e.GetLog()
	g.SetLID(p.LID)
	g.SetLSP(p.LSP)
	g.SetRAE(p.KeepEvent)
	g.SetLPO(p.Offset)
	g.SetLenBytes(uint64(len(data)))
	comp, err := c.admin(ctx, fmt.Sprintf("Get Log Page %02xh", p.LID), e, data)
	if err == nil && int(comp.Received) != len(data) {
		err = fmt.Errorf("%w: Get Log Page %02xh: %d bytes of data, want %d", ErrProtocol, p.LID, comp.Received,
			len(data))
	}
	return err
}

// Feature names a feature for GetFeature and SetFeature.
type Feature struct {
	FID  uint8
	NSID uint32
	// Select tells GetFeature which value to return: 0 current, 1 default, 2 saved, 3 supported capabilities.
	Select uint8
	// Save makes SetFeature save the value across resets.
	Save bool
	// Data of the feature, if it has any.
	Data []byte
}

// GetFeature returns DW0 of the completion, which is the value of most features.
func (c *Controller) GetFeature(ctx context.Context, f Feature) (uint32, error) {
	var e SQE
	e.SetOpcode(nvme.AdminGetFeatures)
	e.SetNSID(f.NSID)
	e.Features().SetFID(f.FID)
	e.Features().SetSEL(f.Select)
	comp, err := c.admin(ctx, fmt.Sprintf("Get Features %02xh", f.FID), e, f.Data)
	return uint32(comp.Result), err
}

// SetFeature sets a feature to value (CDW11) and returns DW0 of the completion. The setting ends with the association:
// after a reconnect the feature has its default again.
func (c *Controller) SetFeature(ctx context.Context, f Feature, value uint32) (uint32, error) {
	var e SQE
	e.SetOpcode(nvme.AdminSetFeatures)
	e.SetNSID(f.NSID)
	e.Features().SetFID(f.FID)
	e.Features().SetSV(f.Save)
	e.Features().SetValue(value)
	comp, err := c.passthru(ctx, op{name: fmt.Sprintf("Set Features %02xh", f.FID), admin: true}, e, f.Data)
	return uint32(comp.Result), err
}

// NamespaceIDs lists the active namespaces.
func (c *Controller) NamespaceIDs(ctx context.Context) ([]uint32, error) {
	var ids []uint32
	last := uint32(0)
	for {
		var l nvme.NSList
		if err := c.Identify(ctx, nvme.CNSActiveNSList, last, l[:]); err != nil {
			return nil, err
		}
		if err := l.Check(); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrProtocol, err)
		}
		n := 0
		for id := range l.All() {
			if id <= last {
				return nil, fmt.Errorf("%w: namespace list after %d holds %d", ErrProtocol, last, id)
			}
			ids = append(ids, id)
			last = id
			n++
		}
		if n < nvme.MaxNSList {
			return ids, nil
		}
	}
}
