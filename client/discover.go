package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"jbofd/internal/nvme"
)

// maxDiscoveryEntries bounds a discovery log, whatever its header says.
const maxDiscoveryEntries = 16384

// discoveryChunk is the number of entries that one Get Log Page reads.
const discoveryChunk = 16

// discoveryRetries bounds the attempts to read a log that changes while it is read.
const discoveryRetries = 10

// DiscoveryLog is the log of a discovery service, as this host sees it.
type DiscoveryLog struct {
	// Generation is the generation counter of the log: it grows with each change.
	Generation uint64           `json:"generation"`
	Entries    []DiscoveryEntry `json:"entries"`
}

// SubsystemType is the type of the subsystem of a discovery entry.
type SubsystemType uint8

// Subsystem types.
const (
	// Referral is another discovery service.
	Referral SubsystemType = nvme.SUBTYPEDiscovery
	// Storage is an NVM subsystem.
	Storage SubsystemType = nvme.SUBTYPENVM
	// ThisDiscovery is the discovery service itself.
	ThisDiscovery SubsystemType = nvme.SUBTYPEDiscoveryCurrent
)

// String returns the name that nvme-cli prints.
func (t SubsystemType) String() string {
	switch t {
	case Referral:
		return "discovery subsystem referral"
	case Storage:
		return "nvme subsystem"
	case ThisDiscovery:
		return "current discovery subsystem"
	}
	return fmt.Sprintf("SubsystemType(%d)", uint8(t))
}

// MarshalText writes the type's name into JSON.
func (t SubsystemType) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// DiscoveryEntry is one path to one subsystem.
type DiscoveryEntry struct {
	Type SubsystemType `json:"type"`
	// Transport is tcp, rdma, fc, loop or a number; Family ipv4, ipv6, ib, fc, loop or a number.
	Transport string `json:"transport"`
	Family    string `json:"adrfam"`
	// Host and Service are the transport address: for tcp and rdma, IP address and port.
	Host    string `json:"traddr"`
	Service string `json:"trsvcid"`
	SubNQN  string `json:"subNQN"`
	PortID  uint16 `json:"portid"`
	// CNTLID is FFFFh for dynamic controllers.
	CNTLID uint16 `json:"cntlid"`
	// MaxAdminQueue is the number of entries of the largest admin queue.
	MaxAdminQueue int `json:"maxAdminQueue"`
	// Persistent: the discovery service accepts persistent connections and reports changes.
	Persistent bool `json:"persistent"`
	// SecureChannel: the target requires TLS, which this host does not support.
	SecureChannel bool `json:"secureChannel"`
}

// Address returns host:port, for Options.Address.
func (e *DiscoveryEntry) Address() string { return net.JoinHostPort(e.Host, e.Service) }

// URL returns transport://host:port. Options.Address accepts it if the transport is tcp or rdma.
func (e *DiscoveryEntry) URL() string { return e.Transport + "://" + e.Address() }

// Discovery is a persistent connection to a discovery service: it reconnects after losses and reports changes of the
// log. Any goroutine may call its methods.
type Discovery struct {
	c       *Controller
	changed chan struct{}
}

// Discover reads a discovery service's log and disconnects. Options.SubNQN may be empty.
//
// Errors: as Connect.
func Discover(ctx context.Context, o Options) (log DiscoveryLog, err error) {
	if o.KATO == 0 {
		o.KATO = -1
	}
	o.CtrlLossTimeout = -1
	d, err := ConnectDiscovery(ctx, o)
	if err != nil {
		return DiscoveryLog{}, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	return d.Log(ctx)
}

// ConnectDiscovery opens a persistent connection to a discovery service. Options.SubNQN may be empty. Close must be
// called.
func ConnectDiscovery(ctx context.Context, o Options) (*Discovery, error) {
	d := &Discovery{changed: make(chan struct{}, 1)}
	if o.SubNQN == "" {
		o.SubNQN = nvme.DiscoveryNQN
	}
	o.discovery = true
	user := o.OnEvent
	o.OnEvent = func(e Event) {
		if e.Kind == EventDiscovery {
			d.signal()
		}
		if user != nil {
			user(e)
		}
	}
	o.onReconnect = d.signal // the host has missed changes that were made meanwhile
	c, err := Connect(ctx, o)
	if err != nil {
		return nil, err
	}
	d.c = c
	return d, nil
}

func (d *Discovery) signal() {
	select {
	case d.changed <- struct{}{}:
	default:
	}
}

// Changed returns a channel that receives after the log has changed, or may have. Several changes may be reported once.
func (d *Discovery) Changed() <-chan struct{} { return d.changed }

// Controller returns the discovery controller, for passthrough.
func (d *Discovery) Controller() *Controller { return d.c }

// Close disconnects. Idempotent.
func (d *Discovery) Close() error { return d.c.Close() }

// Log reads the whole log, all of it of one generation.
//
// Errors: ErrProtocol for an invalid log; those of Controller.GetLogPage.
func (d *Discovery) Log(ctx context.Context) (DiscoveryLog, error) {
	for range discoveryRetries {
		log, ok, err := d.read(ctx)
		if err != nil || ok {
			return log, err
		}
		t := time.NewTimer(10 * time.Millisecond)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return DiscoveryLog{}, ctx.Err()
		}
	}
	return DiscoveryLog{}, fmt.Errorf("the discovery log changed %d times while it was read", discoveryRetries)
}

