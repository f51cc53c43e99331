package peers

import (
	"errors"
	"syscall"
	"time"

	"jbofd/client"
)

// Loss bounds for how long a node has been out of reach when Disconnected is called. Invariant: Certain <= Silent.
type Loss struct {
	// Silent is the longest that this can be: the node has answered no command for at most that long.
	Silent time.Duration
	// Certain is the shortest: for that long the node has certainly answered nothing; before that it may have been
	// alive.
	Certain time.Duration
}

// loss returns how long a node has been out of reach when its association has ended with an error.
//
// A Keep Alive that got no answer at all was sent KATO ago, and the last answer may be half of that older.
//
// Otherwise the node has ended the connection: because its process has ended just now, or because it has received
// nothing of this one for KATO, and the other direction works. Silent is then as long as a command has waited, also a
// Forward, which a node that is alive may leave unanswered. Certain counts only Keep Alives, which each node that is
// alive answers.
func (n *node) loss(a *association, err error) Loss {
	if errors.Is(err, errUnanswered) {
		return Loss{} // it answers other commands
	}
	now, kato := n.queues[0].driver.Now(), n.p.cfg.KATO
	heard := time.Duration(now - n.heardNS.Load())
	if errors.Is(err, client.ErrTimeout) || errors.Is(err, syscall.ETIMEDOUT) {
		return Loss{Silent: min(max(heard, kato), kato+kato/2), Certain: kato}
	}
	certain := min(a.c.KeepAliveUnanswered(), heard, kato)
	return Loss{Silent: max(min(n.waited(now), heard, kato+kato/2), certain), Certain: certain}
}

// waited returns for how long commands had waited for answers when the connection ended; 0: none did. It may be longer
// than any of them has waited, but then another command was answered meanwhile (heardNS).
func (n *node) waited(now int64) (d time.Duration) {
	for i := range n.queues {
		q := &n.queues[i]
		q.driver.Lock()
		if len(q.free) < len(q.sent) {
			d = max(d, time.Duration(now-q.busyNS))
		}
		q.driver.Unlock()
	}
	return d
}

// connected and disconnected call Config.Connected and Config.Disconnected.
func (n *node) connected() {
	n.telling.Lock()
	defer n.telling.Unlock()
	if !n.retired {
		n.p.cfg.Connected(n.Name)
	}
}

func (n *node) disconnected(l Loss) {
	n.telling.Lock()
	defer n.telling.Unlock()
	if !n.retired {
		n.p.cfg.Disconnected(n.Name, l)
	}
}

// retire ends the node. When it returns, Connected and Disconnected are not called for the node any more.
func (n *node) retire() {
	n.cancel()
	n.telling.Lock()
	defer n.telling.Unlock()
	n.retired = true
}
