package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"jbofd/client/internal/hostconn"
	"jbofd/internal/nvme"
)

// fail ends the association; the first cause stays. It does not wait.
func (a *association) fail(err error) { a.cancel(err) }

// close ends the association with why, unless it has ended, and waits for its goroutines.
func (a *association) close(why error) error {
	a.cancel(why)
	return errors.Join(a.closeIO(), a.closeAdmin())
}

// closeIO shuts down the queue pairs, which stay for their owners to close, and closes the I/O queues.
func (a *association) closeIO() error {
	cause := context.Cause(a.ctx)
	a.mu.Lock()
	for p := range a.qpairs {
		p.shutDown(fmt.Errorf("%w: %w", ErrConnectionLost, cause))
	}
	a.mu.Unlock()
	var errs []error
	for _, q := range a.io {
		errs = append(errs, q.Close(cause))
	}
	return errors.Join(errs...)
}

func (a *association) closeAdmin() (err error) {
	if a.admin != nil {
		err = a.admin.Close(context.Cause(a.ctx))
	}
	a.wg.Wait()
	return err
}

// shutdown tells the controller that the host leaves, as an orderly end of the association, and waits until the
// controller has carried out or aborted what was outstanding (CSTS.SHST).
func (a *association) shutdown(ctx context.Context) error {
	if err := a.setProperty(ctx, nvme.PropCC, uint64(a.cc.WithSHN(nvme.SHNNormal))); err != nil {
		return err
	}
	return a.waitStatus(ctx, "shutdown (CSTS.SHST)", func(s nvme.CSTS) bool { return s.SHST() == 2 })
}

// maxReset bounds a controller reset, whatever CAP.TO says.
const maxReset = 10 * time.Second

// end closes an association that has failed. It returns 0 if the target is known to have ended the association as well,
// else how long the target may go on with it: commands that it has received may reach a drive in that time.
//
// The target is known to have ended the association if a controller reset has succeeded (the admin queue may be intact
// when another queue has failed), or if the target has closed or reset the connection of the admin queue. Otherwise,
// as when the network is cut or the target is stopped, the association ends there when the keep-alive timeout has
// passed since the last command that arrived; with traffic based keep-alive (CTRATT.TBKAS), when it has passed twice.
//
// Commands of an ended association may be in flight for the target's command quiesce time (CQT) still, unless a reset
// has succeeded. A jbofd target holds the next Connect for that long, so that the host need not wait.
//
// ctx ends the wait for the reset.
//
// Source: NVMe Base 2.1, section 9.6 (communication loss handling).
func (a *association) end(ctx context.Context) (mayGoOn time.Duration) {
	// Their errors say once more that the connection is gone.
	_ = a.closeIO()
	err := a.reset(ctx)
	_ = a.closeAdmin()
	if err == nil || a.opts.discovery {
		return 0
	}
	if _, _, isJBOFD := a.id.Extension(); !isJBOFD {
		mayGoOn = time.Duration(a.id.CQT()) * time.Millisecond
	}
	if !hostconn.EndedByPeer(err) && a.opts.KATO > 0 {
		mayGoOn += a.opts.KATO
		if a.id.CTRATT()&nvme.CTRATTTBKAS != 0 {
			mayGoOn += a.opts.KATO
		}
	}
	return mayGoOn
}

// reset disables the controller and waits, up to CAP.TO, until CSTS.RDY is 0: nothing of the association is under way
// then.
func (a *association) reset(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, min(a.readyTimeout(), maxReset))
	defer cancel()
	if err := a.setProperty(ctx, nvme.PropCC, uint64(a.cc.WithEN(false))); err != nil {
		return err
	}
	return a.waitStatus(ctx, "controller reset (CSTS.RDY)", func(s nvme.CSTS) bool { return !s.RDY() })
}
