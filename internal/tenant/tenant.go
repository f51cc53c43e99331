// Package tenant names who pays. A tenant is one or more hosts under one name in the configuration, or a single host
// that the configuration does not name. Connections, drives, pipelines, key-value stores, credits and metrics all
// charge device time, memory and background work to the same ID.
package tenant

// ID is a tenant's number within one target service. IDs are small and dense, so that they index slices; the target
// service gives them out, and reuses an ID only when the connections that were charged to it are closed and every drive
// has finished the last I/O charged to it.
type ID uint32

// None is no tenant.
const None = ^ID(0)
