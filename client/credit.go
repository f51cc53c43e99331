package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"jbofd/client/internal/window"
	"jbofd/internal/nvme"
)

// CreditMode tells whether the host uses credits: see docs/wire-extensions.md.
type CreditMode uint8

// Credit modes.
const (
	// CreditsAuto: the host uses credits if the target offers them. Commands then wait at the host instead of in the
	// target, which costs no throughput, and the host can choose what to send next.
	CreditsAuto CreditMode = iota
	// CreditsOn: Connect fails with ErrUnsupported if the target does not grant them.
	CreditsOn
	// CreditsOff: the host does not use credits, as a standard host.
	CreditsOff
)

// askForExtensions enables the extensions that the target offers and the options allow; a.granted is what it grants.
// With credits a.gate is the association's gate. known is the gate of the previous association, or nil for the first
// one. It knows the drives of the namespaces that the host uses: the new association gets the first credit of each
// before commands are sent to them again.
//
// Errors: those of admin commands; ErrUnsupported if the options insist on credits or replication and the target does
// not grant them.
func (a *association) askForExtensions(ctx context.Context, known *window.Gate) error {
	want := uint32(nvme.ExtCredits | nvme.ExtKV)
	if a.opts.Credits == CreditsOff {
		want &^= nvme.ExtCredits
	}
	if a.opts.NoExtendedKV {
		want &^= nvme.ExtKV
	}
	if a.opts.Replication {
		want |= nvme.ExtReplication
	}
	_, offered, _ := a.id.Extension()
	if want &= offered; want != 0 {
		var e SQE
		e.SetOpcode(nvme.AdminSetFeatures)
		e.Features().SetFID(nvme.FIDExtensions)
		e.Features().SetValue(want)
		comp, err := a.adminCommand(ctx, "Set Features (extensions)", e, nil)
		var st *StatusError
		if err != nil && !errors.As(err, &st) {
			return err
		}
		if err == nil {
			a.granted = uint32(comp.Result) & want
		}
		if a.granted&nvme.ExtCredits != 0 && !a.opts.ReportCredits {
			a.gate = window.New()
			a.gate.Grant(nvme.Credit(comp.Result >> 32))
		}
	}
	if a.opts.Replication && a.granted&nvme.ExtReplication == 0 {
		return fmt.Errorf("%w: %s does not offer replication to %s, which is not one of its nodes", ErrUnsupported,
			a.opts.SubNQN, a.opts.HostNQN)
	}
	if a.opts.Credits == CreditsOn && a.granted&nvme.ExtCredits == 0 {
		return fmt.Errorf("%w: the target grants no credits", ErrUnsupported)
	}
	if a.gate == nil {
		return nil
	}
	var err error
	if known != nil {
		known.Namespaces(func(nsid uint32, ssd uint16) {
			if err == nil {
				err = a.recordDrive(ctx, nsid, ssd)
			}
		})
	}
	return err
}

// recordDrive records the drive of a namespace, and gets the first credit for that drive if there is none yet.
func (a *association) recordDrive(ctx context.Context, nsid uint32, ssd uint16) error {
	if a.gate == nil || !a.gate.Map(nsid, ssd) {
		return nil
	}
	var e SQE
	e.SetOpcode(nvme.AdminGetFeatures)
	e.Features().SetFID(nvme.FIDExtensions)
	e.Features().SetValue(uint32(ssd))
	comp, err := a.adminCommand(ctx, "Get Features (extensions)", e, nil)
	var st *StatusError
	if errors.As(err, &st) {
		return nil // the first completion brings a credit
	}
	if err == nil {
		a.gate.Grant(nvme.Credit(comp.Result >> 32))
	}
	return err
}

// Credit describes what a host may have outstanding at a drive, over all queue pairs and namespaces of a Controller,
// and what it has outstanding. It starts from zero with each association.
type Credit struct {
	// On: the target has granted credits. The rest is zero otherwise.
	On bool
	// SSD is the drive's number in the node.
	SSD uint16
	// Units is how many units of 4 KiB may be outstanding; 0: the target sets no limit.
	Units int
	// Outstanding is how many units are outstanding.
	Outstanding int
	// Waiting is the number of commands that wait at the host for credit, Waits the number of those that have waited,
	// and WaitTime the sum of their waiting times.
	Waiting  int
	Waits    uint64
	WaitTime time.Duration
	// Overdrawn is how many units were sent beyond the credit, because commands waited and nothing had completed for
	// 100 ms: the credit may be held by commands whose completions nobody collects.
	Overdrawn uint64
}

// Credit returns the credit of the drive of the namespace: see Controller.Credit.
func (n *Namespace) Credit() Credit { return n.c.Credit(n.nsid) }

// WaitCredit is Controller.WaitCredit for the namespace.
func (n *Namespace) WaitCredit(ctx context.Context, lenBytes int) error {
	return n.c.WaitCredit(ctx, n.nsid, lenBytes)
}

// Credit returns the credit of the drive of a namespace. It is zero while the controller reconnects.
func (c *Controller) Credit(nsid uint32) Credit {
	c.mu.Lock()
	a := c.a
	c.mu.Unlock()
	if a == nil || a.gate == nil {
		return Credit{}
	}
	s := a.gate.State(nsid)
	return Credit{On: true, SSD: s.SSD, Units: s.Units, Outstanding: s.Outstanding, Waiting: s.Waiting, Waits: s.Waits,
		WaitTime: s.Waited, Overdrawn: s.Overdrawn}
}

// WaitCredit returns when a command to a namespace with lenBytes of data would not have to wait at the host; at once if
// there are no credits. It reserves nothing. It is for programs that choose their next command when one can be sent,
// instead of queueing commands in advance.
//
// Errors: the context's; ErrConnectionLost; ErrClosed.
func (c *Controller) WaitCredit(ctx context.Context, nsid uint32, lenBytes int) error {
	for {
		a, err := c.current(ctx)
		if err != nil || a.gate == nil {
			return err
		}
		err = a.gate.Wait(ctx, a.ctx.Done(), nsid, lenBytes)
		if !errors.Is(err, window.ErrDead) {
			return err
		}
	}
}

// Locate tells the controller the drive of a namespace in a jbofd node, so that also the first commands to the
// namespace keep within the credit of that drive. Namespace and kv.Open call it.
//
// Errors: ErrConnectionLost, ErrClosed; the context's.
func (c *Controller) Locate(ctx context.Context, nsid uint32, ssd uint16) error {
	for {
		a, err := c.current(ctx)
		if err != nil {
			return err
		}
		// After a loss it is repeated on the next association, like all admin commands that only read.
		if err := a.recordDrive(ctx, nsid, ssd); !errors.Is(err, ErrConnectionLost) || ctx.Err() != nil {
			return err
		}
	}
}
