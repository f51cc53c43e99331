package peers

import (
	"errors"
	"syscall"
	"time"

	"jbofd/client"
)

// Loss says for how long a node has been out of reach when it is called disconnected.
type Loss struct {
	// Silent is for how long at most: a command has had no answer for that long, and no other one has had one.
	Silent time.Duration
	// Certain is for how long at least, and not longer than Silent: before that, the node may have been alive.
	Certain time.Duration
}

// loss returns how long a node has been out of reach when its association has ended with an error.
//
// A Keep Alive that got no answer at all was sent KATO ago, and the last answer may be half of that older.
//
// Otherwise the node has ended the connection: because its process has ended just now, or because it has not heard this
// one for KATO, and the other direction works. The silence is then as long as commands have waited, also a Forward,
// which a node that is alive may keep. A Keep Alive is answered by each node that is alive.
func (n *node) loss(a *association, err error) Loss {
	if errors.Is(err, errUnanswered) {
		return Loss{} // it answers others
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
// than any of them has waited, but then an answer to another one has come meanwhile.
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

// retire ends the node, which tells nothing any more when it returns.
func (n *node) retire() {
	n.cancel()
	n.telling.Lock()
	defer n.telling.Unlock()
	n.retired = true
}
