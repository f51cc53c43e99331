// Package ioload keeps a queue pair busy in tests: it submits commands, collects their completions, and submits the
// next ones. Once it is made it allocates nothing for a command, so that tests can count the allocations of others.
package ioload

import (
	"errors"
	"fmt"
	"time"

	"jbofd/client"
)

// patience is how long commands may take before Load.Run gives up.
const patience = 20 * time.Second

// Load keeps up to depth commands outstanding on a queue pair. One goroutine at a time may use it.
type Load struct {
	QPair *client.QPair
	// wait is the longest wait for a completion; negative: no limit.
	wait  time.Duration
	depth int
	cmds  []client.Command
	comps []client.Completion
}

// New makes a load whose commands complete within seconds.
func New(q *client.QPair, depth int) *Load {
	return &Load{QPair: q, wait: patience, depth: depth, cmds: make([]client.Command, 0, depth),
		comps: make([]client.Completion, depth)}
}

// Run executes n commands, of which set makes the i-th. Its Tag, below depth, is no other outstanding command's. The
// first command that fails ends the run with an error.
func (l *Load) Run(n int, set func(c *client.Command, i int)) error {
	l.cmds = l.cmds[:0]
	issued, done := 0, 0
	for ; issued < min(l.depth, n); issued++ {
		l.add(uint64(issued), issued, set)
	}
	for done < n {
		if len(l.cmds) > 0 {
			if _, err := l.QPair.Submit(l.cmds); err != nil {
				return err
			}
			l.cmds = l.cmds[:0]
		}
		k, err := l.QPair.Poll(l.comps, l.wait)
		if err == nil && k == 0 && l.wait >= 0 {
			err = errors.New("no completion comes")
		}
		if err != nil {
			return fmt.Errorf("%d of %d are done: %w", done, n, err)
		}
		for _, c := range l.comps[:k] {
			if !c.Status.OK() {
				return fmt.Errorf("command %d: %v", c.Tag, c.Status)
			}
			done++
			if issued < n {
				l.add(c.Tag, issued, set)
				issued++
			}
		}
	}
	return nil
}

func (l *Load) add(tag uint64, i int, set func(c *client.Command, i int)) {
	l.cmds = append(l.cmds, client.Command{Tag: tag})
	set(&l.cmds[len(l.cmds)-1], i)
}

// Blocks is a load of reads or writes of namespace 1, one behind the other, from the beginning again after its end.
type Blocks struct {
	*Load
	// Bufs are the buffers of the commands, one for each that may be outstanding.
	Bufs   [][]byte
	cfg    BlocksConfig
	offset int64
	set    func(c *client.Command, i int)
}

// BlocksConfig says what the commands of Blocks do. Each is for as many bytes as its buffer has.
type BlocksConfig struct {
	Opcode uint8
	// BlockBytes and SizeBytes are those of the namespace. SizeBytes is a multiple of what a command reads or writes.
	BlockBytes int
	SizeBytes  int64
}

// NewBlocks makes a load that waits for its commands as long as they take.
func NewBlocks(q *client.QPair, cfg BlocksConfig, bufs [][]byte) *Blocks {
	b := &Blocks{Load: New(q, len(bufs)), cfg: cfg, Bufs: bufs}
	b.wait = -1
	b.set = b.next
	return b
}

// Run executes n commands. The first that fails ends the run with an error.
func (b *Blocks) Run(n int) error { return b.Load.Run(n, b.set) }

func (b *Blocks) next(c *client.Command, _ int) {
	c.Data = b.Bufs[c.Tag]
	n, block := int64(len(c.Data)), int64(b.cfg.BlockBytes)
	client.SetRW(c, b.cfg.Opcode, 1, uint64(b.offset/block), uint32(n/block))
	b.offset = (b.offset + n) % b.cfg.SizeBytes
}
