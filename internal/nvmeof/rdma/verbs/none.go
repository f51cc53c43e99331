//go:build !rdma || !cgo

package verbs

import "fmt"

// Open opens the machine's RDMA devices.
//
// Errors: ErrUnavailable.
func Open() (Provider, error) {
	return nil, fmt.Errorf("%w: built without rdma (make build TAGS=rdma)", ErrUnavailable)
}
