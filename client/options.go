package client

import (
	"crypto/rand"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hostverbs"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/verbs"
	"jbofd/internal/uuid"
)

// Options configure a connection. The zero value of every field but Address and SubNQN stands for a default.
type Options struct {
	// Address is host:port of the target; the default port is 4420 (8009 for Discover over TCP). It may name the
	// transport: tcp://host:port, rdma://host:port.
	Address string
	// Transport is "tcp" or "rdma". Default: that of Address, else "tcp". RDMA needs a program that is built with the
	// tag rdma.
	Transport string
	// LocalAddress is the address of this machine that connections come from; the zero Addr: any. Over RDMA, a device
	// has it.
	LocalAddress netip.Addr
	// SubNQN is the NQN of the subsystem.
	SubNQN string
	// HostNQN and HostID identify the host: targets use them for access control and accounting. A HostNQN must always
	// come with the same HostID. Default: one random UUID per process, also as HostNQN
	// (nqn.2014-08.org.nvmexpress:uuid:...).
	//
	// The fence for repeated writes (see Controller) goes by both. Two processes that share them wait for each other's
	// ended associations; a process that restarts with other ones is not fenced against its own old writes.
	HostNQN string
	HostID  [16]byte

	// Queues is the number of I/O queues, each with a connection, that Namespace and the passthrough share. Default: 1,
	// or none if QPairs is set.
	Queues int
	// QPairs is the number of additional I/O queues that OpenQPair may open.
	QPairs int
	// QueueDepth is the number of commands outstanding per I/O queue, 1 to 1024; a target may allow fewer. Default 128.
	QueueDepth int

	// Credits tells whether the host keeps within the target's credits: see CreditMode. Default CreditsAuto.
	Credits CreditMode
	// ReportCredits: the program keeps within the credits itself: no command waits for them at the host. See
	// ReportedCredit, QueryCredit and IOQueue.
	ReportCredits bool
	// NoExtendedKV: the host does not use extended key-value, even if the target offers it: see package kv.
	NoExtendedKV bool
	// Replication: the host is a node of a cluster, and sends the commands of replication (docs/wire-extensions.md).
	// Connect fails with ErrUnsupported if the target does not grant them, because its configuration does not name
	// HostNQN as a node. They need a QPair: nothing else here knows whether such a command may be repeated.
	Replication bool

	// HeaderDigest and DataDigest protect PDU headers and data by CRC32C. TCP only.
	HeaderDigest, DataDigest bool
	// MaxR2T is the number of R2Ts that the target may have outstanding per command, 1 to 64. Default 4. TCP only.
	MaxR2T int
	// BounceBytes bounds the registered memory through which commands move data that does not lie in memory of
	// AllocBuffer, at least 4 MiB. It is allocated and registered on demand. Commands that find none wait at the host.
	// Default 64 MiB. RDMA only.
	BounceBytes int64
	// RDMA gives access to RDMA devices. Default: the devices of this machine. Tests set a simulated provider.
	RDMA verbs.Provider

	// KATO is the keep-alive timeout. The host sends a Keep Alive every KATO/2; the target ends the association when
	// none has arrived for KATO. Default 5 s, as Linux; negative: none.
	//
	// KATO also bounds how long a target may go on with an association whose connections it does not know to be broken.
	// After such a loss the host waits for KATO before it reconnects (twice that if the target has traffic based
	// keep-alive). Without KATO it cannot know when the target has ended the association, and repeats writes at once.
	KATO time.Duration
	// ConnectTimeout bounds one attempt to build an association. The first Connect repeats the attempt within this time
	// while the target answers Controller Busy. It should be longer than a target holds a Connect. Default 10 s.
	ConnectTimeout time.Duration
	// CommandTimeout is how long a command may remain unanswered before the host ends the association and reconnects,
	// in whole seconds. Default 30 s; negative: for ever.
	CommandTimeout time.Duration
	// ReconnectDelay is the pause between attempts to reconnect. After Controller Busy it is shorter at first: 50 ms,
	// doubled each time, up to ReconnectDelay. Default 1 s.
	ReconnectDelay time.Duration
	// CtrlLossTimeout bounds reconnecting after a loss, the end of the old association and Controller Busy included.
	// Operations wait meanwhile and fail with ErrConnectionLost afterwards. Default 600 s, as Linux; negative: do not
	// reconnect.
	CtrlLossTimeout time.Duration
	// MaxRetries is how often an operation is repeated after a status of a transient nature without DNR. It applies to
	// the operations that Controller repeats after a loss. Default 5; negative: never.
	MaxRetries int

	// Spin is how long Poll of a QPair looks for completions without blocking when few commands are outstanding.
	// Default 50 µs if GOMAXPROCS is greater than 1; negative: not at all.
	Spin time.Duration

	// OnEvent, if set, is called with asynchronous events, one at a time, by a goroutine of the controller. It must not
	// call Close.
	OnEvent func(Event)
	// Logger logs a Connect that takes longer than a second, with the reason, and losses and recoveries of the
	// connection. Default: none.
	Logger *slog.Logger

	discovery   bool              // the subsystem is a discovery service
	onReconnect func()            // called when a lost association was replaced
	slowConnect time.Duration     // when a Connect is logged as slow; default 1 s
	memory      *hostverbs.Memory // RDMA only
}