// read reads the log once; ok is false if the log has changed meanwhile.
func (d *Discovery) read(ctx context.Context) (log DiscoveryLog, ok bool, err error) {
	page := func(off uint64, b []byte, keep bool) error {
		return d.c.GetLogPage(ctx, LogPage{LID: nvme.LIDDiscovery, Offset: off, KeepEvent: keep}, b)
	}
	var h nvme.DiscoveryHeader
	if err := page(0, h[:], true); err != nil {
		return log, false, err
	}
	if h.RECFMT() != 0 {
		return log, false, fmt.Errorf("%w: discovery log: RECFMT is %d, must be 0", ErrProtocol, h.RECFMT())
	}
	if h.NUMREC() > maxDiscoveryEntries {
		return log, false, fmt.Errorf("%w: discovery log: NUMREC is %d, must be at most %d", ErrProtocol, h.NUMREC(),
			maxDiscoveryEntries)
	}
	log.Generation = h.GENCTR()
	n := int(h.NUMREC())
	buf := make([]byte, min(n, discoveryChunk)*nvme.DiscoveryEntrySize)
	for i := 0; i < n; {
		k := min(n-i, discoveryChunk)
		b := buf[:k*nvme.DiscoveryEntrySize]
		if err := page(uint64(nvme.DiscoveryHeaderSize+i*nvme.DiscoveryEntrySize), b, true); err != nil {
			return log, false, err
		}
		for ; len(b) > 0; b = b[nvme.DiscoveryEntrySize:] {
			e := (*nvme.DiscoveryEntry)(b)
			if err := e.Check(); err != nil {
				// The entry may be invalid because the log is changing: the generation below tells.
				log.Entries = append(log.Entries, DiscoveryEntry{})
				continue
			}
			log.Entries = append(log.Entries, entry(e))
		}
		i += k
	}
	// Reading the header again confirms the generation and enables the next event.
	if err := page(0, h[:], false); err != nil {
		return log, false, err
	}
	if h.GENCTR() != log.Generation {
		return log, false, nil
	}
	for i := range log.Entries {
		if log.Entries[i].SubNQN == "" {
			return log, false, fmt.Errorf("%w: discovery log: entry %d is malformed", ErrProtocol, i)
		}
	}
	return log, true, nil
}

// entry converts an entry that Check has accepted.
func entry(e *nvme.DiscoveryEntry) DiscoveryEntry {
	return DiscoveryEntry{
		Type: SubsystemType(e.SUBTYPE()),
		Transport: named(e.TRTYPE(), map[uint8]string{
			nvme.TRTYPERDMA: "rdma", nvme.TRTYPEFC: "fc", nvme.TRTYPETCP: "tcp", nvme.TRTYPELoop: "loop",
		}),
		Family: named(e.ADRFAM(), map[uint8]string{
			nvme.ADRFAMIPv4: "ipv4", nvme.ADRFAMIPv6: "ipv6", nvme.ADRFAMIB: "ib", nvme.ADRFAMFC: "fc",
			nvme.ADRFAMLoop: "loop",
		}),
		Host: e.TRADDR(), Service: e.TRSVCID(), SubNQN: e.SubNQN(), PortID: e.PORTID(), CNTLID: e.CNTLID(),
		MaxAdminQueue: int(e.ASQSZ()),
		Persistent:    e.EFLAGS()&nvme.DiscoveryEflagEPCSD != 0,
		SecureChannel: e.TREQ()&3 == nvme.TREQSecureRequired,
	}
}

func named(v uint8, names map[uint8]string) string {
	if s, ok := names[v]; ok {
		return s
	}
	return fmt.Sprint(v)
}
