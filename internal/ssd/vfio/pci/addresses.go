package pci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// addresses is a range of addresses of the bus.
type addresses struct{ from, end uint64 }

// addressAlign is a multiple of each page of an IOMMU that maps 2 MiB at once.
const addressAlign = 2 << 20

// barsOf returns what the BARs of a function have of the addresses of the bus. A controller of a version before NVMe
// 1.4 with a Controller Memory Buffer takes each address in there for that buffer, also if its IOMMU would map it to
// memory: data would be read from the buffer, or be lost in it. Later ones wait for CMBMSC.CMSE.
//
// Errors: the system's, or what is wrong with a line of sysfs.
func (b Bus) barsOf(address string) (all []addresses, err error) {
	text, err := os.ReadFile(filepath.Join(b.sys("devices", address), "resource"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		var first, last, flags uint64
		if n, err := fmt.Sscanf(line, "%v %v %v", &first, &last, &flags); n != 3 {
			return nil, fmt.Errorf("resource of %s: %q: %w", address, line, err)
		}
		if last > first {
			all = append(all, addresses{first, last + 1})
		}
	}
	return all, nil
}

// place returns the first address from next on from which so many bytes are in none of the ranges.
func place(next uint64, bytes int, avoid []addresses) uint64 {
	for free := false; !free; {
		free = true
		for _, a := range avoid {
			if next < a.end && next+uint64(bytes) > a.from {
				next, free = (a.end+addressAlign-1)&^(addressAlign-1), false
			}
		}
	}
	return next
}
