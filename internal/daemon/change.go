package daemon

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/ssd"
	"jbofd/internal/units"
)

// Two locks order what changes while the daemon runs. Node.changes is held by a change of the configuration, or of what
// is on the drives, from its beginning to its end, however long that is. Node.reload is held by whatever reads or
// changes drives, labels, stores and what is published, and is the later one of the two. A change returns it while it
// erases or resizes (withoutReload), so that other drives can be withdrawn and taken into service: these changes take
// Node.reload alone.

// change is what holds Node.changes, or Node.reload for a drive. The others wait, and say for what.
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

// beginChange takes n.changes and n.reload for a change of the configuration or of what is on the drives. endChange
// returns them.
//
// Errors: errStopping; nothing is taken then.
func (n *Node) beginChange(what string) error {
	n.lock(&n.changes, what)
	n.lock(&n.reload, what)
	if n.isStopping() {
		n.reload.Unlock()
		n.changes.Unlock()
		return errStopping
	}
	n.change.set(what)
	return nil
}

func (n *Node) endChange() {
	n.change.set("")
	n.reload.Unlock()
	n.changes.Unlock()
}

// beginDriveChange takes n.reload to withdraw a drive or to take one into service. endDriveChange releases it.
//
// Errors: errStopping; it is not taken then.
func (n *Node) beginDriveChange(what string) error {
	n.lock(&n.reload, what)
	if n.isStopping() {
		n.reload.Unlock()
		return errStopping
	}
	n.driveChange.set(what)
	return nil
}

func (n *Node) endDriveChange() {
	n.driveChange.set("")
	n.reload.Unlock()
}

// lock takes a lock for a change, and says so if that has to wait.
func (n *Node) lock(l *sync.Mutex, what string) {
	if l.TryLock() {
		return
	}
	if other := n.runningChange(); other != nil {
		n.log.Info("a change waits for another one", "change", what, "waits_for", other.String())
	}
	l.Lock()
}

func (n *Node) isStopping() bool {
	select {
	case <-n.stopping:
		return true
	default:
		return false
	}
}

// withoutReload runs f, which may take long on a drive, with n.reload released. The caller holds n.changes and
// n.reload, and has both again when it returns. Meanwhile drives may be withdrawn and taken into service. If this one
// is, f goes on until it ends by itself, and no other drive takes its place before that. Look again at what was known
// of other drives.
//
// Errors: those of f; ssd.ErrGone if the drive was withdrawn.
func (n *Node) withoutReload(d *openSSD, f func() error) error {
	n.working = d.drive
	n.reload.Unlock()
	err := f()
	n.reload.Lock()
	n.working = nil
	if err == nil && !slices.Contains(n.drives(), d) {
		err = fmt.Errorf("it has been withdrawn: %w", ssd.ErrGone)
	}
	return err
}

func (c *change) set(what string) {
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

// runningChange describes the change that is under way, that of a drive first; nil: there is none.
func (n *Node) runningChange() *admin.RunningChange {
	if c := n.driveChange.describe(); c != nil {
		return c
	}
	return n.change.describe()
}

func (c *change) describe() *admin.RunningChange {
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
