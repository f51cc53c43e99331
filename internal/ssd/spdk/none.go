//go:build !spdk || !cgo

package spdk

import (
	"fmt"

	"jbofd/internal/ssd"
)

// BuiltIn reports whether the binary has SPDK's driver.
const BuiltIn = false

// Open opens a controller.
//
// Errors: ErrUnavailable.
func Open(cfg Config) (ssd.Device, error) {
	return nil, fmt.Errorf("device %q: %w: built without spdk (make build TAGS=spdk)", cfg.Name, ErrUnavailable)
}
