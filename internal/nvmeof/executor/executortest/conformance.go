// Package executortest holds an executor to the rules of package executor.
package executortest

import (
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"jbofd/internal/bufpool"
	"jbofd/internal/buildtags"
	"jbofd/internal/fence"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof/executor"
)

var seed = flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of the random tests")

// Bytes is how much data each command moves.
const Bytes = 16 << 10

// PoolBytes is how large the pool should be: a few commands' data beside what the executor needs itself.
const PoolBytes = 4 << 20

// Subject is an executor under test.
type Subject struct {
	Executor executor.Executor
	Pool     *bufpool.Pool
	// Write fills in SQE and Plan of a command that writes Bytes bytes to a place, Read of one that reads them. Places
	// count from 0 to Places-1. Reading a place that nothing was written to succeeds or fails.
	Write, Read func(c *executor.Command, place int)
	// Written reports whether something was written to a place; it is called when nothing is shut and no command is
	// under way.
	Written func(place int) bool
	// Shut stops commands that have started, until Open. Started counts those that are stopped.
	Shut, Open func()
	Started    func() int
	// Starts: commands start as soon as they have their memory and data; none waits for its turn. A write that is
	// aborted then may end with Command Interrupted: whether it was carried out is not known.
	Starts bool
}

const (
	// Places is how many places there are.
	Places = 256
	// Deep is a number of commands of which not all may have started while the executor is shut, nor while all memory
	// but that of PoolBytes is taken.
	Deep = 96
)

// Conformance tests an executor. subject makes a new one each time, and cleans up after the test.
func Conformance(t *testing.T, subject func(t testing.TB) *Subject) {
	for _, c := range []struct {
		name string
		test func(t *testing.T, s *Subject, p *port)
	}{
		{"what is written is read", writtenAndRead},
		{"a batch is done once each", batches},
		{"abort of what waits for memory", abortWithoutMemory},
		{"reads wait for memory", readsWithoutMemory},
		{"abort of what waits for its turn", abortQueued},
		{"abort of what has started", abortStarted},
		{"abort of what awaits data", abortFetching},
		{"data lost", dataLost},
		{"close with commands in flight", closing},
		{"memory exhausted", memoryExhausted},
		{"a stale pass", stalePass},
		{"random", random},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := subject(t)
			p := newPort(t, s, Deep)
			for i, c := range p.slots {
				c.place = i
			}
			c.test(t, s, p)
			p.close()
		})
	}
}

func want(t *testing.T, c *slot, status nvme.Status) {
	t.Helper()
	if c.Status != status || c.ended != 1 {
		t.Errorf("command %d was done %d times, with %v, want %v", c.Slot, c.ended, c.Status, status)
	}
}

func wantWritten(t *testing.T, s *Subject, c *slot, written bool) {
	t.Helper()
	if got := s.Written(c.place); got != written {
		t.Errorf("command %d ended with %v; its data is there: %v", c.Slot, c.Status, got)
	}
}

func writtenAndRead(t *testing.T, s *Subject, p *port) {
	c := p.slots[0]
	p.begin(true, c)
	p.finish(nvme.Success, c)
	want(t, c, nvme.Success)
	if c.Access != executor.AccessWrite || c.Bytes != Bytes || c.AnswerBytes != 0 || c.asked != 1 {
		t.Errorf("a write: %+v, asked for data %d times", c.Command, c.asked)
	}
	p.begin(false, c)
	p.await(done, c)
	want(t, c, nvme.Success)
	data := make([]byte, Bytes)
	fill(data, c.place)
	if c.Access != executor.AccessRead || c.Bytes != Bytes || c.AnswerBytes != Bytes ||
		!bytes.Equal(c.Buf.B[:Bytes], data) {
		t.Errorf("a read: access %d, %d bytes, %d for the host", c.Access, c.Bytes, c.AnswerBytes)
	}
	p.drop(c)

	// In-capsule data has its buffer already, which stays the connection's.
	c = p.slots[1]
	p.lock.Lock()
	p.prepare(c, true)
	c.Buf, _ = s.Pool.Get(p.account, Bytes)
	fill(c.Buf.B, c.place)
	p.batch.Begin(&c.Command)
	p.lock.Unlock()
	p.batch.Submit()
	p.await(done, c)
	want(t, c, nvme.Success)
	if c.asked != 0 || c.Buf.IsZero() {
		t.Errorf("in-capsule data was asked for %d times, its buffer is gone: %v", c.asked, c.Buf.IsZero())
	}
	wantWritten(t, s, c, true)
}

func batches(t *testing.T, s *Subject, p *port) {
	for _, write := range []bool{true, false} {
		p.begin(write, p.slots...)
		p.finish(nvme.Success, p.slots...)
		for _, c := range p.slots {
			want(t, c, nvme.Success)
		}
	}
	for _, c := range p.slots {
		wantWritten(t, s, c, true)
	}
}

