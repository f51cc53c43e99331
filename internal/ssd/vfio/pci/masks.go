package pci

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd/vfio/pcie"
)

// The kernel has no call that masks one interrupt of MSI-X (VFIO_DEVICE_SET_IRQS does not implement it), but it lets
// the process map the table of MSI-X, since Linux 4.16. The mask of a vector is a bit of its entry there. The kernel
// itself changes it only when eventfds are set or the function is reset, because VFIO requires remapped interrupts.
//
//	entry, 16 bytes:  0 message address | 8 message data | 12 vector control: bit 0 masks it
//
// Source: PCI Express Base 5.0, section 7.7.2; Linux, drivers/vfio/pci/vfio_pci_core.c (msix_mappable_cap).
const (
	configStatus       = 6
	statusCapabilities = 1 << 4
	configCapabilities = 0x34
	capabilityMSIX     = 0x11
	// msixTable is where the table is: the BAR in the low 3 bits, the offset in the others.
	msixTable    = 4
	msixEntry    = 16
	msixControl  = 12
	msixMasked   = 1 << 0
	bars         = 6
	configHeader = 0x40
)

// maskTable is the table of MSI-X, mapped. The zero value is none.
type maskTable struct {
	mapping pcie.MMIO
	// first is where the table begins in mapping.
	first int
}

// parseMSIX finds the table in a configuration space.
//
// Errors: there is no capability of MSI-X; it is of no BAR.
func parseMSIX(config []byte) (bar uint32, offset int64, err error) {
	if binary.LittleEndian.Uint16(config[configStatus:])&statusCapabilities == 0 {
		return 0, 0, errors.New("the function has no capabilities")
	}
	at := int(config[configCapabilities] &^ 3)
	for range len(config) / 4 { // a list that does not end, too
		if at < configHeader || at+msixTable+4 > len(config) {
			break
		}
		if config[at] == capabilityMSIX {
			v := binary.LittleEndian.Uint32(config[at+msixTable:])
			if bar = v & 7; bar >= bars {
				return 0, 0, fmt.Errorf("the table of MSI-X is in BAR %d, want 0 to %d", bar, bars-1)
			}
			return bar, int64(v &^ 7), nil
		}
		at = int(config[at+1] &^ 3)
	}
	return 0, 0, errors.New("the function has no capability of MSI-X")
}

// openMasks maps the table.
//
// Errors: why it cannot be mapped.
func (f *Function) openMasks() (maskTable, error) {
	t, err := f.mapMasks()
	if err != nil {
		return maskTable{}, fmt.Errorf("interrupts come while the drive is busy, too: %w", err)
	}
	return t, nil
}

func (f *Function) mapMasks() (maskTable, error) {
	config := make([]byte, 256)
	if _, err := unix.Pread(f.device, config, int64(f.config)); err != nil {
		return maskTable{}, fmt.Errorf("configuration space: %w", err)
	}
	bar, offset, err := parseMSIX(config)
	if err != nil {
		return maskTable{}, err
	}
	m, first, err := f.mapBAR(bar, offset, int64(len(f.vectors)*msixEntry))
	if err != nil {
		return maskTable{}, fmt.Errorf("the table of MSI-X: %w", err)
	}
	return maskTable{mapping: m, first: first}, nil
}

// mask masks a vector, or ends its mask.
//
// hot: 0 allocs
func (t *maskTable) mask(i int, on bool) {
	if t.mapping == nil {
		return
	}
	at := t.first + i*msixEntry + msixControl
	if on {
		t.mapping.Store32(at, msixMasked)
		return
	}
	t.mapping.Store32(at, 0)
	t.mapping.Load32(at) // a write may be under way when the next instruction runs; a read waits for it
}

func (t *maskTable) close() error {
	if t.mapping == nil {
		return nil
	}
	err := unix.Munmap(t.mapping)
	t.mapping = nil
	return err
}

// Mask implements pcie.Function.
//
// hot: 0 allocs
func (f *Function) Mask(i int, on bool) { f.masks.mask(i, on) }

// Unmasked implements pcie.Function.
func (f *Function) Unmasked() error { return f.unmasked }
