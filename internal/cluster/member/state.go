package member

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"jbofd/internal/cluster"
	"jbofd/internal/cluster/view"
)

// ErrInUse: another process has the state directory.
var ErrInUse = errors.New("another process uses the state directory of the cluster")

// The file "incarnation" of the state directory, little endian:
//
//	0   magic    4 B  "JBCI"
//	4   CRC32C   u32  of everything else
//	8   version  u16  1
//	10  node     u64  random, below 2^40
//	18  process  u32  how many processes there have been
//	22  seen     u64  the newest epoch
const (
	stateMagic   = "JBCI"
	stateVersion = 1
	stateBytes   = 30

	maxProcess = 1<<24 - 1
)

// stateDir is a locked state directory.
type stateDir struct {
	path    string
	lock    *os.File
	node    uint64
	process uint32
	seen    view.Epoch
}

// openState locks a state directory and counts this process, durably. A directory without a state is a new node's.
//
// Errors: ErrInUse.
func openState(path string) (*stateDir, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(path, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	s := &stateDir{path: path, lock: lock}
	if err := s.begin(); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// begin locks the directory and counts the process.
func (s *stateDir) begin() error {
	if err := unix.Flock(int(s.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("%w: %s", ErrInUse, s.path)
		}
		return fmt.Errorf("locking %s: %w", s.lock.Name(), err)
	}
	b, err := os.ReadFile(s.file())
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return err
	default:
		if err := s.decode(b); err != nil {
			return fmt.Errorf("%s: %w; without the file this is a new node, once the cluster has given up this one",
				s.file(), err)
		}
	}
	if s.node == 0 || s.process == maxProcess {
		var random [8]byte
		rand.Read(random[:])
		s.node, s.process = binary.LittleEndian.Uint64(random[:])&(1<<40-1)|1, 0
	}
	s.process++
	return s.write()
}

func (s *stateDir) file() string { return filepath.Join(s.path, "incarnation") }

func (s *stateDir) incarnation() cluster.Incarnation {
	return cluster.NewIncarnation(s.node, s.process)
}

// close gives the directory free.
func (s *stateDir) close() { s.lock.Close() }

// setSeen notes the newest epoch, durably.
func (s *stateDir) setSeen(e view.Epoch) error {
	s.seen = e
	return s.write()
}

func (s *stateDir) encode() []byte {
	b := append(make([]byte, 0, stateBytes), stateMagic...)
	b = append(b, 0, 0, 0, 0)
	b = binary.LittleEndian.AppendUint16(b, stateVersion)
	b = binary.LittleEndian.AppendUint64(b, s.node)
	b = binary.LittleEndian.AppendUint32(b, s.process)
	b = binary.LittleEndian.AppendUint64(b, uint64(s.seen))
	binary.LittleEndian.PutUint32(b[4:], checksum(b))
	return b
}

func checksum(b []byte) uint32 {
	t := crc32.MakeTable(crc32.Castagnoli)
	return crc32.Update(crc32.Checksum(b[:4], t), t, b[8:])
}

func (s *stateDir) decode(b []byte) error {
	if len(b) < 10 || string(b[:4]) != stateMagic {
		return errors.New("it is not the state of a node")
	}
	if v := binary.LittleEndian.Uint16(b[8:]); v != stateVersion {
		return fmt.Errorf("its version is %d, this program has %d", v, stateVersion)
	}
	if len(b) != stateBytes || binary.LittleEndian.Uint32(b[4:]) != checksum(b) {
		return fmt.Errorf("it is damaged: %d bytes, want %d with a valid CRC32C", len(b), stateBytes)
	}
	s.node, s.process = binary.LittleEndian.Uint64(b[10:]), binary.LittleEndian.Uint32(b[18:])
	s.seen = view.Epoch(binary.LittleEndian.Uint64(b[22:]))
	return nil
}

// write replaces the file.
func (s *stateDir) write() error {
	next := s.file() + ".new"
	f, err := os.Create(next)
	if err != nil {
		return err
	}
	_, err = f.Write(s.encode())
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(next, s.file()); err != nil {
		return err
	}
	d, err := os.Open(s.path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
