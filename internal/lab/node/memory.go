package node

import (
	"fmt"
	"math/rand/v2"

	"jbofd/internal/bufpool"
)

// Fault model of memory: at any time other users of the node's pool take everything that is left of it, and give it
// back piece by piece within squeezeNS. A process that dies takes its pool with it.

const (
	// squeezeNS is how long the other users keep memory at most, squeezePauseNS how long they pause at most.
	squeezeNS, squeezePauseNS = 300e6, 600e6
	// plentyPart of the pool is in use at most when nobody may wait for memory: no account can then hold more than its
	// share, and there are free blocks of every size that the hosts' commands need.
	plentyPart = 4
)

// taken is memory of another user.
type taken struct {
	account *bufpool.Account
	buf     bufpool.Buf
}

// squeeze lets the other users of memory take it again and again.
func (l *Lab) squeeze() {
	if l.memory == nil {
		l.memory = l.Sim.Rand("memory")
	}
	l.Sim.After(l.memory.Int64N(squeezePauseNS), func() {
		if !l.disturb {
			return
		}
		if n := l.Node; !n.process.Dead() && !n.process.Stopped() && !n.ending {
			l.Sim.Tracef("memory becomes scarce")
			n.takeMemory(l.memory)
		}
		l.squeeze()
	})
}

// takeMemory takes what is left of the pool, each piece for an account of its own: an account that holds nothing may
// have any block.
func (n *Node) takeMemory(rng *rand.Rand) {
	cfg := n.pool.Config()
	for size := cfg.MaxBytes; size >= cfg.MinBytes; {
		a := n.pool.Account(fmt.Sprint("other user ", len(n.taken)))
		b, ok := n.pool.Get(a, size)
		if !ok {
			a.Close()
			size /= 2
			continue
		}
		n.taken = append(n.taken, taken{a, b})
		n.lab.Sim.After(rng.Int64N(squeezeNS), func() {
			n.process.Deliver(func() {
				if !n.ending {
					n.giveBack()
				}
			})
		})
	}
}

// giveBack returns the memory that was taken last, if there is any.
func (n *Node) giveBack() {
	if last := len(n.taken) - 1; last >= 0 {
		t := n.taken[last]
		n.taken = n.taken[:last]
		n.pool.Put(t.buf)
		t.account.Close()
	}
}

// endSqueeze gives back what was taken: the node ends in order.
func (n *Node) endSqueeze() {
	n.ending = true
	for len(n.taken) > 0 {
		n.giveBack()
	}
}

// nobodyWaits demands that nothing waits for memory while there is plenty.
func (n *Node) nobodyWaits() {
	if s := n.pool.Stats(); s.InUseBytes > s.TotalBytes/plentyPart {
		return
	}
	for _, a := range n.pool.AppendAccounts(nil) {
		if a.Waiting > 0 {
			n.lab.Violation("%d wait for memory of account %q, which holds %d bytes, while there is plenty", a.Waiting,
				a.Name, a.InUseBytes)
		}
	}
}

// overdueNS is how long a command may take on drives that are healthy, and without caps.
const overdueNS = 20e9

// nobodyLingers demands that the commands of a connection that is over end soon while the drives are healthy: they need
// nothing more of their host, and if they wait for memory they are taken out.
func (n *Node) nobodyLingers() {
	if !n.lab.healthy() || n.process.Dead() {
		return
	}
	for _, c := range n.connsInOrder() {
		if c.dead && c.InFlight() > 0 && n.lab.Sim.Now()-max(c.deadNS, n.lab.frozenNS) > overdueNS {
			n.lab.Violation("connection %d is over for %d s and has %d commands in flight", c.end.ID,
				int64((n.lab.Sim.Now()-c.deadNS)/1e9), c.InFlight())
		}
	}
}
