// Package client is an NVMe over TCP and NVMe over RDMA host in Go. It connects to jbofd, to the Linux target and to
// SPDK, without a kernel driver and without root.
//
//	Discover ──────────> the log of a discovery service
//	Connect ───> Controller ── admin commands, features, log pages, events; reconnects
//	               ├── Namespace(nsid)   ReadAt, WriteAt, Flush, WriteZeroes, Deallocate, Compare, ...
//	               │                     for any number of goroutines, with contexts
//	               ├── kv.Open           package kv: Get, Put, Delete on key value namespaces
//	               │                     (package cluster: the same on the nodes of a cluster)
//	               └── OpenQPair         batches of commands and completions for one goroutine,
//	                                     without allocations: load generators, replication;
//	                                     or for several that share it by a lock
//
// The package is not a block device: it neither caches nor merges nor reorders, and it uses one path to a controller.
//
// # Losses of the connection
//
// A Controller reconnects. Reads and writes that were outstanding are repeated, writes only when the target can no
// longer carry out their first copy; conditional operations and passthrough commands fail with ErrIndeterminate.
// Controller says which operations are repeated, and what the target must do for it.
//
// # Buffers
//
// A buffer belongs to this package from the call (Submit, for a QPair) to its return (the completion). It is never
// touched afterwards, not even when a context ends a call early.
//
// Over TCP, data moves between the caller's buffers and the socket without a copy where possible.
//
// Over RDMA a device moves the data, which must lie in registered memory. Other data is copied through memory that the
// controller has registered (Options.BounceBytes); commands wait, in order, when all of that memory is in use. The
// commands of a QPair whose data lies in memory of Controller.AllocBuffer are not copied: the target reads and writes
// that memory in place, until the command has completed or the QPair has failed.
//
// # Transports
//
// Options.Address names the transport: tcp://host:port, the default, or rdma://host:port. RDMA needs a program that is
// built with the tag rdma (libibverbs, librdmacm); without it Connect fails with ErrUnsupported.
//
// # Credits
//
// A jbofd target tells each host how much the host may have outstanding at each drive, so that all hosts get their
// share. Commands beyond that wait in this package, in order, and do not hold up commands for other drives.
// Namespace.Credit shows the credit, Namespace.WaitCredit waits for room, and Options.Credits turns credits off.
//
// Commands on a QPair count as outstanding until Poll has returned their completions. A program that fills the window
// with one QPair and then waits for something else, instead of polling, makes slow progress. The drive of a namespace
// is known once the namespace was opened with Controller.Namespace or kv.Open, or once a command to it has completed.
//
// # Keys and values
//
// Package kv is for namespaces of the Key Value command set. It has the same two interfaces: kv.Namespace for any
// number of goroutines, and kv.OpQueue for one that keeps many operations outstanding, with credits and across losses
// of the connection. Controller.Describe tells the command set of a namespace. Where a controller has several I/O
// command sets, the host enables all of them (CC.CSS 110b).
//
// # Errors
//
// A status other than success reaches the caller as a *StatusError. The Err variables are for errors.Is.
package client
