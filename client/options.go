package client

import (
	"crypto/rand"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hostverbs"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// Options says where to connect and how. The zero value of every field but Address and
// SubNQN stands for a default.
type Options struct {
	// Address is host:port of the target; without a port, 4420 (8009 for Discover over TCP). It may
	// name the transport: tcp://host:port, rdma://host:port.
	Address string
	// Transport is "tcp" or "rdma". Default: what Address says, else "tcp". RDMA needs a program
	// built with the tag rdma.
	Transport string
	// SubNQN is the subsystem.
	SubNQN string
	// HostNQN and HostID say who the host is; a target allows and accounts by them. One
	// HostNQN goes with one HostID. Default: one UUID a process, in HostNQN as
	// nqn.2014-08.org.nvmexpress:uuid:...
	HostNQN string
	HostID  [16]byte

	// Queues is the number of I/O queues that Namespace and the passthrough share; more spread
	// the work over more connections. Default: 1, or none if QPairs is set.
	Queues int
	// QPairs is how many I/O queues OpenQPair may open besides.
	QPairs int
	// QueueDepth is the number of commands outstanding per I/O queue, 1 to 1024; less if
	// the target says so. Default 128.
	QueueDepth int

	// Credits says whether to keep within what the target lets this host have outstanding at a
	// drive. Default: if the target offers it.
	Credits CreditMode

	// HeaderDigest and DataDigest protect PDU headers and data by CRC32C; over TCP only.
	HeaderDigest, DataDigest bool
	// MaxR2T is how many R2Ts the target may have outstanding per command, 1 to 64. Default 4.
	// Over TCP only.
	MaxR2T int
	// BounceBytes is how much registered memory commands may borrow over RDMA, at least 4 MiB,
	// for data that does not lie in memory of AllocBuffer; it is taken as it is needed. Commands beyond
	// wait at the host. Default 64 MiB.
	BounceBytes int64
	// RDMA reaches the RDMA devices. Default: the machine's. Tests put a model here.
	RDMA verbs.Provider

	// KATO is the keep-alive timeout: the target ends the association after that long
	// without a Keep Alive, which the host sends at half of it whatever else goes on.
	// Default 5 s (Linux's); negative: none.
	KATO time.Duration
	// ConnectTimeout bounds one attempt to build an association. Default 10 s.
	ConnectTimeout time.Duration
	// CommandTimeout is how long a command may stay unanswered before the host gives the
	// association up and reconnects; whole seconds. Default 30 s; negative: for ever.
	CommandTimeout time.Duration
	// ReconnectDelay is the pause between attempts to reconnect. Default 1 s.
	ReconnectDelay time.Duration
	// CtrlLossTimeout is how long to try to reconnect after a loss; meanwhile operations
	// wait, then they fail with ErrConnectionLost. Default 600 s (Linux's); negative: do not
	// reconnect.
	CtrlLossTimeout time.Duration
	// MaxRetries is how often an operation is repeated after a status that asks for it
	// (no DNR, and of a passing nature). Default 5; negative: never.
	MaxRetries int

	// Spin is how long a QPair's Poll looks for completions before it blocks, when few
	// commands are outstanding. Default 50 µs if there is more than one processor to run on;
	// negative: not at all.
	Spin time.Duration

	// OnEvent, if set, gets asynchronous events, one at a time, from a goroutine of the
	// controller. It must not call Close.
	OnEvent func(Event)
	// Logger gets losses and recoveries of the connection. Default: none.
	Logger *slog.Logger

	discovery   bool              // the subsystem is a discovery controller
	onReconnect func()            // called when the connection is back
	memory      *hostverbs.Memory // over RDMA
}

// adminDepth bounds the commands outstanding on the admin queue.
const adminDepth = 31

// processHostID is this process's default identity.
var processHostID = sync.OnceValue(func() nvme.UUID {
	var u nvme.UUID
	// crypto/rand.Read never fails; it ends the program instead.
	_, _ = rand.Read(u[:])
	u[6] = u[6]&0x0f | 0x40
	u[8] = u[8]&0x3f | 0x80
	return u
})

// HostNQNFor returns the host NQN that goes with a host identifier by convention.
func HostNQNFor(hostID [16]byte) string {
	return "nqn.2014-08.org.nvmexpress:uuid:" + nvme.UUID(hostID).String()
}

// ParseUUID reads a UUID, as of a host identifier.
func ParseUUID(s string) ([16]byte, error) {
	u, err := nvme.ParseUUID(s)
	return u, err
}

// Transports of Options.
const (
	TCP  = "tcp"
	RDMA = "rdma"
)

// setAddress takes Address apart and fills in transport and port.
func (o *Options) setAddress() error {
	if scheme, rest, ok := strings.Cut(o.Address, "://"); ok {
		if o.Transport != "" && o.Transport != scheme {
			return fmt.Errorf("%w: Address is %q, Transport %q", ErrInvalid, o.Address, o.Transport)
		}
		if scheme != TCP && scheme != RDMA {
			return fmt.Errorf("%w: Address is %q, must be host:port, tcp://host:port or rdma://host:port", ErrInvalid, o.Address)
		}
		o.Transport, o.Address = scheme, strings.TrimSuffix(rest, "/")
	}
	switch o.Transport {
	case "":
		o.Transport = TCP
	case TCP, RDMA:
	default:
		return fmt.Errorf("%w: Transport is %q, must be %q or %q", ErrInvalid, o.Transport, TCP, RDMA)
	}
	if o.Address == "" {
		return fmt.Errorf("%w: Address is empty, must be host:port", ErrInvalid)
	}
	port := nvme.DefaultIOPort // over RDMA of discovery services, too
	if o.discovery && o.Transport == TCP {
		port = nvme.DefaultDiscovery
	}
	if _, _, err := net.SplitHostPort(o.Address); err != nil {
		if !strings.Contains(err.Error(), "missing port") && !strings.Contains(err.Error(), "too many colons") {
			return fmt.Errorf("%w: Address %q: %w", ErrInvalid, o.Address, err)
		}
		o.Address = net.JoinHostPort(strings.Trim(o.Address, "[]"), fmt.Sprint(port))
	}
	if o.Transport == RDMA && (o.HeaderDigest || o.DataDigest) {
		return fmt.Errorf("%w: HeaderDigest or DataDigest over RDMA, which has checksums of its own", ErrInvalid)
	}
	return nil
}

// URL returns the address with the transport.
func (o *Options) URL() string { return o.Transport + "://" + o.Address }

// withDefaults fills and checks o.
//
// Errors: ErrInvalid, naming the field.
func (o Options) withDefaults() (Options, error) {
	if err := o.setAddress(); err != nil {
		return o, err
	}
	if o.HostID == [16]byte{} {
		o.HostID = processHostID()
		if o.HostNQN != "" {
			// The same name must not come with changing identifiers: derive it.
			o.HostID = nameUUID(o.HostNQN)
		}
	}
	if o.HostNQN == "" {
		o.HostNQN = HostNQNFor(o.HostID)
	}
	if err := nvme.CheckNQN(o.SubNQN); err != nil {
		return o, fmt.Errorf("%w: SubNQN: %w", ErrInvalid, err)
	}
	if err := nvme.CheckNQN(o.HostNQN); err != nil {
		return o, fmt.Errorf("%w: HostNQN: %w", ErrInvalid, err)
	}
	if o.Queues == 0 && o.QPairs == 0 && !o.discovery {
		o.Queues = 1
	}
	for _, f := range []struct {
		name       string
		v          *int
		def, lo, h int
	}{
		{"Queues", &o.Queues, 0, 0, 1024}, {"QPairs", &o.QPairs, 0, 0, 1024},
		{"QueueDepth", &o.QueueDepth, 128, 1, host.MaxDepth}, {"MaxR2T", &o.MaxR2T, 4, 1, 64},
	} {
		if *f.v == 0 {
			*f.v = f.def
		}
		if *f.v < f.lo || *f.v > f.h {
			return o, fmt.Errorf("%w: %s is %d, must be %d to %d", ErrInvalid, f.name, *f.v, f.lo, f.h)
		}
	}
	for _, f := range []struct {
		v   *time.Duration
		def time.Duration
	}{
		{&o.KATO, 5 * time.Second}, {&o.ConnectTimeout, 10 * time.Second}, {&o.CommandTimeout, 30 * time.Second},
		{&o.ReconnectDelay, time.Second}, {&o.CtrlLossTimeout, 600 * time.Second}, {&o.Spin, defaultSpin()},
	} {
		if *f.v == 0 {
			*f.v = f.def
		}
	}
	if o.KATO > 0 && o.KATO < 100*time.Millisecond {
		return o, fmt.Errorf("%w: KATO is %s, must be at least 100ms, or negative for none", ErrInvalid, o.KATO)
	}
	if o.ConnectTimeout < 0 || o.ReconnectDelay < 0 {
		return o, fmt.Errorf("%w: ConnectTimeout is %s and ReconnectDelay %s, must not be negative", ErrInvalid, o.ConnectTimeout, o.ReconnectDelay)
	}
	if o.BounceBytes == 0 {
		o.BounceBytes = hostverbs.DefaultPoolBytes
	}
	if o.BounceBytes < hostverbs.MinPoolBytes {
		return o, fmt.Errorf("%w: BounceBytes is %d, must be at least %d", ErrInvalid, o.BounceBytes, hostverbs.MinPoolBytes)
	}
	if o.MaxRetries == 0 {
		o.MaxRetries = 5
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

func defaultSpin() time.Duration {
	if runtime.GOMAXPROCS(0) > 1 {
		return DefaultSpin
	}
	return -1
}

// hostIDFile is where nvme-cli keeps the machine's host identifier.
const hostIDFile = "/etc/nvme/hostid"

// MachineHost returns the host NQN and identifier of this machine as nvme-cli keeps them in
// /etc/nvme; ok is false if it keeps none.
func MachineHost() (hostNQN string, hostID [16]byte, ok bool) {
	b, err := os.ReadFile(hostIDFile)
	if err != nil {
		return "", hostID, false
	}
	u, err := nvme.ParseUUID(strings.TrimSpace(string(b)))
	if err != nil {
		return "", hostID, false
	}
	nqn := HostNQNFor(u)
	if b, err := os.ReadFile("/etc/nvme/hostnqn"); err == nil && nvme.CheckNQN(strings.TrimSpace(string(b))) == nil {
		nqn = strings.TrimSpace(string(b))
	}
	return nqn, u, true
}
