package kv_test

import (
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/nvmeof/executor/kv"
	"jbofd/internal/partition"
)

// port receives completed commands.
type port struct{ done chan *executor.Command }

func (p *port) Done(c *executor.Command) bool {
	p.done <- c
	return false
}

func (p *port) NeedData(*executor.Command) bool { panic("the data comes in the capsule") }

func (p *port) Kick()    {}
func (p *port) Deliver() {}

// stranger is a partition that has the number of one that was removed.
type stranger struct{}

func (stranger) Submit(*partition.Batch) {}

// TestAbortReachesThePartitionThatHasTheCommand: the namespace is removed, and its partition's number is given to
// another one, while commands wait for the store. An Abort still removes such a command.
func TestAbortReachesThePartitionThatHasTheCommand(t *testing.T) {
	for _, another := range []bool{false, true} {
		r := newRig(t)
		e := r.Executor.(*kv.Executor)
		const n = 2 * storeRequests
		p := &port{done: make(chan *executor.Command, n)}
		account := r.Pool.Account("tenant")
		commands := make([]*executor.Command, n)
		batch := e.NewBatch()
		r.Shut()
		for i := range commands {
			c := &executor.Command{SQE: new(nvme.SQE), Plan: new(nvmeof.Plan), Port: p, Slot: uint32(i)}
			c.Payer = executor.Payer{Account: account, Tenant: 1}
			c.Context = e.NewContext(c)
			r.Write(c, i)
			var ok bool
			if c.Buf, ok = r.Pool.Get(account, int(c.Plan.ToController)); !ok {
				t.Fatal("no memory")
			}
			commands[i] = c
			batch.Begin(c)
		}
		batch.Submit()
		e.Remove(r.ns.Partition)
		if another && e.Add(stranger{}) != r.ns.Partition {
			t.Fatal("the number is not given again")
		}
		last := commands[n-1]
		if !e.Abort(last) {
			t.Errorf("number given again %v: a command that waits for the store is not taken out", another)
		}
		if e.Abort(last) {
			t.Errorf("number given again %v: it is taken out twice", another)
		}
		ended := func() *executor.Command {
			select {
			case c := <-p.done:
				return c
			case <-time.After(30 * time.Second):
				t.Fatalf("number given again %v: a command does not end", another)
				return nil
			}
		}
		if c := ended(); c != last || c.Status != nvme.AbortRequested {
			t.Errorf("number given again %v: command %d ends first, with %v; want the aborted one", another, c.Slot,
				c.Status)
		}
		r.Open()
		for range n - 1 {
			if c := ended(); !c.Status.OK() {
				t.Errorf("number given again %v: command %d: %v", another, c.Slot, c.Status)
			}
		}
		for _, c := range commands {
			r.Pool.Put(c.Buf)
		}
		account.Close()
	}
}
