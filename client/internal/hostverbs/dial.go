package hostverbs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"jbofd/client/internal/host"
	"jbofd/client/internal/hostrdma"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/cm"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// Config describes the queue to connect.
type Config struct {
	// Address is host:port of the target.
	Address string
	// LocalAddress is that of the device that the connection comes from; the zero Addr: that of the route.
	LocalAddress netip.Addr
	// QID and CNTLID are queue and controller; CNTLID is for I/O queues only. Depth is the number of commands that may
	// be outstanding; the submission queue has one entry more.
	QID, CNTLID uint16
	Depth       int
	// InCapsuleBytes is how many bytes of data a capsule may carry; 0 for the admin queue, as in Linux.
	InCapsuleBytes int
	// Direct: data in memory of Memory.Alloc is transferred in place.
	Direct bool
	// Memory is the memory of the controller.
	Memory *Memory
}

// retry is how often the device repeats a message that was lost, or for which the target had no receive posted. In the
// second case 7 means for ever: a target that is short of receives does not violate the protocol.
const retry = 7

// process has the provider of this process, which is opened on demand and never closed.
var process struct {
	mu sync.Mutex
	p  verbs.Provider
}

func processProvider() (verbs.Provider, error) {
	process.mu.Lock()
	defer process.mu.Unlock()
	if process.p == nil {
		p, err := verbs.Open()
		if errors.Is(err, verbs.ErrUnavailable) {
			err = fmt.Errorf("%w: %w", host.ErrUnsupported, err)
		}
		if err != nil {
			return nil, err
		}
		process.p = p
	}
	return process.p, nil
}

// Dial connects a queue. The Connect command must follow.
//
// Errors: host.ErrUnsupported if this program or machine has no RDMA; host.ErrProtocol; *verbs.RejectedError, whose
// text has the target's status; those of verbs; the context's.
func Dial(ctx context.Context, cfg Config) (*Conn, error) {
	p := cfg.Memory.provider
	if p == nil {
		var err error
		if p, err = processProvider(); err != nil {
			return nil, err
		}
	}
	addrs, err := lookUp(ctx, cfg.Address)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, a := range addrs {
		c, err := dial(ctx, p, a, &cfg)
		if err == nil {
			return c, nil
		}
		errs = append(errs, fmt.Errorf("rdma %s: %w", a, err))
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// lookUp resolves host:port to one or more addresses.
func lookUp(ctx context.Context, address string) ([]netip.AddrPort, error) {
	name, service, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	port, err := net.DefaultResolver.LookupPort(ctx, "tcp", service)
	if err != nil {
		return nil, err
	}
	var ips []netip.Addr
	if ip, err := netip.ParseAddr(name); err == nil {
		ips = []netip.Addr{ip}
	} else if ips, err = net.DefaultResolver.LookupNetIP(ctx, "ip", name); err != nil {
		return nil, err
	}
	addrs := make([]netip.AddrPort, len(ips))
	for i, ip := range ips {
		addrs[i] = netip.AddrPortFrom(ip.Unmap(), uint16(port))
	}
	return addrs, nil
}

func dial(ctx context.Context, p verbs.Provider, remote netip.AddrPort, cfg *Config) (_ *Conn, err error) {
	c := &Conn{hasEnded: make(chan struct{})}
	c.ep, err = p.ResolveFrom(ctx, cfg.LocalAddress, remote)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if err := c.build(cfg); err != nil {
		return nil, err
	}
	c.ep.OnEvent(c.event)
	if err := c.postRecvs(); err != nil {
		return nil, err
	}
	var r cm.Request
	r.SetQID(cfg.QID)
	r.SetHRQSIZE(uint16(cfg.Depth + 1))
	r.SetHSQSIZE(uint16(cfg.Depth))
	if cfg.QID != 0 {
		r.SetCNTLID(cfg.CNTLID)
	}
	err = c.ep.Connect(ctx, verbs.Params{
		PrivateData: r[:], ResponderResources: c.ep.Device().Attr().MaxResponderResources,
		RetryCount: retry, RNRRetryCount: retry,
	})
	if err != nil {
		return nil, refusal(err)
	}
	if b := c.ep.Peer().PrivateData; len(b) >= cm.AcceptLen {
		if f := (*cm.Accept)(b).RECFMT(); f != 0 {
			return nil, fmt.Errorf("%w: accept with RECFMT %d, must be 0", host.ErrProtocol, f)
		}
	}
	return c, nil
}

// refusal adds the target's status to the error of a rejected connection.
func refusal(err error) error {
	var r *verbs.RejectedError
	if !errors.As(err, &r) || len(r.PrivateData) < cm.RejectLen {
		return err
	}
	s := (*cm.Reject)(r.PrivateData).STS()
	if s == 0 {
		return err
	}
	return fmt.Errorf("the target refuses the queue: %s: %w", s, err)
}

// build creates the resources of the connection. After an error, Close frees those that were created.
func (c *Conn) build(cfg *Config) (err error) {
	if c.domain, err = cfg.Memory.acquire(c.ep.Device()); err != nil {
		return err
	}
	c.mem = newQueueMemory(c.domain, cfg.Depth)
	if c.region, err = pages(hostrdma.RegionBytes(cfg.Depth, cfg.InCapsuleBytes)); err != nil {
		return err
	}
	d := c.domain.d
	if c.mr, err = d.Register(c.region, verbs.LocalWrite); err != nil {
		return fmt.Errorf("register %d bytes for capsules: %w", len(c.region), err)
	}
	recvs := hostrdma.Recvs(cfg.Depth)
	if c.cq, err = d.CreateCQ(cfg.Depth + recvs); err != nil {
		return fmt.Errorf("completion queue of %d entries: %w", cfg.Depth+recvs, err)
	}
	c.qp, err = c.ep.CreateQP(verbs.QPConfig{Domain: d, SendCQ: c.cq, RecvCQ: c.cq, Sends: cfg.Depth, Recvs: recvs,
		InlineBytes: nvme.SQESize})
	if err != nil {
		return fmt.Errorf("queue pair of %d entries: %w", cfg.Depth, err)
	}
	c.m = hostrdma.New(hostrdma.Options{
		Depth: cfg.Depth, InCapsuleBytes: cfg.InCapsuleBytes, Region: c.region, Addr: c.mr.Addr(), LKey: c.mr.LKey(),
		QP: c.qp.Handle(), InlineBytes: c.qp.InlineBytes(), Memory: c.mem, MaxBytes: MaxBounceBytes, Direct: cfg.Direct,
	})
	return nil
}

// free frees what build has created. The endpoint must be closed already.
func (c *Conn) free() error {
	var errs []error
	if c.cq != nil {
		errs = append(errs, c.cq.Close())
	}
	if c.mr != nil {
		errs = append(errs, c.mr.Close())
	}
	if c.region != nil {
		errs = append(errs, freePages(c.region))
	}
	if c.mem != nil {
		errs = append(errs, c.mem.close())
	}
	if c.domain != nil {
		errs = append(errs, c.domain.m.release(c.domain))
	}
	return errors.Join(errs...)
}
