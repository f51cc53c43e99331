// Package hosttest has what the tests of the host's state machines, client/internal/hosttcp and
// client/internal/hostrdma, have in common: scripts of fuzzers, buffers whose surroundings are watched, and test data.
package hosttest

import (
	"bytes"
	"testing"

	"jbofd/client/internal/host"
)

// Tape reads values from a fuzzer's input, and zeros after its end.
type Tape struct{ b []byte }

// NewTape returns a Tape that reads b.
func NewTape(b []byte) *Tape { return &Tape{b} }

// Len is the number of bytes that are left.
func (t *Tape) Len() int { return len(t.b) }

// U8 reads a byte.
func (t *Tape) U8() uint8 {
	if len(t.b) == 0 {
		return 0
	}
	v := t.b[0]
	t.b = t.b[1:]
	return v
}

// U16 reads two bytes, little endian.
func (t *Tape) U16() uint16 { return uint16(t.U8()) | uint16(t.U8())<<8 }

// Bytes reads n bytes, or those that are left.
func (t *Tape) Bytes(n int) []byte {
	n = min(n, len(t.b))
	v := t.b[:n]
	t.b = t.b[n:]
	return v
}

// guardBytes is the size of the guard areas before and behind a buffer, which are filled with guardFill.
const (
	guardBytes = 64
	guardFill  = 0xA5
)

// Guarded is the buffer of a command between two guard areas. It knows whether the buffer may change.
type Guarded struct {
	// Buf is the command's buffer.
	Buf      []byte
	all      []byte
	out      bool // the queue has it
	detached bool
	copy     []byte // the content of Buf when it was given back
}

// NewGuarded returns a buffer of n bytes.
func NewGuarded(n int) *Guarded {
	all := bytes.Repeat([]byte{guardFill}, n+2*guardBytes)
	return &Guarded{all: all, Buf: all[guardBytes : guardBytes+n : guardBytes+n]}
}

// Submitted: the queue has the buffer from now on.
func (g *Guarded) Submitted() { g.out = true }

// Detach: the command goes on without its buffer. The caller, to which the buffer belongs again, changes it.
func (g *Guarded) Detach() {
	if g.detached {
		return
	}
	g.detached = true
	for k := range g.Buf {
		g.Buf[k] ^= 0xFF
	}
	g.copy = bytes.Clone(g.Buf)
}

// Complete checks that the command completes once, with no more data than its buffer holds.
func (g *Guarded) Complete(t testing.TB, c *host.Completion) {
	t.Helper()
	if !g.out {
		t.Fatalf("command %d completed twice", c.Tag)
	}
	if int(c.Received) > len(g.Buf) {
		t.Fatalf("command %d received %d bytes of %d", c.Tag, c.Received, len(g.Buf))
	}
	g.out = false
	if !g.detached {
		g.copy = bytes.Clone(g.Buf)
	}
}

// CheckAll checks that no byte has changed next to the buffers, nor within those that the queue does not have.
func CheckAll(t testing.TB, bufs []*Guarded) {
	t.Helper()
	guard := bytes.Repeat([]byte{guardFill}, guardBytes)
	for i, g := range bufs {
		if !bytes.Equal(g.all[:guardBytes], guard) || !bytes.Equal(g.all[len(g.all)-guardBytes:], guard) {
			t.Fatalf("command %d: a byte next to its buffer has changed", i)
		}
		if (g.detached || !g.out) && !bytes.Equal(g.Buf, g.copy) {
			t.Fatalf("command %d: its buffer has changed after it was given back", i)
		}
	}
}

// Pattern returns n bytes of data of the command with this tag.
func Pattern(tag uint64, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(uint64(i)*7 + uint64(i)>>8 + tag)
	}
	return b
}
