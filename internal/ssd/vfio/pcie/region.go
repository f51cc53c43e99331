package pcie

import (
	"fmt"
	"time"

	"jbofd/internal/nvme"
)

// Region is memory that a controller has beside its namespaces, in a BAR: the Controller Memory Buffer, or the
// Persistent Memory Region. The host accesses it by loads and stores. The controller does not: CMBMSC.CMSE and PMRMSC
// stay 0, so that no address of a command means it.
//
// Stores are posted: when the next instruction runs they may be anywhere on the way. Barrier waits for them.
//
// One goroutine at a time calls the methods and uses Memory, not necessarily that of the Controller, but not while the
// function is reset, and not after Revoke.
type Region struct {
	// Memory has Bytes bytes, a multiple of 8; nil if Unusable.
	Memory Memory
	Bytes  int64
	// Persistent: it is the PMR, and not the CMB.
	Persistent bool
	// BufferBytes is how much it takes at full speed; more at a time may be slower. 0: it does not say.
	BufferBytes int64
	// Patience is how long it may take to become ready after it was enabled.
	Patience time.Duration
	// Unusable is why it cannot be used, ever; nil: it can be.
	Unusable error

	fn Function
	// confirm are the PMRWBM bits. switched: the controller has CMBMSC.
	confirm  uint8
	switched bool
}

// firstMemory is where a CMB in BAR 0 may begin: behind the doorbells.
const firstMemory = 2 * nvme.PropDoorbells

// Regions returns the memory that the controller has, the PMR first. It enables each region, and does not wait until it
// is ready. It is called once, after Enable.
func (c *Controller) Regions() (all []*Region) {
	if c.cap.PMRS() {
		caps := nvme.PMRCAP(c.fn.Load32(nvme.PropPMRCAP))
		r := &Region{fn: c.fn, Persistent: true, Bytes: c.fn.BARBytes(caps.BIR()) &^ 7, confirm: caps.PMRWBM(),
			Patience:    caps.Timeout(),
			BufferBytes: nvme.EBS(c.fn.Load32(nvme.PropPMREBS)).Bytes()}
		if r.confirm&(nvme.PMRWBMRead|nvme.PMRWBMStatus) == 0 {
			r.Unusable = fmt.Errorf("%w: PMRCAP is %#x, and nothing tells that writes are persistent (PMRWBM)",
				ErrInvalidResponse, uint32(caps))
		}
		if caps.BIR() < 2 {
			r.Unusable = fmt.Errorf("%w: its PMR is BAR %d, which has the registers", ErrInvalidResponse, caps.BIR())
		}
		r.open(caps.BIR(), 0)
		all = append(all, r)
	}
	if c.cap.CMBS() {
		enableCMB(c.fn)
	}
	size := nvme.CMBSZ(c.fn.Load32(nvme.PropCMBSZ))
	if size.Bytes() == 0 || uint32(size) == gone {
		return all
	}
	at := nvme.CMBLOC(c.fn.Load32(nvme.PropCMBLOC))
	r := &Region{fn: c.fn, Bytes: size.Bytes(), switched: c.cap.CMBS()}
	if r.switched {
		r.BufferBytes = nvme.EBS(c.fn.Load32(nvme.PropCMBEBS)).Bytes()
	}
	offset := int64(at.OFST()) * size.UnitBytes()
	if at.BIR() < 2 && offset < firstMemory {
		r.Unusable = fmt.Errorf("%w: its CMB is at %#x of BAR %d, where the registers are", ErrInvalidResponse, offset,
			at.BIR())
	}
	r.open(at.BIR(), offset)
	return append(all, r)
}

// enableCMB has CMBLOC and CMBSZ show the CMB. The controller's own address for it (CBA) is not set.
func enableCMB(fn Function) {
	fn.Store32(nvme.PropCMBMSC+4, 0)
	fn.Store32(nvme.PropCMBMSC, nvme.CMBMSCCRE)
}

// open maps the region, and enables the PMR.
func (r *Region) open(bar uint8, offset int64) {
	if r.Unusable != nil {
		return
	}
	if have := r.fn.BARBytes(bar); r.Bytes <= 0 || offset > have || r.Bytes > have-offset {
		r.Unusable = fmt.Errorf("%w: its memory of %d bytes is at %#x of BAR %d, of which %d can be mapped",
			ErrInvalidResponse, r.Bytes, offset, bar, have)
		return
	}
	if r.Memory, r.Unusable = r.fn.MapBAR(bar, offset, r.Bytes); r.Unusable == nil {
		r.Enable()
	}
}

// Enable enables the region, again after the function was reset, and does not wait until it is ready.
func (r *Region) Enable() {
	switch {
	case r.Unusable != nil:
	case r.switched:
		enableCMB(r.fn)
	case r.Persistent && r.fn.Load32(nvme.PropPMRCTL)&nvme.PMRCTLEN == 0:
		r.fn.Store32(nvme.PropPMRCTL, nvme.PMRCTLEN)
	}
}

// Status returns what the PMR says of itself; of the CMB, that nothing is wrong.
//
// Errors: ErrGone.
func (r *Region) Status() (nvme.PMRSTS, error) {
	if !r.Persistent {
		if r.fn.Load32(nvme.PropCSTS) == gone {
			return 0, ErrGone
		}
		return 0, nil
	}
	s := r.fn.Load32(nvme.PropPMRSTS)
	if s == gone {
		return 0, ErrGone
	}
	return nvme.PMRSTS(s), nil
}

// Barrier waits until all earlier stores have arrived, and returns the Status then. Those to the PMR are persistent, if
// the status has no ERR. at is the offset of one of them.
//
// Errors: ErrGone.
func (r *Region) Barrier(at int) (nvme.PMRSTS, error) {
	fullBarrier()
	if !r.Persistent || r.confirm&nvme.PMRWBMStatus == 0 {
		r.Memory.Load64(at)
	}
	return r.Status()
}
