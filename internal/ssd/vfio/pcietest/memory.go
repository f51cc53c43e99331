package pcietest

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd/vfio/pcie"
)

// The bars of the controller that have memory.
const (
	cmbBAR, pmrBAR = 2, 4
)

// PMR describes a Persistent Memory Region.
type PMR struct {
	// Content is what it has at first; its length is the size. The controller changes it, as far as that is persistent:
	// another controller with it is the same drive after a power cut.
	Content []byte
	// Confirm are the PMRWBM bits.
	Confirm uint8
	// NotReady is for how many reads of PMRSTS it is not ready after it was enabled, < 0: for ever. Timeout is PMRTO.
	NotReady int
	Timeout  uint8
	// Health is PMRSTS.HSTS.
	Health uint8
	// NoBAR: its BAR is missing. Registers: PMRCAP names that of the registers.
	NoBAR, Registers bool
}

// CMB describes a Controller Memory Buffer of Bytes at Offset of its BAR, both multiples of 4096.
type CMB struct {
	Bytes, Offset int64
	// Short is how much shorter its BAR is than it should be. Old: it is as before NVMe 1.4, without CMBMSC.
	Short int64
	Old   bool
	// InRegisters: CMBLOC names the BAR of the registers.
	InRegisters bool
}

// memory implements pcie.Memory: a region of the controller.
type memory struct {
	c *Controller
	// content is what the host sees. durable is the same without the words of dirty, which were stored since the last
	// barrier: nobody knows what a power cut does to them.
	content, durable []byte
	dirty            map[int]bool
	// on: it was enabled, and works. left is for how many more reads of PMRSTS it is not ready.
	on, mapped bool
	left       int
}

// addMemory adds the regions of the configuration.
func (c *Controller) addMemory(cp nvme.CAP) nvme.CAP {
	if p := c.cfg.PMR; p != nil {
		cp = cp.WithPMRS(true)
		c.pmr = &memory{c: c, content: append([]byte(nil), p.Content...), durable: p.Content, dirty: map[int]bool{}}
		bar := uint8(pmrBAR)
		if p.Registers {
			bar = 0
		}
		c.regs[nvme.PropPMRCAP] = uint32(nvme.PMRCAP(0).WithBIR(bar).WithPMRWBM(p.Confirm).WithTimeout(p.Timeout))
		c.regs[nvme.PropPMRSTS] = uint32(nvme.MakePMRSTS(true, 0, 0))
		c.regs[nvme.PropPMREBS] = uint32(nvme.MakeEBS(4096))
	}
	if m := c.cfg.CMB; m != nil {
		c.cmb = &memory{c: c, content: make([]byte, m.Bytes), dirty: map[int]bool{}, on: m.Old}
		if m.Old {
			c.showCMB(true)
		} else {
			cp = cp.WithCMBS(true)
		}
	}
	return cp
}

func (c *Controller) showCMB(on bool) {
	bar := uint8(cmbBAR)
	if c.cfg.CMB.InRegisters {
		bar = 0
	}
	c.regs[nvme.PropCMBLOC], c.regs[nvme.PropCMBSZ] = 0, 0
	if on {
		c.regs[nvme.PropCMBLOC] = uint32(nvme.MakeCMBLOC(bar, uint32(c.cfg.CMB.Offset/4096)))
		c.regs[nvme.PropCMBSZ] = uint32(nvme.MakeCMBSZ(uint32(c.cfg.CMB.Bytes/4096), 0))
	}
}

// memoryRegister carries out a write to a property of the memory, and reports whether it is one.
func (c *Controller) memoryRegister(offset int, v uint32) bool {
	switch {
	case offset == nvme.PropCMBMSC && c.cmb != nil && !c.cfg.CMB.Old:
		c.regs[offset] = v
		c.cmb.on = v&nvme.CMBMSCCRE != 0
		c.showCMB(c.cmb.on)
		if v&^nvme.CMBMSCCRE != 0 {
			c.stray("CMBMSC is %#x", v)
		}
	case offset == nvme.PropPMRCTL && c.pmr != nil:
		c.regs[offset] = v
		c.pmr.on, c.pmr.left = v&nvme.PMRCTLEN != 0, c.cfg.PMR.NotReady
		c.setPMR(c.cfg.PMR.Health, 0)
	case offset == nvme.PropCMBMSC || offset == nvme.PropCMBMSC+4 && v != 0 || offset == nvme.PropPMRCTL:
		c.stray("a write of %#x to register %#x, which it does not have", v, offset)
	default:
		return false
	}
	return true
}

func (c *Controller) setPMR(hsts, err uint8) {
	c.regs[nvme.PropPMRSTS] = uint32(nvme.MakePMRSTS(!c.pmr.on || c.pmr.left != 0, hsts, err))
}

