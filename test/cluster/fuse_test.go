package cluster

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// images is a file system in user space (FUSE) with the image of each drive of a node, in front of a directory that has
// them. So a drive of a node that runs can be made silent or slow, or fail, as nothing in the daemon makes it.
//
//	node ── read, write, sync ──> kernel ── /dev/fuse ──> serve ── mood of the image ──> file in the directory
//
// Source: include/uapi/linux/fuse.h, version 7.31.
type images struct {
	t    testing.TB
	path string
	fd   int
	over sync.WaitGroup

	mu     sync.Mutex
	files  []*os.File // the number of each is its index and 2
	names  []string
	silent []bool
	fails  []bool
	delay  []time.Duration
	// kept are requests for images that are silent, by index.
	kept [][]fuseRequest
}

// fuseRequest is a request of the kernel: its header of 40 bytes and what follows.
type fuseRequest []byte

func (q fuseRequest) u32(at int) uint32 { return binary.LittleEndian.Uint32(q[at:]) }
func (q fuseRequest) u64(at int) uint64 { return binary.LittleEndian.Uint64(q[at:]) }

// Operations, and places in a request.
const (
	fuseLookup, fuseForget, fuseGetattr, fuseSetattr = 1, 2, 3, 4
	fuseOpen, fuseRead, fuseWrite, fuseStatfs        = 14, 15, 16, 17
	fuseRelease, fuseFsync, fuseFlush, fuseInit      = 18, 20, 25, 26
	fuseInterrupt, fuseDestroy, fuseBatchForget      = 36, 38, 42

	fuseOpcode, fuseUnique, fuseNode, fuseBody = 4, 8, 16, 40
	fuseMaxWrite                               = 128 << 10
	fuseRoot                                   = 1
)

// newImages mounts images of so many bytes with those names. It needs a mount namespace of the test's own, which
// inside gives.
func newImages(t testing.TB, dir string, size int64, names ...string) *images {
	t.Helper()
	m := &images{t: t, path: filepath.Join(dir, "drives"), names: names, silent: make([]bool, len(names)),
		fails: make([]bool, len(names)), delay: make([]time.Duration, len(names)),
		kept: make([][]fuseRequest, len(names))}
	err := os.Mkdir(m.path, 0o700)
	for _, name := range names {
		f, e := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE, 0o600)
		if err = errors.Join(err, e); e == nil {
			err = errors.Join(err, f.Truncate(size))
		}
		m.files = append(m.files, f)
	}
	if err != nil {
		t.Fatal(err)
	}
	m.fd, err = unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Mount("jbofd", m.path, "fuse", unix.MS_NOSUID|unix.MS_NODEV,
			fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d", m.fd, os.Getuid(), os.Getgid()))
	}
	if err != nil {
		t.Skipf("no file system in user space for the drives: %v", err)
	}
	m.over.Go(m.serve)
	t.Cleanup(m.close)
	return m
}

// close answers what is kept, so that the node can end, and unmounts.
func (m *images) close() {
	for i := range m.files {
		m.answer(i)
	}
	if err := unix.Unmount(m.path, unix.MNT_DETACH); err != nil {
		m.t.Errorf("unmount %s: %v", m.path, err)
	}
}

// silence keeps all requests for an image from now on.
func (m *images) silence(i int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.silent[i] = true
}

// slow has each request for an image take so much longer, also those that are under way.
func (m *images) slow(i int, delay time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.delay[i] = delay
}

// fail has each request for an image fail with an error.
func (m *images) fail(i int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fails[i] = true
}

// answer ends that an image is silent or slow, or fails.
func (m *images) answer(i int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.silent[i], m.fails[i], m.delay[i] = false, false, 0
	for _, q := range m.kept[i] {
		m.do(q)
	}
	m.kept[i] = nil
}

// serve takes requests until the file system is unmounted, and nobody uses it any more.
func (m *images) serve() {
	for {
		buf := make([]byte, fuseMaxWrite+4096)
		n, err := unix.Read(m.fd, buf)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOENT):
			continue
		case err != nil:
			_ = unix.Close(m.fd)
			return
		}
		q := fuseRequest(buf[:n])
		m.mu.Lock()
		i := int(q.u64(fuseNode)) - fuseRoot - 1
		switch op := q.u32(fuseOpcode); {
		case op != fuseRead && op != fuseWrite && op != fuseFsync:
			m.do(q)
		case m.silent[i]:
			m.kept[i] = append(m.kept[i], q)
		case m.delay[i] > 0:
			time.AfterFunc(m.delay[i], func() {
				m.mu.Lock()
				defer m.mu.Unlock()
				m.do(q)
			})
		default:
			m.do(q)
		}
		m.mu.Unlock()
	}
}