// takeMemory takes everything that the port's account could have, and returns what gives it back.
func takeMemory(p *port) (giveBack func()) {
	var bufs []bufpool.Buf
	var accounts []*bufpool.Account
	for {
		if b, ok := p.s.Pool.Get(p.account, Bytes); !ok {
			break
		} else {
			p.s.Pool.Put(b)
		}
		a := p.s.Pool.Account(fmt.Sprint("other ", len(accounts)))
		accounts = append(accounts, a)
		for b, ok := p.s.Pool.Get(a, Bytes); ok; b, ok = p.s.Pool.Get(a, Bytes) {
			bufs = append(bufs, b)
		}
		if len(accounts) > 1000 {
			p.t.Fatal("the memory of the pool never ends")
		}
	}
	return func() {
		for _, b := range bufs {
			p.s.Pool.Put(b)
		}
		for _, a := range accounts {
			a.Close()
		}
	}
}

func abortWithoutMemory(t *testing.T, s *Subject, p *port) {
	c := p.slots[0]
	giveBack := takeMemory(p)
	waits := s.Pool.Stats().Waits
	p.begin(true, c)
	if s.Pool.Stats().Waits == waits || p.at(c) != executing {
		t.Fatal("a write does not wait for memory")
	}
	if !p.abort(c) {
		t.Error("a write that waits for memory is not taken out")
	}
	p.await(done, c) // although there is no memory
	giveBack()
	want(t, c, nvme.AbortRequested)
	wantWritten(t, s, c, false)
	if p.abort(c) {
		t.Error("a command is aborted after its end")
	}
}

// readsWithoutMemory: an executor may ask for the memory of a read at another time than for that of a write. One read
// that waits is taken out, and one is carried out when there is memory.
func readsWithoutMemory(t *testing.T, s *Subject, p *port) {
	out, stays := p.slots[0], p.slots[1]
	p.begin(true, out, stays)
	p.finish(nvme.Success, out, stays)
	giveBack := takeMemory(p)
	waits := s.Pool.Stats().Waits
	p.begin(false, out, stays)
	for deadline := time.Now().Add(eventTimeout); s.Pool.Stats().Waits < waits+2; {
		if time.Now().After(deadline) {
			t.Fatal("reads do not wait for memory")
		}
		time.Sleep(time.Millisecond)
	}
	if !p.abort(out) {
		t.Error("a read that waits for memory is not taken out")
	}
	p.await(done, out)
	want(t, out, nvme.AbortRequested)
	giveBack()
	p.finish(nvme.Success, stays)
	want(t, stays, nvme.Success)
}

func abortQueued(t *testing.T, s *Subject, p *port) {
	p.begin(true, p.slots...)
	p.finish(nvme.Success, p.slots...)
	s.Shut()
	p.begin(false, p.slots...)
	last, others := p.slots[Deep-1], p.slots[:Deep-1]
	switch taken := p.abort(last); {
	case taken == s.Starts:
		t.Errorf("a command that waits for its turn is taken out: %v", taken)
	case taken:
		p.await(done, last) // although everything is shut
		want(t, last, nvme.AbortRequested)
	}
	s.Open()
	p.finish(nvme.Success, p.slots...)
	for _, c := range others {
		want(t, c, nvme.Success)
	}
}

func abortStarted(t *testing.T, s *Subject, p *port) {
	c := p.slots[0]
	p.begin(true, c)
	p.finish(nvme.Success, c)
	s.Shut()
	p.begin(false, c)
	for deadline := time.Now().Add(eventTimeout); s.Started() == 0; {
		if time.Now().After(deadline) {
			t.Fatal("a command does not start")
		}
		time.Sleep(time.Millisecond)
	}
	if p.abort(c) {
		t.Error("a command that has started is taken out")
	}
	s.Open()
	p.finish(nvme.Success, c)
	want(t, c, nvme.Success)
}

func abortFetching(t *testing.T, s *Subject, p *port) {
	c := p.slots[0]
	p.begin(true, c)
	p.await(fetching, c)
	if p.abort(c) {
		t.Error("a command whose data is on its way is taken out")
	}
	p.finish(nvme.Success, c)
	want(t, c, nvme.Success)
	wantWritten(t, s, c, true)
}

func dataLost(t *testing.T, s *Subject, p *port) {
	for i, status := range []nvme.Status{nvme.TransientTransportError, nvme.InvalidNamespaceOrFormat | nvme.DNR} {
		c := p.slots[i]
		p.begin(true, c)
		p.await(fetching, c)
		p.dataReady(status, c)
		p.await(done, c)
		want(t, c, status)
		wantWritten(t, s, c, false)
	}
}