// adminDepth bounds the commands outstanding on the admin queue.
const adminDepth = 31

// processHostID returns the default host identifier, one per process.
var processHostID = sync.OnceValue(func() uuid.UUID {
	var u uuid.UUID
	// crypto/rand.Read never fails; it ends the program instead.
	_, _ = rand.Read(u[:])
	u[6] = u[6]&0x0f | 0x40
	u[8] = u[8]&0x3f | 0x80
	return u
})

// HostNQNFor returns the host NQN that the specification derives from a host identifier.
func HostNQNFor(hostID [16]byte) string {
	return "nqn.2014-08.org.nvmexpress:uuid:" + uuid.UUID(hostID).String()
}

// ParseUUID parses a UUID, such as a host identifier.
func ParseUUID(s string) ([16]byte, error) {
	u, err := uuid.Parse(s)
	return u, err
}

// Transports of Options.
const (
	TCP  = "tcp"
	RDMA = "rdma"
)

// setAddress splits Address into transport, host and port, and fills in defaults.
func (o *Options) setAddress() error {
	if scheme, rest, ok := strings.Cut(o.Address, "://"); ok {
		if o.Transport != "" && o.Transport != scheme {
			return fmt.Errorf("%w: Address is %q, Transport %q", ErrInvalid, o.Address, o.Transport)
		}
		if scheme != TCP && scheme != RDMA {
			return fmt.Errorf("%w: Address is %q, must be host:port, tcp://host:port or rdma://host:port", ErrInvalid,
				o.Address)
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
	port := nvme.DefaultIOPort // also of discovery services over RDMA
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
		return fmt.Errorf("%w: HeaderDigest and DataDigest are for TCP only: RDMA has checksums of its own", ErrInvalid)
	}
	return nil
}

// URL returns transport://host:port.
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
			// A HostNQN must always come with the same identifier: derive it from the name.
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
		return o, fmt.Errorf("%w: ConnectTimeout is %s and ReconnectDelay %s, must not be negative", ErrInvalid,
			o.ConnectTimeout, o.ReconnectDelay)
	}
	if o.BounceBytes == 0 {
		o.BounceBytes = hostverbs.DefaultPoolBytes
	}
	if o.BounceBytes < hostverbs.MinPoolBytes {
		return o, fmt.Errorf("%w: BounceBytes is %d, must be at least %d", ErrInvalid, o.BounceBytes,
			hostverbs.MinPoolBytes)
	}
	if o.MaxRetries == 0 {
		o.MaxRetries = 5
	}
	if o.slowConnect == 0 {
		o.slowConnect = time.Second
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
	u, err := uuid.Parse(strings.TrimSpace(string(b)))
	if err != nil {
		return "", hostID, false
	}
	nqn := HostNQNFor(u)
	if b, err := os.ReadFile("/etc/nvme/hostnqn"); err == nil && nvme.CheckNQN(strings.TrimSpace(string(b))) == nil {
		nqn = strings.TrimSpace(string(b))
	}
	return nqn, u, true
}
