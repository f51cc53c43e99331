package pcietest

import (
	"jbofd/internal/nvme"
	"jbofd/internal/units"
)

// admin carries out an admin command.
func (c *Controller) admin(e *nvme.SQE, cqe *nvme.CQE) (st nvme.Status, later bool) {
	switch e.Opcode() {
	case nvme.AdminIdentify:
		if e.Identify().CNS() == nvme.CNSControllerCSI && c.cfg.WZSL < 0 {
			return nvme.InvalidField | nvme.DNR, false
		}
		b := c.memory(e.PRP1(), nvme.IdentifySize)
		if b == nil {
			return nvme.DataTransferError, false
		}
		copy(b, c.identify(e))
	case nvme.AdminSetFeatures:
		if f := e.Features(); f.FID() == nvme.FIDAsyncEvent {
			c.wanted = f.Value()
			break
		}
		n := uint16(c.cfg.Vectors - 1)
		cqe.SetDW0(nvme.NumberOfQueues(n, n))
	case nvme.AdminGetLogPage:
		return c.log(e), false
	case nvme.AdminCreateIOCQ:
		q := e.Queue()
		if !q.Contiguous() || int(q.Vector()) >= c.cfg.Vectors || q.Entries() > c.cfg.Entries ||
			c.queues[q.QID()] != nil {
			return nvme.InvalidQueueID | nvme.DNR, false
		}
		n := &queue{id: q.QID(), cqAt: e.PRP1(), entries: uint32(q.Entries()), phase: 1, vector: -1}
		if q.Interrupts() {
			n.vector = int(q.Vector())
		}
		c.queues[q.QID()] = n
	case nvme.AdminCreateIOSQ:
		q := c.queues[e.Queue().QID()]
		if q == nil || e.Queue().Vector() != q.id || e.Queue().Entries() != int(q.entries) {
			return nvme.InvalidQueueID | nvme.DNR, false
		}
		q.sqAt, q.created = e.PRP1(), true
	case nvme.AdminDeleteIOSQ:
		if q := c.queues[e.Queue().QID()]; q != nil {
			q.created = false
		}
	case nvme.AdminDeleteIOCQ:
		delete(c.queues, e.Queue().QID())
	case nvme.AdminAbort:
		cqe.SetDW0(nvme.AbortNotDone)
	case nvme.AdminAsyncEvent:
		c.asked++
		if len(c.requests) > int(c.cfg.AERL) {
			return nvme.AERLimitExceeded | nvme.DNR, false
		}
		c.requests = append(c.requests, e.CID())
		return 0, true
	case nvme.AdminDoorbellBuffer:
		if !c.cfg.Shadows {
			return nvme.InvalidOpcode | nvme.DNR, false
		}
		c.shadowsAt = [2]uint64{e.PRP1(), e.PRP2()}
	default:
		return nvme.InvalidOpcode | nvme.DNR, false
	}
	return nvme.Success, false
}

// identify returns Identify data.
func (c *Controller) identify(e *nvme.SQE) []byte {
	var ic nvme.IdentifyController
	var ns nvme.IdentifyNamespace
	ic.SetMN("jbofd test controller")
	ic.SetSN("1")
	ic.SetFR("1.0")
	ic.SetMDTS(c.cfg.MDTS)
	ic.SetSQES(0x66)
	ic.SetCQES(0x44)
	ic.SetNN(1)
	ic.SetAERL(c.cfg.AERL)
	ic.SetOAES(nvme.AECNamespace | nvme.AECFirmware)
	ic.SetMTFA(100)
	ic.SetWCTEMP(350)
	ic.SetCCTEMP(360)
	ic.SetVWC(nvme.VWCPresent)
	set := func(on bool, bit uint16) uint16 {
		if on {
			return bit
		}
		return 0
	}
	ic.SetONCS(set(c.cfg.WriteZeroes, nvme.ONCSWriteZeroes) | set(c.cfg.DSM, nvme.ONCSDSM))
	ic.SetOACS(set(c.cfg.Shadows, nvme.OACSDoorbellBuffer))
	ic.SetSGLS(uint32(set(c.cfg.SGL, nvme.SGLSSupported)))
	blocks := units.Bytes(len(c.disk)).Blocks(c.cfg.BlockShift)
	ns.SetNSZE(blocks)
	ns.SetNCAP(blocks)
	ns.SetNUSE(blocks)
	ns.SetDLFEAT(nvme.DLFEATReadZeroes)
	ns.SetLBAF(0, nvme.MakeLBAFormat(c.cfg.BlockShift))
	if c.cfg.Identify != nil {
		c.cfg.Identify(&ic, &ns)
	}
	switch e.Identify().CNS() {
	case nvme.CNSControllerCSI:
		var nvm nvme.IdentifyControllerNVM
		nvm.SetWZSL(uint8(c.cfg.WZSL))
		nvm.SetDMRSL(100)
		return nvm[:]
	case nvme.CNSController:
		return ic[:]
	case nvme.CNSNamespace:
		if e.NSID() == 1 {
			return ns[:]
		}
	case nvme.CNSActiveNSList:
		return append([]byte{1}, make([]byte, nvme.IdentifySize-1)...)
	}
	return make([]byte, nvme.IdentifySize)
}

// zeroes is the most bytes of a Write Zeroes command; 0: there is no limit.
func (c *Controller) zeroes() int {
	switch {
	case c.cfg.WZSL > 0:
		return 4096 << c.cfg.WZSL
	case c.cfg.WZSL < 0 && c.cfg.MDTS > 0:
		return 4096 << c.cfg.MDTS
	}
	return 0
}
