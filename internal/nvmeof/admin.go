package nvmeof

import (
	"fmt"
	"math"

	"jbofd/internal/nvme"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// PlanAdmin returns how many bytes an admin or fabrics command moves in each direction, or the status with which it
// fails before it is executed.
func PlanAdmin(sqe *nvme.SQE, lim Limits) (toController, toHost uint32, s nvme.Status) {
	if sqe.Opcode() != nvme.OpFabrics && (sqe.PSDT() == nvme.PSDTPRP || sqe.PSDT() == 3) {
		return 0, 0, nvme.InvalidField | nvme.DNR
	}
	switch sqe.Opcode() {
	case nvme.OpFabrics:
		if sqe.FCTYPE() == nvme.FabricsConnect {
			return nvme.ConnectDataSize, 0, nvme.Success
		}
	case nvme.AdminIdentify:
		return 0, nvme.IdentifySize, nvme.Success
	case nvme.AdminGetLogPage:
		if n := sqe.GetLog().LenBytes(); n <= uint64(lim.MDTSBytes) {
			return 0, uint32(n), nvme.Success
		}
		return 0, 0, nvme.InvalidField | nvme.DNR
	case nvme.AdminSetFeatures:
		return featureBytes(sqe.Features().FID(), sqe), 0, nvme.Success
	case nvme.AdminGetFeatures:
		if sqe.Features().SEL() != nvme.SELSupported {
			return 0, featureBytes(sqe.Features().FID(), sqe), nvme.Success
		}
	}
	return 0, 0, nvme.Success
}

// Usage is what a host has done on a controller's I/O queues, for the SMART log: its commands and bytes that succeeded,
// and its commands that failed with a media error.
type Usage struct {
	Reads, Writes, ReadBytes, WrittenBytes, MediaErrors uint64
}

// AdminArgs is an admin or fabrics command on a controller's queue.
type AdminArgs struct {
	Controller *Controller
	QID        uint16
	Slot       int
	SQE        *nvme.SQE
	// Data is as long as PlanAdmin has said: the data from the host, or room for the data to it.
	Data []byte
	// Usage returns the figures of the SMART log.
	Usage func(*Controller) Usage
	// Health returns the SMART log of a drive, by its number; false if the drive says nothing. nil: none does. It does
	// no I/O.
	Health func(ssd int) (nvme.SMARTLog, bool)
	// Lost is as in ConnectArgs.
	Lost func(ConnID) bool
}

// Reply is the outcome of an admin or fabrics command: what the driver, that is the target service with the connection,
// answers, and what either must do before.
type Reply struct {
	Status nvme.Status
	Result uint64
	// Len is how many bytes of Data go to the host.
	Len int
	// Pending: the command is an event request. The driver must not answer it: an ActionComplete does.
	Pending bool
	// Abort: before it answers, the driver must abort command AbortCID of queue AbortSQID, and set bit 0 of Result if
	// that fails.
	Abort               bool
	AbortSQID, AbortCID uint16
	// Credit: before it answers, the driver must put the credit at SSD CreditSSD into DW1, the high half of Result.
	Credit    bool
	CreditSSD int
	// Used, if not nil, returns the NUSE of a namespace of keys and values. Before it answers, the driver must call it
	// without locks and put the result into Data.
	Used func() int64
	// Disconnect: the driver must answer only when no command of the queue is in flight any more, after it has called
	// Target.Disconnected, and must then close the connection.
	Disconnect bool
}

// fail returns the Reply of a command that fails with a status, and that the host should not repeat.
func fail(s nvme.Status) Reply { return Reply{Status: s | nvme.DNR} }

// Admin executes an admin command, or a fabrics command other than Connect.
func (t *Target) Admin(now int64, a AdminArgs) Reply {
	c := a.Controller
	if c.gone {
		return fail(nvme.CommandSequenceError)
	}
	c.seenNS, c.lastOpcode = now, a.SQE.Opcode()
	if a.SQE.Opcode() == nvme.OpFabrics {
		return c.fabrics(now, a)
	}
	if !c.ready() {
		return fail(nvme.CommandSequenceError)
	}
	switch a.SQE.Opcode() {
	case nvme.AdminKeepAlive:
		return Reply{}
	case nvme.AdminIdentify:
		return c.identify(a)
	case nvme.AdminGetLogPage:
		return c.getLogPage(now, a)
	case nvme.AdminSetFeatures:
		return c.setFeatures(now, a)
	case nvme.AdminGetFeatures:
		return c.getFeatures(now, a)
	case nvme.AdminAsyncEvent:
		if len(c.aers) == maxAERs {
			return fail(nvme.AERLimitExceeded)
		}
		c.aers = append(c.aers, a.Slot)
		c.deliver()
		return Reply{Pending: true}
	case nvme.AdminAbort:
		if c.Discovery {
			break
		}
		ab := a.SQE.Abort()
		return Reply{Abort: true, AbortSQID: ab.SQID(), AbortCID: ab.CID()}
	}
	return fail(nvme.InvalidOpcode)
}

// AbortEvent completes an outstanding event request as aborted. The driver calls it when an Abort command names one.
func (t *Target) AbortEvent(c *Controller, slot int) bool {
	for i, s := range c.aers {
		if s == slot {
			c.aers = append(c.aers[:i], c.aers[i+1:]...)
			t.act(Action{Kind: ActionComplete, Conn: c.Admin, Slot: slot, Status: nvme.AbortRequested})
			return true
		}
	}
	return false
}

// fabrics executes Property Get, Property Set and Disconnect, and refuses Connect on a queue that is connected.
func (c *Controller) fabrics(now int64, a AdminArgs) Reply {
	switch a.SQE.FCTYPE() {
	case nvme.FabricsPropertyGet:
		if a.QID != 0 {
			break
		}
		v, ok := c.property(a.SQE.Property())
		if !ok {
			return fail(nvme.InvalidField)
		}
		return Reply{Result: v}
	case nvme.FabricsPropertySet:
		p := a.SQE.Property()
		if a.QID != 0 {
			break
		}
		if p.OFST() != nvme.PropCC || p.SizeBytes() != 4 {
			return fail(nvme.InvalidField)
		}
		if s := c.setCC(now, nvme.CC(p.VALUE()), a.Lost); !s.OK() {
			return fail(s)
		}
		return Reply{}
	case nvme.FabricsConnect:
		return fail(nvme.CommandSequenceError)
	case nvme.FabricsDisconnect:
		if a.QID == 0 {
			return fail(nvme.InvalidQueueType) // Disconnect ends an I/O queue
		}
		return Reply{Disconnect: true}
	}
	return fail(nvme.InvalidOpcode) // nvmet and SPDK answer commands that the queue does not have in the same way
}

// readyTimeout is CAP.TO, in 500 ms. A controller is ready at once when it is enabled; what takes time is a reset with
// commands at the drives.
func (t *Target) readyTimeout() uint8 {
	return uint8(min((t.cfg.QuiesceMS+readyGraceMS)/500, math.MaxUint8))
}

// property returns the value of a property. It reports false if the controller has no such property, or has it in
// another size than the command names.
func (c *Controller) property(p *nvme.PropertySQE) (uint64, bool) {
	if p.SizeBytes() != nvme.PropertySize(p.OFST()) {
		return 0, false
	}
	switch p.OFST() {
	case nvme.PropCAP:
		return uint64(nvme.CAP(0).WithMQES(uint16(c.t.cfg.MaxEntries - 1)).WithCQR(true).WithTO(c.t.readyTimeout()).
			WithCSS(nvme.CAPCSSNVM | nvme.CAPCSSIOCS).WithCRWMS(true)), true
	case nvme.PropVS:
		return uint64(nvme.Version2_0), true
	case nvme.PropCC:
		return uint64(c.cc), true
	case nvme.PropCSTS:
		return uint64(c.csts), true
	case nvme.PropNSSR:
		return 0, true
	case nvme.PropCRTO:
		return uint64(c.t.readyTimeout()), true
	}
	return 0, false
}

// identify executes Identify (NVMe Base 2.0, section 5.17).
func (c *Controller) identify(a AdminArgs) Reply {
	id := a.SQE.Identify()
	nsid := a.SQE.NSID()
	buf := (*[nvme.IdentifySize]byte)(a.Data)
	*buf = [nvme.IdentifySize]byte{}
	done := Reply{Len: nvme.IdentifySize}
	if c.Discovery && id.CNS() != nvme.CNSController {
		return fail(nvme.InvalidField)
	}
	ns := c.table.Get(nsid)
	inRange := nsid != 0 && nsid <= MaxNSID
	switch id.CNS() {
	case nvme.CNSController:
		c.identifyController((*nvme.IdentifyController)(buf))
	case nvme.CNSNamespace, nvme.CNSAllocatedNamespace:
		if ns == nil {
			if !inRange {
				return fail(nvme.InvalidNamespaceOrFormat)
			}
			return done // inactive: zeroes
		}
		if ns.CSI != nvme.CSINVM {
			return fail(nvme.InvalidIOCommandSet) // it has no such data structure
		}
		c.identifyNamespace((*nvme.IdentifyNamespace)(buf), ns)
	case nvme.CNSActiveNSList, nvme.CNSAllocatedNSList:
		return c.listNamespaces(buf, nsid, func(*Namespace) bool { return true })
	case nvme.CNSActiveNSListCSI, nvme.CNSAllocatedNSListCSI:
		if !c.mayUseCommandSet(id.CSI()) {
			return fail(nvme.InvalidField)
		}
		return c.listNamespaces(buf, nsid, func(n *Namespace) bool { return n.CSI == id.CSI() })
	case nvme.CNSNSDescriptors:
		if ns == nil {
			return fail(nvme.InvalidNamespaceOrFormat)
		}
		b := nvme.AppendNSDescriptor(buf[:0], nvme.NIDTUUID, ns.UUID[:])
		b = nvme.AppendNSDescriptor(b, nvme.NIDTNGUID, ns.NGUID[:])
		b = nvme.AppendNSDescriptor(b, nvme.NIDTEUI64, ns.EUI64[:])
		nvme.AppendNSDescriptor(b, nvme.NIDTCSI, []byte{byte(ns.CSI)})
	case nvme.CNSNamespaceCSI, nvme.CNSAllocatedNSCSI:
		switch {
		case !c.mayUseCommandSet(id.CSI()):
			return fail(nvme.InvalidField)
		case ns == nil && !inRange:
			return fail(nvme.InvalidNamespaceOrFormat)
		case ns != nil && ns.CSI != id.CSI():
			return fail(nvme.InvalidIOCommandSet)
		case ns != nil && ns.CSI == nvme.CSIKV:
			c.identifyNamespaceKV((*nvme.IdentifyNamespaceKV)(buf), ns)
			done.Used = ns.UsedBytes
		}
		// Blocks: no extended LBA formats, all of it is zero.
	case nvme.CNSControllerCSI:
		if !c.mayUseCommandSet(id.CSI()) {
			return fail(nvme.InvalidField)
		}
		if id.CSI() == nvme.CSINVM {
			// Zero fields mean no limit. Write Zeroes has none: hosts of SPDK send 65,536 blocks whatever the limit is.
			// Dataset Management has none: each of its ranges passes the pipeline on its own.
			(*nvme.IdentifyControllerNVM)(buf).SetVSL(uint8(log2(MaxVerifyBytes) - 12)) // pages of CAP.MPSMIN, 4 KiB
		}
		// The Key Value command set has no fields here.
	case nvme.CNSNamespaceIndependent:
		if ns == nil {
			return fail(nvme.InvalidNamespaceOrFormat)
		}
		n := (*nvme.IdentifyNamespaceIndependent)(buf)
		n.SetNMIC(nvme.NMICShared)
		n.SetANAGRPID(ns.ANAGroup)
		n.SetNSTAT(nvme.NSTATReady)
	case nvme.CNSNSControllerList:
		if ns == nil {
			return fail(nvme.InvalidNamespaceOrFormat)
		}
		c.listControllers(buf, id.CNTID(), nsid)
	case nvme.CNSControllerList:
		c.listControllers(buf, id.CNTID(), 0)
	case nvme.CNSIOCommandSets:
		if id.CNTID() != nvme.CNTLIDDynamic && id.CNTID() != c.ID {
			return fail(nvme.InvalidField)
		}
		(*nvme.IOCommandSets)(buf).SetCombination(0, nvme.CSINVM, nvme.CSIKV)
	default:
		return fail(nvme.InvalidField)
	}
	return done
}

func (c *Controller) listNamespaces(buf *[nvme.IdentifySize]byte, after uint32, wanted func(*Namespace) bool) Reply {
	if after >= 0xFFFFFFFE {
		return fail(nvme.InvalidNamespaceOrFormat)
	}
	(*nvme.NSList)(buf).Fill(after, c.table.appendIDs(nil, after, nvme.MaxNSList, wanted))
	return Reply{Len: nvme.IdentifySize}
}

// listControllers lists the subsystem's controllers with a CNTLID of at least from. If nsid is not 0, it lists those
// whose hosts see that namespace.
func (c *Controller) listControllers(buf *[nvme.IdentifySize]byte, from uint16, nsid uint32) {
	var ids []uint16
	for _, o := range c.t.Controllers() {
		if o.sub == c.sub && (nsid == 0 || o.table.Get(nsid) != nil) {
			ids = append(ids, o.ID)
		}
	}
	(*nvme.ControllerList)(buf).Fill(from, ids)
}

// identifyController fills Identify Controller.
func (c *Controller) identifyController(d *nvme.IdentifyController) {
	cfg := &c.t.cfg
	d.SetSN(c.sub.Serial)
	d.SetMN(c.sub.Model)
	d.SetFR(cfg.Firmware)
	d.SetCNTLID(c.ID)
	d.SetVER(nvme.Version2_0)
	d.SetMDTS(uint8(log2(cfg.Limits.MDTSBytes) - 12)) // pages of CAP.MPSMIN, 4 KiB
	d.SetKAS(katoUnitMS / 100)
	d.SetCQT(uint16(min(cfg.QuiesceMS, math.MaxUint16)))
	d.SetRTD3E(2 * cfg.QuiesceMS * 1000)
	d.SetMAXCMD(uint16(cfg.MaxEntries - 1))
	d.SetSGLS(nvme.SGLSSupported | nvme.SGLSOffset | nvme.SGLSTransportData)
	if c.port.TRTYPE == nvme.TRTYPERDMA {
		d.SetSGLS(nvme.SGLSSupported | nvme.SGLSOffset | nvme.SGLSKeyed)
	}
	d.SetSubNQN(c.sub.NQN)
	d.SetLPA(nvme.LPAEffects | nvme.LPAExtended)
	d.SetELPE(maxErrors - 1)
	d.SetAERL(maxAERs - 1)
	d.SetFGUID(cfg.NodeUUID)
	d.SetCTRATT(nvme.CTRATTHostID128 | nvme.CTRATTTBKAS)
	if c.Discovery {
		d.SetCNTRLTYPE(nvme.CNTRLTYPEDiscovery)
		d.SetOAES(nvme.AECDiscovery)
		d.SetLPA(nvme.LPAExtended)
		d.SetDCTYPE(nvme.DCTYPEDirect)
		return
	}
	d.SetCNTRLTYPE(nvme.CNTRLTYPEIO)
	d.SetRAB(6)
	d.SetCMIC(nvme.CMICMultiPort | nvme.CMICMultiController | nvme.CMICANA)
	d.SetOAES(nvme.AECNamespace | nvme.AECANA)
	d.SetACL(3)
	d.SetFRMW(1<<1 | 1) // one slot, read only
	d.SetNPSS(0)
	d.SetWCTEMP(343)
	d.SetCCTEMP(353)
	d.SetSQES(0x66)
	d.SetCQES(0x44)
	d.SetNN(MaxNSID)
	d.SetMNAN(MaxNSID)
	d.SetONCS(nvme.ONCSCompare | nvme.ONCSDSM | nvme.ONCSWriteZeroes | nvme.ONCSSave | nvme.ONCSTimestamp |
		nvme.ONCSVerify)
	d.SetFUSES(nvme.FUSESCompareAndWrite)
	d.SetVWC(nvme.VWCPresent | nvme.VWCFlushNSIDNo)
	d.SetACWU(uint16(cfg.Limits.FusedBytes>>12) - 1) // in blocks of the largest format
	d.SetANATT(10)
	d.SetANACAP(nvme.ANACAPOptimized | nvme.ANACAPNonOptimized | nvme.ANACAPInaccessible | nvme.ANACAPPersistentLoss |
		nvme.ANACAPChange)
	d.SetANAGRPMAX(maxANAGroups)
	d.SetNANAGRPID(maxANAGroups)
	d.SetIOCCSZ(uint32(nvme.SQESize+cfg.InCapsuleBytes) / 16)
	d.SetIORCSZ(nvme.CQESize / 16)
	d.SetMSDBD(1)
	d.SetOFCS(nvme.OFCSDisconnect)
	d.SetExtension(nvme.ExtVersion, c.extensions())
}

// identifyNamespace fills Identify Namespace.
func (c *Controller) identifyNamespace(d *nvme.IdentifyNamespace, ns *Namespace) {
	n := ns.Blocks()
	d.SetNSZE(n)
	d.SetNCAP(n)
	d.SetNUSE(n)
	d.SetNSFEAT(nvme.NSFEATAtomics | nvme.NSFEATOptPerf)
	d.SetNLBAF(0)
	d.SetLBAF(0, nvme.MakeLBAFormat(ns.BlockShift))
	d.SetNMIC(nvme.NMICShared)
	dlfeat := uint8(nvme.DLFEATWriteZeroes)
	if ns.DeallocatedReadsZero {
		dlfeat |= nvme.DLFEATReadZeroes
	}
	d.SetDLFEAT(dlfeat)
	// A drive may prefer more than its field can say.
	d.SetNACWU(zeroBased(units.Bytes(c.t.cfg.Limits.FusedBytes).Blocks(ns.BlockShift)))
	optimal := zeroBased(units.Bytes(ns.OptimalIOBytes).Blocks(ns.BlockShift))
	d.SetNPWG(optimal)
	d.SetNPWA(optimal)
	d.SetNPDG(optimal)
	d.SetNPDA(optimal)
	d.SetNVMCAP(nvme.U128(uint64(ns.SizeBytes)))
	d.SetANAGRPID(ns.ANAGroup)
	d.SetNGUID(uuid.UUID(ns.NGUID))
	d.SetEUI64(ns.EUI64)
	d.SetSSD(uint16(ns.SSD))
}

// zeroBased is a number of blocks as a 0-based field of 16 bits has it, which stands for 1 to 65536.
func zeroBased(n units.Blocks) uint16 { return uint16(min(max(n, 1), 1<<16) - 1) }

func log2(v uint32) (n uint) {
	for ; v > 1; v >>= 1 {
		n++
	}
	return n
}

// describeAdmin returns the name of an admin command, for the log.
func describeAdmin(opcode uint8) string {
	names := map[uint8]string{nvme.AdminGetLogPage: "Get Log Page", nvme.AdminIdentify: "Identify",
		nvme.AdminAbort: "Abort", nvme.AdminSetFeatures: "Set Features", nvme.AdminGetFeatures: "Get Features",
		nvme.AdminAsyncEvent: "Asynchronous Event Request",
		nvme.AdminKeepAlive:  "Keep Alive", nvme.OpFabrics: "Fabrics"}
	if s, ok := names[opcode]; ok {
		return s
	}
	return fmt.Sprintf("opcode %#02x", opcode)
}

// LastCommand returns the name of the host's last admin command, for the log.
func (c *Controller) LastCommand() string { return describeAdmin(c.lastOpcode) }