// closing does as a connection whose host has gone: what has not started is aborted, and no data comes.
func closing(t *testing.T, s *Subject, p *port) {
	half := p.slots[:Deep/2]
	p.begin(true, half...)
	p.await(fetching, half[0])
	s.Shut()
	p.begin(false, p.slots[Deep/2:]...)
	out := map[*slot]bool{}
	for _, c := range p.slots {
		if p.at(c) == executing {
			out[c] = p.abort(c)
		}
	}
	s.Open()
	p.finish(nvme.TransientTransportError, p.slots...)
	for _, c := range p.slots {
		if c.ended != 1 || out[c] != (c.Status == nvme.AbortRequested) {
			t.Errorf("command %d was done %d times, with %v; it was taken out: %v", c.Slot, c.ended, c.Status, out[c])
		}
	}
	for _, c := range half {
		wantWritten(t, s, c, false)
	}
}

func memoryExhausted(t *testing.T, s *Subject, p *port) {
	capsule, others := p.slots[0], p.slots[1:]
	p.prepare(capsule, true)
	capsule.Buf, _ = s.Pool.Get(p.account, Bytes)
	fill(capsule.Buf.B, capsule.place)
	giveBack := takeMemory(p)
	p.begin(true, others...)
	for _, c := range others {
		if p.at(c) != executing {
			t.Fatal("a write goes on without memory")
		}
	}
	// A command that needs none passes those that wait.
	p.lock.Lock()
	p.batch.Begin(&capsule.Command)
	p.lock.Unlock()
	p.batch.Submit()
	p.await(done, capsule)
	want(t, capsule, nvme.Success)
	giveBack()
	p.finish(nvme.Success, others...)
	for _, c := range others {
		want(t, c, nvme.Success)
		wantWritten(t, s, c, true)
	}
}

// stalePass: whatever comes with a pass that is stale, or becomes so while its data is on its way, changes nothing.
func stalePass(t *testing.T, s *Subject, p *port) {
	holder := fence.NewHolder(func() {})
	holder.Join(&p.share)
	before, behind := p.slots[0], p.slots[1]
	p.begin(true, before)
	p.await(fetching, before)
	holder.Raise()
	p.begin(true, behind)
	p.finish(nvme.Success, before, behind)
	for _, c := range []*slot{before, behind} {
		want(t, c, nvme.AbortedSQDeletion)
		wantWritten(t, s, c, false)
	}
	p.share.Leave()
}

// random begins, aborts and loses commands at random, with and without memory, and checks that each is done once and as
// it says.
func random(t *testing.T, s *Subject, p *port) {
	t.Logf("-seed %d", *seed)
	rnd := rand.New(rand.NewPCG(*seed, 1))
	out := map[*slot]bool{}
	written, unknown := map[int]bool{}, map[int]bool{}
	var giveBack func()
	check := func(c *slot) {
		if c.ended == 0 {
			return // the slot was never used
		}
		switch {
		case out[c] != (c.Status == nvme.AbortRequested) && !(c.Status == nvme.AbortRequested && !c.writes):
			t.Fatalf("command %d ended with %v; it was taken out: %v", c.Slot, c.Status, out[c])
		case c.writes && c.Status.OK():
			written[c.place] = true
		case c.writes && s.Starts && c.Status == nvme.CommandInterrupted:
			unknown[c.place] = true
		}
		p.drop(c)
		delete(out, c)
	}
	for range 20_000 {
		c := p.slots[rnd.IntN(len(p.slots))]
		switch x := rnd.IntN(100); {
		case x == 0 && giveBack == nil:
			giveBack = takeMemory(p)
		case x <= 2 && giveBack != nil:
			giveBack()
			giveBack = nil
		case x <= 12 && p.at(c) == executing:
			out[c] = out[c] || p.abort(c)
		case p.at(c) == fetching && x < 50:
			p.dataReady([]nvme.Status{nvme.Success, nvme.Success, nvme.TransientTransportError}[rnd.IntN(3)], c)
		case p.at(c) == idle || p.at(c) == done:
			check(c)
			p.begin(rnd.IntN(2) == 0, c)
		}
	}
	if giveBack != nil {
		giveBack()
	}
	p.finish(nvme.Success, p.slots...)
	for _, c := range p.slots {
		check(c)
	}
	for _, c := range p.slots {
		if written[c.place] || !unknown[c.place] {
			wantWritten(t, s, c, written[c.place])
		}
	}
}

// AllocatesNothing tests that commands allocate nothing once their slots have been used.
func AllocatesNothing(t *testing.T, s *Subject) {
	t.Helper()
	p := newPort(t, s, 1)
	defer p.close()
	c := p.slots[0]
	for _, write := range []bool{true, false} {
		one := func() {
			p.begin(write, c)
			p.finish(nvme.Success, c)
		}
		one()
		if n := testing.AllocsPerRun(500, one); n > 0.5 && !buildtags.Race { // the race detector's build allocates
			t.Errorf("%v allocations for a command that writes: %v", n, write)
		}
		want(t, c, nvme.Success)
	}
}
