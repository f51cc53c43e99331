// Package client is an NVMe over TCP and NVMe over RDMA host in Go: it connects to jbofd, the Linux
// target or SPDK without a kernel driver and without root.
//
//	Discover ──────────> what a discovery service knows
//	Connect ───> Controller ── admin commands, features, log pages, events; reconnects
//	               ├── Namespace(nsid)   ReadAt, WriteAt, Flush, WriteZeroes, Deallocate, Compare, ...
//	               │                     for any number of goroutines, with contexts
//	               ├── kv.Open           package kv: Get, Put, Delete on key value namespaces
//	               └── OpenQPair         batches of commands and completions for one goroutine,
//	                                     nothing allocated: load generators, replication
//
// It is not a block device: nothing is cached, merged or reordered, and there is one path to
// a controller.
//
// # Buffers
//
// Over TCP, data moves between the caller's buffers and the socket directly where it can. A buffer belongs to
// the host from the call (Submit, for a QPair) to its return (the completion); it is
// never touched afterwards, not even when a context ends a call early.
//
// Over RDMA a device moves the data, which must lie in memory that it knows. Other data is copied through memory
// that the controller has registered (Options.BounceBytes); commands wait, in order, when it is used up. A
// QPair's commands whose data lies in memory of Controller.AllocBuffer are not copied: the target reads and
// writes it in place, until the command has completed or the QPair has failed.
//
// # Transports
//
// Options.Address names the transport: tcp://host:port, the default, or rdma://host:port. RDMA needs a program built
// with the tag rdma (libibverbs, librdmacm); without it Connect fails with ErrUnsupported.
//
// # Credits
//
// A jbofd target tells its hosts how much they may have outstanding at each drive so that all get
// their share. What is beyond waits in this package, in order, and holds up nothing for
// other drives. Namespace.Credit shows it, Namespace.WaitCredit waits for room, and
// Options.Credits turns it off. What is outstanding on a QPair counts until Poll has returned it:
// who fills the window with one QPair and then waits for something else, instead of polling, gets
// on only slowly. Which drive a namespace lies on is known once it was opened
// with Controller.Namespace or kv.Open, or when a command to it has completed.
//
// # Keys and values
//
// Namespaces of the Key Value command set are for package kv, which is the same in small: kv.Namespace for any number
// of goroutines, kv.Queue for one that keeps many operations outstanding, with credits and across connection
// losses. Controller.Describe tells which namespaces these are. Where a controller has several command sets all are
// enabled (CC.CSS 110b); a target that knows blocks only, as the Linux one, never notices.
//
// # Errors
//
// What a target answers is a Status; it reaches callers as a *StatusError. ErrConnectionLost,
// ErrClosed, ErrProtocol, ErrTimeout, ErrInvalid, ErrUnsupported, ErrCompareFailed and
// ErrNamespaceGone are for errors.Is.
package client