// do carries a request out. mu is held.
func (m *images) do(q fuseRequest) {
	le := binary.LittleEndian
	var out []byte
	var err error
	i := int(q.u64(fuseNode)) - fuseRoot - 1
	op := q.u32(fuseOpcode)
	if (op == fuseRead || op == fuseWrite || op == fuseFsync) && m.fails[i] {
		err, op = unix.EIO, 0
	}
	switch op {
	case 0: // it has failed
	case fuseForget, fuseBatchForget, fuseInterrupt:
		return
	case fuseInit:
		const asyncDIO, bigWrites = 1 << 15, 1 << 5
		out = make([]byte, 64)
		le.PutUint32(out, 7)
		le.PutUint32(out[4:], 31)
		le.PutUint32(out[12:], q.u32(fuseBody+12)&(asyncDIO|bigWrites))
		le.PutUint16(out[16:], 256)
		le.PutUint16(out[18:], 256)
		le.PutUint32(out[20:], fuseMaxWrite)
		le.PutUint32(out[24:], 1)
	case fuseLookup:
		name := string(q[fuseBody : len(q)-1])
		err = unix.ENOENT
		for n := range m.names {
			if m.names[n] == name {
				out, err = make([]byte, 40), nil
				le.PutUint64(out, uint64(n)+fuseRoot+1)
				le.PutUint64(out[16:], 3600)
				out = append(out, m.attributes(n)...)
			}
		}
	case fuseSetattr, fuseGetattr: // nobody changes the size
		out = append(make([]byte, 16), m.attributes(i)...)
	case fuseOpen:
		const directIO, parallelWrites = 1 << 0, 1 << 6
		out = make([]byte, 16)
		le.PutUint32(out[8:], directIO|parallelWrites)
	case fuseRead:
		out = make([]byte, q.u32(fuseBody+16))
		n := 0
		if n, err = m.files[i].ReadAt(out, int64(q.u64(fuseBody+8))); errors.Is(err, io.EOF) {
			err = nil
		}
		out = out[:n]
	case fuseWrite:
		data := q[fuseBody+40:][:q.u32(fuseBody+16)]
		_, err = m.files[i].WriteAt(data, int64(q.u64(fuseBody+8)))
		out = make([]byte, 8)
		le.PutUint32(out, uint32(len(data)))
	case fuseStatfs:
		out = make([]byte, 80)
		le.PutUint32(out[40:], 4096)
		le.PutUint32(out[44:], 255)
	case fuseRelease, fuseFlush, fuseFsync, fuseDestroy:
	default:
		err = unix.ENOSYS
	}
	head := make([]byte, 16)
	if err != nil {
		var errno unix.Errno
		if out = nil; !errors.As(err, &errno) {
			errno = unix.EIO
		}
		le.PutUint32(head[4:], uint32(-int32(errno)))
	}
	le.PutUint32(head, uint32(16+len(out)))
	le.PutUint64(head[8:], q.u64(fuseUnique))
	// An error says that the request was interrupted, or that there is no file system any more.
	_, _ = unix.Write(m.fd, append(head, out...))
}

// attributes are those of an image, or of the root.
func (m *images) attributes(i int) []byte {
	le := binary.LittleEndian
	a := make([]byte, 88)
	mode, size := uint32(unix.S_IFDIR|0o700), int64(0)
	if i >= 0 {
		mode = unix.S_IFREG | 0o600
		if st, err := m.files[i].Stat(); err == nil {
			size = st.Size()
		}
	}
	le.PutUint64(a, uint64(i+fuseRoot+1))
	le.PutUint64(a[8:], uint64(size))
	le.PutUint64(a[16:], uint64(size)/512)
	le.PutUint32(a[60:], mode)
	le.PutUint32(a[64:], 1)
	le.PutUint32(a[68:], uint32(os.Getuid()))
	le.PutUint32(a[72:], uint32(os.Getgid()))
	le.PutUint32(a[80:], 4096)
	return a
}
