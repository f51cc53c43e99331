// Package spdk implements a drive by SPDK's NVMe driver: a controller on the PCI bus, or one that a target offers over
// TCP or RDMA, so that a remote namespace is a drive. It needs the build tag spdk, cgo, and an SPDK that pkg-config
// finds (docs/spdk.md); otherwise Open returns ErrUnavailable.
//
//	Queue.Submit, Poll ──> one call into C for a batch ──> spdk_nvme_ns_cmd_…, spdk_nvme_qpair_process_completions
//	                   <── ring of {slot, status}      <── completion callbacks, in C
//	Queue.Wait ── eventfd of the queue pair's interrupt, or naps
//	keeper ── keep alive, timeouts, Abort, controller reset
//
// shim.c has all C. Its callbacks write to a ring and never call Go. SPDK's driver makes no threads: what it does, it
// does in a call. One goroutine at a time uses a queue pair (queue.mu). A request that is longer than a command may be
// is carried out in parts.
//
// # Memory
//
// Over PCIe and RDMA the device reads and writes data in place. For that a region of the buffer pool is registered with
// SPDK when it is first used, and the addresses of its first and last page are looked up: without an IOMMU,
// spdk_mem_register succeeds for memory that no device can reach. Over TCP the process copies the data itself, and
// nothing is registered. Data in memory that is not of the pool, or could not be registered, is copied through buffers
// of SPDK.
//
// # Waiting
//
// On PCIe, and over RDMA where SPDK can, a queue pair signals an eventfd (ctrlr_opts.enable_interrupts), and Wait
// blocks on it. Otherwise a Wait naps while requests are under way: for a quarter of the time that it has waited, at
// least 20 µs and at most 1 ms. So it is late by at most a quarter, or 1 ms, and costs a few looks for each request.
// Without requests it blocks. The keeper looks after the controller every 400 ms.
//
// # Timeouts
//
// A command that has been outstanding for Config.Timeout is aborted; if it is outstanding for AbortTimeout more, or the
// controller has failed or its connection is lost, the controller is reset and the outstanding commands are sent
// again. A command is sent at most four times (parts.MaxTries). If a reset fails, all requests end with ssd.ErrGone,
// and so do later ones; over TCP and RDMA the reset is tried for AbortTimeout before. Unlike package vfio, SPDK cannot
// take memory away from one device: a controller on the PCI bus that does not stop when it is told to keeps its access
// to the pool.
package spdk

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/ssd"
)

// Config describes a device.
type Config struct {
	// Name is the device's name in the configuration.
	Name string
	TransportID
	// NSID is the namespace; 0: the first active one.
	NSID uint32
	// Pool is where buffers usually come from. May be nil.
	Pool *bufpool.Pool
	// Environment is for the first Open of the process; later ones share what it has made.
	Environment Environment
	// Timeout is how long a command may be outstanding before it is aborted, 0: 30 s. A command that was aborted may be
	// sent again, so a request may take a multiple of it. AbortTimeout is how much longer the command may be
	// outstanding before the controller is reset, 0: 5 s.
	Timeout, AbortTimeout time.Duration
	// Event is called with each timeout and each reset; may be nil. It must not block. One goroutine calls it.
	Event func(kind ssd.HealthEvent, what string)
}

// Environment is what SPDK's environment, of which a process has one, is made with.
type Environment struct {
	// PCI: a drive of the process is on the PCI bus.
	PCI bool
	// MemoryMiB is the memory for queues; 0: 64. It is taken from the system at once, without huge pages.
	MemoryMiB int
}

// TransportID says where a controller is.
type TransportID struct {
	// Transport is "pcie", "tcp" or "rdma".
	Transport string
	// Address (traddr) is the address on the PCI bus, as 0000:03:00.0, or an IP address. Service (trsvcid) is the
	// target's port.
	Address, Service string
	// SubNQN is the target's subsystem, and HostNQN the name that this host has there; empty: SPDK makes one.
	SubNQN, HostNQN string
}

// The errors of Open and OpenQueue.
var (
	// ErrUnavailable: the binary was built without spdk.
	ErrUnavailable = errors.New("SPDK is not available")
	// ErrConfig: a field of Config, or a depth, is out of its bounds.
	ErrConfig = errors.New("spdk: invalid configuration")
	// ErrEnvironment: SPDK's environment cannot be made, or not again in another way.
	ErrEnvironment = errors.New("SPDK's environment")
	// ErrAttach: there is no such controller or namespace, or it cannot be used.
	ErrAttach = errors.New("SPDK cannot attach to the controller")
)

var pciAddress = regexp.MustCompile(`^[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-1][0-9a-fA-F]\.[0-7]$`)

// Check reports what is wrong with an ID.
//
// Errors: ErrConfig.
func (t *TransportID) Check() error {
	switch t.Transport {
	case "pcie":
		if !pciAddress.MatchString(t.Address) {
			return fmt.Errorf("%w: traddr %q is no PCI address, as 0000:03:00.0", ErrConfig, t.Address)
		}
		if t.Service != "" || t.SubNQN != "" || t.HostNQN != "" {
			return fmt.Errorf("%w: a controller on the PCI bus has no trsvcid, subnqn or hostnqn", ErrConfig)
		}
		return nil
	case "tcp", "rdma":
	default:
		return fmt.Errorf("%w: trtype %q, want pcie, tcp or rdma", ErrConfig, t.Transport)
	}
	if _, err := netip.ParseAddr(t.Address); err != nil {
		return fmt.Errorf("%w: traddr %q is no IP address", ErrConfig, t.Address)
	}
	if n, err := strconv.ParseUint(t.Service, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("%w: trsvcid %q is no port", ErrConfig, t.Service)
	}
	for _, nqn := range []string{t.SubNQN, t.HostNQN} {
		if len(nqn) > 223 || strings.ContainsFunc(nqn, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return fmt.Errorf("%w: %q is no NQN", ErrConfig, nqn)
		}
	}
	if t.SubNQN == "" {
		return fmt.Errorf("%w: subnqn is missing", ErrConfig)
	}
	return nil
}

// String returns the ID in the form that spdk_nvme_transport_id_parse reads. It has been checked.
func (t *TransportID) String() string {
	if t.Transport == "pcie" {
		return "trtype:PCIe traddr:" + t.Address
	}
	family := "IPv4"
	if a, err := netip.ParseAddr(t.Address); err == nil && a.Is6() {
		family = "IPv6"
	}
	return fmt.Sprintf("trtype:%s adrfam:%s traddr:%s trsvcid:%s subnqn:%s", strings.ToUpper(t.Transport), family,
		t.Address, t.Service, t.SubNQN)
}
