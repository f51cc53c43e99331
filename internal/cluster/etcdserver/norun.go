//go:build !etcd

package etcdserver

import "context"

// Built reports whether there is a server in this binary.
const Built = false

// Run returns ErrNotBuilt.
func Run(context.Context, Config, func()) error { return ErrNotBuilt }
