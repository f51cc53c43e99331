package daemon

import (
	"fmt"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
)

// notify sends a state to systemd, if systemd started the daemon.
func notify(state string) { _, _ = sd.SdNotify(false, state) }

// watchdog notifies systemd twice in each period of its watchdog, if it has one.
func watchdog() (stop func()) {
	period, err := sd.SdWatchdogEnabled(false)
	if err != nil || period == 0 {
		return func() {}
	}
	done := make(chan struct{})
	go func() {
		t := time.NewTicker(period / 2)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				notify(sd.SdNotifyWatchdog)
			case <-done:
				return
			}
		}
	}()
	return func() { close(done) }
}

const (
	// openingExtension is by how much an opening that gets on extends the start. It is longer than the time between two
	// reports of progress.
	openingExtension = 30 * time.Second
	// stoppingMargin is by how much longer than its own limits allow systemd lets the daemon stop.
	stoppingMargin = 5 * time.Second
)

// extendTimeout tells systemd to wait at least so long from now until the daemon has started or stopped. It never
// shortens the limit of the unit (TimeoutStartSec, TimeoutStopSec).
func extendTimeout(by time.Duration) {
	notify(fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", by.Microseconds()))
}
