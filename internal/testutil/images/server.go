package images

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// serverEnv is set in the process that serves images: their names. Its files from 3 on are /dev/fuse and the images.
const serverEnv = "JBOFD_TEST_IMAGES"

// The server is the program of the test itself, as a process of its own: threads of a process that wait for its own
// file system may keep that process from answering.
func init() {
	if names := os.Getenv(serverEnv); names != "" {
		serveImages(strings.Fields(names))
	}
}

// serveImages serves until nobody uses the file system any more, or the test has ended.
func serveImages(names []string) {
	s := &server{fd: 3, names: names, moods: make([]mood, len(names)), kept: make([][]fuseRequest, len(names))}
	s.more.L = &s.mu
	for i := range names {
		s.files = append(s.files, os.NewFile(uintptr(4+i), names[i]))
	}
	go s.listen(os.Stdin)
	s.serve()
	os.Exit(0)
}

// mood is how an image answers.
type mood struct {
	silent, fails bool
	delay         time.Duration
}

// server is the process that serves images.
type server struct {
	fd    int
	files []*os.File // the number of each is its index and 2
	names []string

	mu    sync.Mutex
	moods []mood
	// kept are requests for images that are silent, by index; more is signalled when one is added.
	kept [][]fuseRequest
	more sync.Cond
}

// listen carries out the commands of the test, and answers each with a line.
func (s *server) listen(commands io.Reader) {
	for lines := bufio.NewScanner(commands); lines.Scan(); {
		var name string
		var i, n int
		var next mood
		_, err := fmt.Sscan(lines.Text(), &name, &i)
		switch _, arguments, _ := strings.Cut(lines.Text(), fmt.Sprint(name, " ", i, " ")); name {
		case "mood":
			_, e := fmt.Sscan(arguments, &next.silent, &next.fails, (*int64)(&next.delay))
			err = errors.Join(err, e)
			s.change(i, next)
		case "kept":
			_, e := fmt.Sscan(arguments, &n)
			err = errors.Join(err, e)
			s.awaitKept(i, n)
		}
		if err != nil {
			panic(err)
		}
		fmt.Println(name)
	}
	os.Exit(0) // with the last one who has /dev/fuse open, all requests end
}

// change gives an image another mood.
func (s *server) change(i int, next mood) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.moods[i] = next; next.silent {
		return
	}
	for _, q := range s.kept[i] {
		s.do(q)
	}
	s.kept[i] = nil
}

// awaitKept returns when so many requests are kept.
func (s *server) awaitKept(i, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.kept[i]) < n {
		s.more.Wait()
	}
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
	fuseLseek                                        = 46

	fuseOpcode, fuseUnique, fuseNode, fuseBody = 4, 8, 16, 40
	fuseMaxWrite                               = 128 << 10
	fuseRoot                                   = 1
)

// serve takes requests until the file system is unmounted, and nobody uses it any more.
func (s *server) serve() {
	for {
		buf := make([]byte, fuseMaxWrite+4096)
		n, err := unix.Read(s.fd, buf)
		switch {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOENT):
			continue
		case err != nil:
			return
		}
		s.take(fuseRequest(buf[:n]))
	}
}

// take carries a request out, now or when the mood of its image allows it.
func (s *server) take(q fuseRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	op, i := q.u32(fuseOpcode), int(q.u64(fuseNode))-fuseRoot-1
	if i < 0 {
		s.do(q)
		return
	}
	io := op == fuseRead || op == fuseWrite || op == fuseFsync
	switch m := s.moods[i]; {
	case m.silent && (io || op == fuseGetattr || op == fuseLseek):
		s.kept[i] = append(s.kept[i], q)
		s.more.Signal()
	case m.delay > 0 && io:
		time.AfterFunc(m.delay, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.do(q)
		})
	default:
		s.do(q)
	}
}

// do carries a request out. mu is held.
func (s *server) do(q fuseRequest) {
	le := binary.LittleEndian
	var out []byte
	var err error
	i := int(q.u64(fuseNode)) - fuseRoot - 1
	op := q.u32(fuseOpcode)
	if (op == fuseRead || op == fuseWrite || op == fuseFsync) && s.moods[i].fails {
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
		for n := range s.names {
			if s.names[n] == name {
				out, err = make([]byte, 40), nil
				le.PutUint64(out, uint64(n)+fuseRoot+1)
				le.PutUint64(out[16:], 3600)
				out = append(out, s.attributes(n)...)
			}
		}
	case fuseSetattr, fuseGetattr: // nobody changes the size
		out = append(make([]byte, 16), s.attributes(i)...)
	case fuseOpen:
		const directIO, parallelWrites = 1 << 0, 1 << 6
		out = make([]byte, 16)
		le.PutUint32(out[8:], directIO|parallelWrites)
	case fuseRead:
		out = make([]byte, q.u32(fuseBody+16))
		n := 0
		if n, err = s.files[i].ReadAt(out, int64(q.u64(fuseBody+8))); errors.Is(err, io.EOF) {
			err = nil
		}
		out = out[:n]
	case fuseWrite:
		data := q[fuseBody+40:][:q.u32(fuseBody+16)]
		_, err = s.files[i].WriteAt(data, int64(q.u64(fuseBody+8)))
		out = make([]byte, 8)
		le.PutUint32(out, uint32(len(data)))
	case fuseLseek:
		var at int64
		at, err = unix.Seek(int(s.files[i].Fd()), int64(q.u64(fuseBody+8)), int(q.u32(fuseBody+16)))
		out = binary.LittleEndian.AppendUint64(nil, uint64(at))
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
	_, _ = unix.Write(s.fd, append(head, out...))
}

// attributes are those of an image, or of the root.
func (s *server) attributes(i int) []byte {
	le := binary.LittleEndian
	a := make([]byte, 88)
	mode, size := uint32(unix.S_IFDIR|0o700), int64(0)
	if i >= 0 {
		mode = unix.S_IFREG | 0o600
		if st, err := s.files[i].Stat(); err == nil {
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
