// Package images has images of drives in a file system in user space (FUSE), in front of a directory that has them. So
// a drive of a process that runs can be made silent or slow, or fail, as nothing in that process makes it.
//
//	process ── read, write, sync ──> kernel ── /dev/fuse ──> server ── mood of the image ──> file in the directory
//
// The server is a process of its own, which ends with the test: no process waits for a drive of a test that has ended.
//
// Source: include/uapi/linux/fuse.h, version 7.31.
package images

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Images are images of drives.
type Images struct {
	t     testing.TB
	path  string
	names []string

	mu       sync.Mutex
	commands io.Writer
	answers  *bufio.Reader
}

// New mounts images of so many bytes with those names below dir. It needs a mount namespace of the test's own; see
// Private. Without FUSE the test is skipped.
func New(t testing.TB, dir string, size int64, names ...string) *Images {
	t.Helper()
	m := &Images{t: t, path: filepath.Join(dir, "drives"), names: names}
	if err := os.Mkdir(m.path, 0o700); err != nil {
		t.Fatal(err)
	}
	fuse, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Mount("jbofd", m.path, "fuse", unix.MS_NOSUID|unix.MS_NODEV,
			fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d", fuse, os.Getuid(), os.Getgid()))
	}
	if err != nil {
		t.Skipf("no file system in user space for the drives: %v", err)
	}
	if err := m.start(os.NewFile(uintptr(fuse), "fuse"), dir, size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.close)
	return m
}

// start starts the server and gives it the files.
func (m *Images) start(fuse *os.File, dir string, size int64) error {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), serverEnv+"="+strings.Join(m.names, " "))
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{fuse}
	var err error
	for _, name := range m.names {
		f, e := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE, 0o600)
		if err = errors.Join(err, e); e == nil {
			err = errors.Join(err, f.Truncate(size))
		}
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	}
	in, e := cmd.StdinPipe()
	out, e2 := cmd.StdoutPipe()
	if err = errors.Join(err, e, e2); err == nil {
		err = cmd.Start()
	}
	for _, f := range cmd.ExtraFiles {
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return err
	}
	m.commands, m.answers = in, bufio.NewReader(out)
	// The server ends when the last user of the file system has, which may be later than the test.
	go func() { _ = cmd.Wait() }()
	return nil
}

// Private gives the calling goroutine a mount namespace of its own, for a test that runs in the namespaces of its
// user. Without the right to do so the test is skipped.
func Private(t testing.TB) {
	t.Helper()
	// The thread ends with the goroutine, and with the thread the namespace.
	runtime.LockOSThread()
	err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS)
	if err == nil {
		err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	}
	if err != nil {
		t.Skipf("no mount namespace: %v", err)
	}
}

// Path returns where an image is mounted.
func (m *Images) Path(i int) string { return filepath.Join(m.path, m.names[i]) }

// Block returns a block device that has an image as its medium: requests wait in its queue while the image is silent.
//
// Errors: losetup's, if this machine has no loop devices or the user no right to them.
func (m *Images) Block(i int) (string, error) {
	m.t.Helper()
	out, err := exec.Command("losetup", "--find", "--show", "--direct-io=on", m.Path(i)).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("no loop device: losetup: %w %s", err, out)
	}
	dev := strings.TrimSpace(string(out))
	// The kernel detaches it when nobody has it open any more, also if the test is killed.
	f, err := os.Open(dev)
	if out, e := exec.Command("losetup", "--detach", dev).CombinedOutput(); err != nil || e != nil {
		m.t.Fatalf("losetup --detach %s: %v %s", dev, errors.Join(err, e), out)
	}
	m.t.Cleanup(func() {
		m.Answer(i)
		if err := f.Close(); err != nil {
			m.t.Error(err)
		}
	})
	return dev, nil
}

// close answers what is kept, so that whoever waits for it can end, and unmounts.
func (m *Images) close() {
	for i := range m.names {
		m.Answer(i)
	}
	if err := unix.Unmount(m.path, unix.MNT_DETACH); err != nil {
		m.t.Errorf("unmount %s: %v", m.path, err)
	}
}

// Silence keeps all reads, writes and syncs of an image from now on, and questions for its size and its holes.
func (m *Images) Silence(i int) { m.set(i, mood{silent: true}) }

// Slow has each read, write and sync of an image take so much longer.
func (m *Images) Slow(i int, delay time.Duration) { m.set(i, mood{delay: delay}) }

// Fail has each read, write and sync of an image fail with an error.
func (m *Images) Fail(i int) { m.set(i, mood{fails: true}) }

// Answer ends that an image is silent or slow, or fails.
func (m *Images) Answer(i int) { m.set(i, mood{}) }

func (m *Images) set(i int, next mood) {
	m.t.Helper()
	m.ask("mood", i, next.silent, next.fails, int64(next.delay))
}

// AwaitKept returns when so many requests wait for an image that is silent.
func (m *Images) AwaitKept(i, n int) {
	m.t.Helper()
	m.ask("kept", i, n)
}

// ask gives the server a command and waits until it is carried out.
func (m *Images) ask(command ...any) {
	m.t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	_, err := fmt.Fprintln(m.commands, command...)
	if err == nil {
		_, err = m.answers.ReadString('\n')
	}
	if err != nil {
		m.t.Errorf("the server of the images: %v", err)
	}
}
