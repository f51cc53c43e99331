package daemon

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/units"
)

// change is what holds Node.reload: one change at a time is made to the configuration or to what is on the drives. The
// others wait, and say for what.
type change struct {
	mu sync.Mutex
	// what names the change; empty: there is none. doing is its present work, such as erasing, and done and bytes are
	// the progress of that; bytes 0: it is not known.
	what, doing string
	began       time.Time
	done, bytes units.Bytes
}

// errStopping is the error of changes that come too late.
var errStopping = errors.New("the daemon is stopping; try again when it is back")

// beginChange takes n.reload for a change of the configuration or of drives. endChange returns it.
//
// Errors: errStopping; n.reload is not taken then.
func (n *Node) beginChange(what string) error {
	if !n.reload.TryLock() {
		if other := n.runningChange(); other != nil {
			n.log.Info("a change waits for another one", "change", what, "waits_for", other.String())
		}
		n.reload.Lock()
	}
	select {
	case <-n.stopping:
		n.reload.Unlock()
		return errStopping
	default:
	}
	n.setChange(what)
	return nil
}

func (n *Node) endChange() {
	n.setChange("")
	n.reload.Unlock()
}

func (n *Node) setChange(what string) {
	c := &n.change
	c.mu.Lock()
	defer c.mu.Unlock()
	c.what, c.doing, c.began, c.done, c.bytes = what, "", time.Now(), 0, 0
}

// erasing notes how far the change is that erases so many bytes.
func (n *Node) erasing(done, bytes units.Bytes) { n.changing("erased", done, bytes) }

// changing notes how far the change is.
func (n *Node) changing(doing string, done, bytes units.Bytes) {
	c := &n.change
	c.mu.Lock()
	defer c.mu.Unlock()
	c.doing, c.done, c.bytes = doing, done, bytes
}

// runningChange describes what holds n.reload, or returns nil.
func (n *Node) runningChange() *admin.RunningChange {
	c := &n.change
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.what == "" {
		return nil
	}
	return &admin.RunningChange{What: c.what, RunningMS: time.Since(c.began).Milliseconds(), DoneBytes: int64(c.done),
		TotalBytes: int64(c.bytes), Doing: c.doing}
}

// deletionOf names the deletion of a namespace.
func deletionOf(uuid string) string { return fmt.Sprintf("the deletion of namespace %s", uuid) }
