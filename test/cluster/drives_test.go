package cluster

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// badDrive gives a node a drive that is slow, or fails, and then a good one with the same data.
func (c *chaos) badDrive() {
	c.t.Helper()
	b := c.all[c.rng.IntN(len(c.all))]
	kinds := []string{
		fmt.Sprintf("delay_probability: 0.%02d, delay: %dms", 1+c.rng.IntN(20), 1+c.rng.IntN(400)),
		"read_error_probability: 0.01",
		"write_error_probability: 0.001",
	}
	kind := kinds[c.rng.IntN(len(kinds))]
	c.t.Logf("the drive of %s: %s", b.name, kind)
	c.faults["drive that fails or is slow"]++
	b.kill()
	b.drive = fmt.Sprintf(", fault: {seed: %d, %s}", c.rng.IntN(1<<30), kind)
	b.start()
	time.Sleep(time.Duration(1+c.rng.IntN(4)) * time.Second)
	b.kill()
	b.drive = ""
	b.start()
	c.calm()
}

// flip flips bits of newest values on the drive of a node, or of what is before them. Clients never see it: all keys
// are read at all nodes before anything else happens, so that in the end there are as many good copies as before.
func (c *chaos) flip() {
	c.t.Helper()
	b := c.all[c.rng.IntN(len(c.all))]
	c.l.readOnly.Store(true)
	defer c.l.readOnly.Store(false)
	time.Sleep(2 * opTimeout) // writes that are under way end
	c.faults["bits of a drive flipped"]++
	b.signal(syscall.SIGSTOP)
	time.Sleep(50 * time.Millisecond) // what the kernel has under way
	n, err := c.flipBits(filepath.Join(b.dir, "ssd0.img"), 1+c.rng.IntN(4))
	b.signal(syscall.SIGCONT)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Logf("%d bits flipped on the drive of %s", n, b.name)
	reader := newCaller(c.l)
	defer reader.close()
	for k := range keys {
		for i := range c.all {
			c.all.eventually("a read at each node", func() error {
				if err := reader.read(k, i); err != nil && !elsewhere(err) {
					return err
				}
				return nil
			})
		}
	}
	c.l.readOnly.Store(false)
	c.l.allWritten()
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		if c.all.missing() == nil {
			return
		}
		if time.Now().After(end) {
			break
		}
	}
	// What is damaged is left out, until somebody puts in another drive.
	c.t.Logf("%s gets an empty drive", b.name)
	c.faults["drive replaced"]++
	b.kill()
	if err := os.Remove(filepath.Join(b.dir, "ssd0.img")); err != nil {
		c.t.Fatal(err)
	}
	b.start()
	c.calm()
}

// flipBits flips so many bits in or shortly before newest values of an image.
func (c *chaos) flipBits(path string, count int) (flipped int, err error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	type place struct {
		value uint64
		at    int64
	}
	var places []place
	for at := int64(0); ; {
		from, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			return 0, err
		}
		to, err := unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE)
		if err != nil {
			return 0, err
		}
		text := make([]byte, to-from)
		if _, err := f.ReadAt(text, from); err != nil {
			return 0, err
		}
		for i := 0; ; i++ {
			n := bytes.Index(text[i:], []byte(mark))
			if n < 0 {
				break
			}
			if i += n; i >= 8 {
				places = append(places, place{binary.LittleEndian.Uint64(text[i-8:]), from + int64(i)})
			}
		}
		at = to
	}
	slices.SortFunc(places, func(a, b place) int { return int(int64(b.value - a.value)) })
	places = places[:min(len(places), keys)]
	for range count {
		if len(places) == 0 {
			return flipped, errors.New("no values found on the drive")
		}
		p := places[c.rng.IntN(len(places))].at - 8 + int64(c.rng.IntN(48)) - 32
		var b [1]byte
		if _, err := f.ReadAt(b[:], p); err != nil {
			return flipped, err
		}
		b[0] ^= 1 << c.rng.IntN(8)
		if _, err := f.WriteAt(b[:], p); err != nil {
			return flipped, err
		}
		flipped++
	}
	return flipped, f.Sync()
}
