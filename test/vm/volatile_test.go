//go:build vm

package vm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"

	"golang.org/x/sys/unix"
)

// volatileDrive is a drive with a volatile write cache: a server of the NBD protocol, whose blocks keep what is written
// only after a flush, or if they are written with FUA. QEMU is its client.
//
// Source: https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md, newstyle negotiation, simple replies.
type volatileDrive struct {
	listener net.Listener
	serving  sync.WaitGroup
	client   sync.Mutex // held while a client is served

	mu sync.Mutex // guards what is below
	// durable is what is there after a power cut, content what reads see. dirty are the blocks where they differ,
	// perhaps.
	durable, content []byte
	dirty            map[int]bool
	flushes          int
	conn             net.Conn
	err              error
}

// volatileBlock is what a power cut does not tear.
const volatileBlock = 4096

const (
	nbdMagic       = 0x4e42444d41474943
	nbdOptMagic    = 0x49484156454f5054
	nbdReplyMagic  = 0x3e889045565a9
	nbdRequest     = 0x25609513
	nbdSimpleReply = 0x67446698

	nbdOptAbort, nbdOptGo                    = 2, 7
	nbdAck, nbdInfo, nbdUnsupported          = 1, 3, 1<<31 | 1
	nbdRead, nbdWrite, nbdDisc               = 0, 1, 2
	nbdFlush, nbdTrim, nbdWriteZeroes        = 3, 4, 6
	nbdFlagFUA                               = 1
	nbdFlags                          uint16 = 1 | 1<<2 | 1<<3 | 1<<5 | 1<<6 // flush, FUA, trim, write zeroes
)

// newVolatileDrive serves a drive of zeroes at a Unix socket.
func newVolatileDrive(socket string, bytes int) (*volatileDrive, error) {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	d := &volatileDrive{listener: l, durable: make([]byte, bytes), content: make([]byte, bytes), dirty: map[int]bool{}}
	d.serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			d.mu.Lock()
			d.conn = c
			d.mu.Unlock()
			// A client that is killed may leave answers unread.
			d.client.Lock()
			err = d.serve(c)
			d.client.Unlock()
			if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) &&
				!errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
				d.mu.Lock()
				d.err = errors.Join(d.err, err)
				d.mu.Unlock()
			}
			_ = c.Close()
		}
	})
	return d, nil
}

// close ends the server, and returns what went wrong.
func (d *volatileDrive) close() error {
	_ = d.listener.Close()
	d.mu.Lock()
	if d.conn != nil {
		_ = d.conn.Close()
	}
	d.mu.Unlock()
	d.serving.Wait()
	return d.err
}

// cut is what a power cut does: each block that was not flushed has its old or its new content. It returns how many
// have lost their new one. The client is dead.
func (d *volatileDrive) cut(rng *rand.Rand) (lost int) {
	d.client.Lock() // what it has sent is carried out
	defer d.client.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	for block := range len(d.content) / volatileBlock {
		if !d.dirty[block] {
			continue
		}
		at := block * volatileBlock
		if rng.IntN(2) == 0 {
			copy(d.durable[at:at+volatileBlock], d.content[at:])
		} else {
			lost++
		}
	}
	clear(d.dirty)
	copy(d.content, d.durable)
	return lost
}

// counts returns how many flushes there were, and how many blocks are not durable.
func (d *volatileDrive) counts() (flushes, dirty int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.flushes, len(d.dirty)
}

// serve serves one client to its end.
func (d *volatileDrive) serve(c net.Conn) error {
	if err := d.negotiate(c); err != nil {
		return err
	}
	var head [28]byte
	for {
		if _, err := io.ReadFull(c, head[:]); err != nil {
			return err
		}
		be := binary.BigEndian
		flags, op := be.Uint16(head[4:]), be.Uint16(head[6:])
		off, n := be.Uint64(head[16:]), int(be.Uint32(head[24:]))
		if be.Uint32(head[:]) != nbdRequest {
			return fmt.Errorf("nbd: a request begins with % x", head[:4])
		}
		if op == nbdDisc {
			return nil
		}
		var data []byte
		if op == nbdWrite {
			data = make([]byte, n)
			if _, err := io.ReadFull(c, data); err != nil {
				return err
			}
		}
		read, errno := d.do(op, flags, off, n, data)
		reply := append(be.AppendUint32(be.AppendUint32(nil, nbdSimpleReply), errno), head[8:16]...)
		if _, err := c.Write(append(reply, read...)); err != nil {
			return err
		}
	}
}

// do carries out a request, and returns what was read, or its error number.
func (d *volatileDrive) do(op, flags uint16, off uint64, n int, data []byte) (read []byte, errno uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if off > uint64(len(d.content)) || uint64(n) > uint64(len(d.content))-off {
		return nil, uint32(unix.EINVAL)
	}
	at := int(off)
	switch op {
	case nbdRead:
		return append([]byte(nil), d.content[at:at+n]...), 0
	case nbdFlush:
		d.flushes++
		copy(d.durable, d.content)
		clear(d.dirty)
		return nil, 0
	case nbdTrim:
		return nil, 0 // it is advice
	case nbdWrite:
		copy(d.content[at:], data)
	case nbdWriteZeroes:
		clear(d.content[at : at+n])
	default:
		return nil, uint32(unix.EOPNOTSUPP)
	}
	if flags&nbdFlagFUA != 0 {
		copy(d.durable[at:at+n], d.content[at:])
		return nil, 0
	}
	for b := at / volatileBlock; b*volatileBlock < at+n; b++ {
		d.dirty[b] = true
	}
	return nil, 0
}

// negotiate agrees with a client on the drive.
func (d *volatileDrive) negotiate(c net.Conn) error {
	be := binary.BigEndian
	hello := be.AppendUint64(be.AppendUint64(nil, nbdMagic), nbdOptMagic)
	if _, err := c.Write(be.AppendUint16(hello, 3)); err != nil { // fixed newstyle, no zeroes
		return err
	}
	var flags [4]byte
	if _, err := io.ReadFull(c, flags[:]); err != nil {
		return err
	}
	for {
		var head [16]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			return err
		}
		option, n := be.Uint32(head[8:]), be.Uint32(head[12:])
		if be.Uint64(head[:]) != nbdOptMagic || n > 1<<16 {
			return fmt.Errorf("nbd: an option begins with % x", head)
		}
		if _, err := io.CopyN(io.Discard, c, int64(n)); err != nil {
			return err
		}
		answer := func(kind uint32, data []byte) []byte {
			b := be.AppendUint32(be.AppendUint64(nil, nbdReplyMagic), option)
			return append(be.AppendUint32(be.AppendUint32(b, kind), uint32(len(data))), data...)
		}
		out := answer(nbdUnsupported, nil)
		switch option {
		case nbdOptAbort:
			out = answer(nbdAck, nil)
		case nbdOptGo:
			export := be.AppendUint64(make([]byte, 2), uint64(len(d.content)))
			out = append(answer(nbdInfo, be.AppendUint16(export, nbdFlags)), answer(nbdAck, nil)...)
		}
		if _, err := c.Write(out); err != nil {
			return err
		}
		switch option {
		case nbdOptAbort:
			return io.EOF
		case nbdOptGo:
			return nil
		}
	}
}
