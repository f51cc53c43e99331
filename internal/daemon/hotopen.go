package daemon

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"jbofd/internal/config"
)

// The opening of a device may hang: the kernel may not answer for as long as it likes. One that takes longer than
// openTimeout is given up: nothing uses the device any more, and it is closed if it is ever open. Until that has ended,
// the drive is tried again by a reload only, and maxOpenings times at most.

const (
	// maxOpenings is how many openings of one drive may be under way. Each occupies a thread.
	maxOpenings = 3
	// openingPatience is how long a stop waits for devices that are being opened, after everything else is closed.
	openingPatience = 100 * time.Millisecond
)

// mayOpen reports whether another opening of a drive may begin.
func (n *Node) mayOpen(ssd string, asked bool) bool {
	n.hot.mu.Lock()
	defer n.hot.mu.Unlock()
	under := n.hot.under[ssd]
	return under == 0 || asked && under < maxOpenings
}

// count notes that an opening of a drive begins, or ends.
func (h *hotAdd) count(ssd string, by int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.under == nil {
		h.under = map[string]int{}
	}
	h.under[ssd] += by
}

// hangs reports whether a device was still being opened when the node stopped.
func (h *hotAdd) hangs() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.left
}

// open opens the device of a drive, or says why that has failed; nil: the node stops. A device that is open later is
// closed again.
func (n *Node) open(sc config.SSD, format bool) *openedDevice {
	opened, over := make(chan *openedDevice), make(chan struct{})
	defer close(over)
	n.beginOpening(sc, format, opened, over)
	patience := cmp.Or(n.opts.OpenTimeout, openTimeout)
	select {
	case o := <-opened:
		return o
	case <-time.After(patience):
		return &openedDevice{err: unanswered(patience)}
	case <-n.stopping:
		return nil
	}
}

// beginOpening opens a device and hands it to opened, or closes it if over is closed before.
func (n *Node) beginOpening(sc config.SSD, format bool, opened chan<- *openedDevice, over <-chan struct{}) {
	n.hot.count(sc.Name, 1)
	n.hot.attending.Go(func() {
		defer n.hot.count(sc.Name, -1)
		o := &openedDevice{over: over}
		if o.err = n.openDevice(o, sc, format); o.err != nil {
			o.close()
		}
		select {
		case opened <- o:
		case <-over:
			o.close()
		}
	})
}

func unanswered(patience time.Duration) error {
	return fmt.Errorf("it has not answered within %v while it was opened", patience)
}

// awaitOpenings waits at a stop for what attends to drives and opens them, for a short time: the drives that are in
// service are closed, and the process may end.
func (n *Node) awaitOpenings() {
	n.beginStop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.hot.attending.Wait()
	}()
	if within(openingPatience, done) {
		return
	}
	n.hot.mu.Lock()
	n.hot.left = true
	var names []string
	for name, under := range n.hot.under {
		if under > 0 {
			names = append(names, name)
		}
	}
	n.hot.mu.Unlock()
	slices.Sort(names)
	if len(names) == 0 {
		return
	}
	n.log.Warn("a drive that is being opened has not answered; stopped without it", "ssds", names)
}
