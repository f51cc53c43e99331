//go:build rdma

// Package rdmahost is a misbehaving host for a running daemon, over real verbs. TestRDMA of package vm builds it and
// runs it in the guest:
//   - JBOFD_RDMA_TARGET is IP:port of an RDMA listener;
//   - JBOFD_RDMA_NQN a subsystem there whose namespace 1 has blocks of 4 KiB.
package rdmahost

import (
	"context"
	"net/netip"
	"os"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/rdma/rawhost"
	"jbofd/internal/nvmeof/rdma/verbs"
)

// target is the daemon, a provider for raw hosts, and a well-behaved host.
type target struct {
	provider verbs.Provider
	address  netip.AddrPort
	good     *client.Controller
}

func open(t *testing.T) *target {
	t.Helper()
	s := os.Getenv("JBOFD_RDMA_TARGET")
	if s == "" {
		t.Skip("JBOFD_RDMA_TARGET is not set: there is no daemon to trouble")
	}
	p, err := verbs.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	c, err := client.Connect(ctx, client.Options{Address: "rdma://" + s, SubNQN: os.Getenv("JBOFD_RDMA_NQN"), RDMA: p,
		Queues: 1, QPairs: 1, QueueDepth: 8, CtrlLossTimeout: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return &target{provider: p, address: netip.MustParseAddrPort(s), good: c}
}

func (g *target) dial(t *testing.T) *rawhost.Host { return rawhost.New(t, g.provider, g.address) }

// join connects a raw host as queue 2 of the well-behaved host's controller. The daemon may not have released the
// previous one yet.
func (g *target) join(t *testing.T) *rawhost.Host {
	t.Helper()
	id, err := g.good.Identity(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	o := g.good.Options()
	h := g.dial(t)
	h.Join(rawhost.Association{HostNQN: o.HostNQN, HostID: o.HostID, SubNQN: o.SubNQN, CNTLID: id.CNTLID}, 2)
	return h
}

// serves checks that the well-behaved host is still served.
func (g *target) serves(t *testing.T) {
	t.Helper()
	ns, err := g.good.Namespace(t.Context(), 1)
	if err == nil {
		_, err = ns.ReadAt(t.Context(), make([]byte, 64<<10), 0)
	}
	if err != nil {
		t.Errorf("the good host is not served any more: %v", err)
	}
}

func TestPrivateData(t *testing.T) {
	g := open(t)
	if n := rawhost.CheckPrivateData(func() *rawhost.Host { return g.dial(t) }, false); n == 0 {
		t.Error("nothing was tried")
	}
	g.serves(t)
}

func TestSGLs(t *testing.T) {
	g := open(t)
	g.join(t).CheckSGLs()
	g.serves(t)
}

// Each ends the raw host's connection; those of writes are in the error log, newest first.
func TestWrongKeys(t *testing.T) {
	for _, tc := range rawhost.WrongKeys {
		t.Run(tc.Name, func(t *testing.T) {
			g := open(t)
			h := g.join(t)
			h.SendSpoiled(tc.Opcode, 0x1234, tc.Spoil)
			for { // the flush of the receive, or of the SEND, is the end
				if w := h.Next(); w.Status != verbs.StatusOK {
					break
				}
			}
			g.serves(t)
			if tc.Opcode != nvme.CmdWrite {
				return
			}
			b := make([]byte, 64)
			for begin := time.Now(); ; {
				if err := g.good.GetLogPage(t.Context(), client.LogPage{LID: nvme.LIDError}, b); err != nil {
					t.Fatal(err)
				}
				l := (*nvme.ErrorLogEntry)(b)
				if l.Status().Code() == nvme.DataTransferError && l.CID() == 0x1234 && l.SQID() == 2 {
					return
				}
				if time.Since(begin) > 10*time.Second {
					t.Fatalf("the error log says %v of command %#x in queue %d", l.Status(), l.CID(), l.SQID())
				}
			}
		})
	}
}