// readPMRSTS has what a read of PMRSTS does happen.
func (c *Controller) readPMRSTS() {
	s := nvme.PMRSTS(c.regs[nvme.PropPMRSTS])
	if c.pmr.on && c.pmr.left > 0 {
		c.pmr.left--
		c.setPMR(s.HSTS(), s.ERR())
	}
	if c.cfg.PMR.Confirm&nvme.PMRWBMStatus != 0 {
		c.pmr.settle()
	}
}

// settle makes what was stored persistent.
func (m *memory) settle() {
	for at := range m.dirty {
		if m.durable != nil {
			copy(m.durable[at:at+8], m.content[at:])
		}
	}
	clear(m.dirty)
}

// resetMemory is what a reset of the function does: what was not settled may be lost.
func (c *Controller) resetMemory() {
	if c.pmr != nil {
		c.pmr.lose(func() bool { return true })
		c.pmr.on = false
		c.regs[nvme.PropPMRCTL] = 0
		c.setPMR(0, 0)
	}
	if c.cmb != nil {
		for i := range c.cmb.content {
			c.cmb.content[i] = 0xC5
		}
		if !c.cfg.CMB.Old {
			c.cmb.on, c.regs[nvme.PropCMBMSC] = false, 0
			c.showCMB(false)
		}
	}
}

// lose has the words that were not settled be the old ones where that returns true.
func (m *memory) lose(old func() bool) {
	for at := range len(m.content) / 8 {
		if at *= 8; m.dirty[at] && old() {
			copy(m.content[at:at+8], m.durable[at:])
		}
	}
	copy(m.durable, m.content)
	clear(m.dirty)
}

// CutPower ends the controller as a power cut does. Each word of the PMR that was stored after the last barrier is then
// the old or the new one in PMR.Content.
func (c *Controller) CutPower(rng *rand.Rand) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pmr.lose(func() bool { return rng.IntN(2) == 0 })
	c.vanished = true
}

// SetPMR sets the health (PMRSTS.HSTS) and the error (PMRSTS.ERR) of the PMR.
func (c *Controller) SetPMR(hsts, err uint8) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.setPMR(hsts, err)
}

// BARBytes implements pcie.Function.
func (c *Controller) BARBytes(bar uint8) int64 {
	switch {
	case bar == 0:
		return 0x4000
	case bar == pmrBAR && c.pmr != nil && !c.cfg.PMR.NoBAR:
		return int64(len(c.pmr.content))
	case bar == cmbBAR && c.cmb != nil:
		return c.cfg.CMB.Offset + c.cfg.CMB.Bytes - c.cfg.CMB.Short
	}
	return 0
}

// MapBAR implements pcie.Function.
func (c *Controller) MapBAR(bar uint8, offset, bytes int64) (pcie.Memory, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.revoked {
		return nil, os.ErrClosed
	}
	if offset < 0 || offset > c.BARBytes(bar) || bytes > c.BARBytes(bar)-offset {
		return nil, fmt.Errorf("%d bytes at %#x of BAR %d", bytes, offset, bar)
	}
	m := c.pmr
	if bar == cmbBAR {
		m = c.cmb
		if offset != c.cfg.CMB.Offset {
			return nil, fmt.Errorf("the CMB is not at %#x", offset)
		}
	}
	m.mapped = true
	return m, nil
}

// access returns where a word is, or false if it is nowhere.
func (m *memory) access(offset int) bool {
	switch {
	case m.c.vanished:
		return false
	case m.c.revoked || !m.mapped:
		m.c.stray("memory at %#x is used, and is not mapped", offset)
		return false
	case offset%8 != 0 || offset < 0 || offset+8 > len(m.content):
		m.c.stray("a word at %#x of memory of %d bytes", offset, len(m.content))
		return false
	case !m.on:
		m.c.stray("memory at %#x is used, and is not enabled", offset)
		return false
	}
	return true
}

// Load64 implements pcie.Memory.
func (m *memory) Load64(offset int) uint64 {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	if !m.access(offset) {
		return ^uint64(0)
	}
	if m == m.c.pmr && m.c.cfg.PMR.Confirm&nvme.PMRWBMRead != 0 {
		m.settle()
	}
	return binary.LittleEndian.Uint64(m.content[offset:])
}

// Store64 implements pcie.Memory. What is stored in a PMR that is not writable is dropped, as a posted write is.
func (m *memory) Store64(offset int, v uint64) {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	if !m.access(offset) {
		return
	}
	if s := nvme.PMRSTS(m.c.regs[nvme.PropPMRSTS]); m == m.c.pmr && (s.HSTS() > nvme.PMRRestoreError || s.NRDY()) {
		return
	}
	binary.LittleEndian.PutUint64(m.content[offset:], v)
	m.dirty[offset] = true
}
