//go:build !rdma || !cgo

package verbs

import "fmt"

// BuiltIn reports whether the binary supports RDMA devices.
const BuiltIn = false

// Open opens the machine's RDMA stack.
//
// Errors: ErrUnavailable.
func Open() (Provider, error) {
	return nil, fmt.Errorf("%w: built without rdma (make build TAGS=rdma)", ErrUnavailable)
}
