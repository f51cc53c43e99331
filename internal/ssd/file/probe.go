package file

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"jbofd/internal/ssd"
)

const pageBytes = 4096

// measureFile fills Info for a regular file and grows it to size if that is set.
func (d *Device) measureFile(direct bool, size int64, grow bool) error {
	i := &d.info
	i.Model = "jbofd file"
	i.BlockSize, d.memAlign = 512, 1
	var st unix.Statx_t
	if err := unix.Statx(d.fd, "", unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS|unix.STATX_DIOALIGN, &st); err != nil {
		return fmt.Errorf("statx %s: %w", i.Path, err)
	}
	if direct {
		switch {
		case st.Mask&unix.STATX_DIOALIGN != 0 && st.Dio_offset_align != 0:
			i.BlockSize = max(512, int(st.Dio_offset_align))
			d.memAlign = max(1, int(st.Dio_mem_align))
		case st.Mask&unix.STATX_DIOALIGN != 0:
			// The file system takes O_DIRECT but cannot do it: use the page cache.
			if _, err := unix.FcntlInt(uintptr(d.fd), unix.F_SETFL, 0); err != nil {
				return fmt.Errorf("turn off O_DIRECT on %s: %w", i.Path, err)
			}
		default: // an older kernel does not say: page alignment always works
			i.BlockSize, d.memAlign = 512, pageBytes
			buf, free, err := scratch(pageBytes)
			if err != nil {
				return err
			}
			if _, err := unix.Pread(d.fd, buf[:512], 0); err == unix.EINVAL {
				i.BlockSize = pageBytes
			}
			if err := free(); err != nil {
				return err
			}
		}
	}
	bs := int64(i.BlockSize)
	have := int64(st.Size)
	if size == 0 {
		size = have &^ (bs - 1)
	}
	switch {
	case size == 0:
		return fmt.Errorf("%w: %s is empty; configure a size", ErrSize, i.Path)
	case size%bs != 0:
		return fmt.Errorf("%w: SizeBytes is %d, want a multiple of %s's block size %d", ErrConfig, size, i.Path, bs)
	case size < have&^(bs-1):
		return fmt.Errorf("%w: %s has %d bytes, configured are %d; shrinking would lose data and is refused", ErrSize,
			i.Path, have, size)
	case size > have && !grow:
		return fmt.Errorf("%w: %s has %d bytes, configured are %d; only with create the file is made larger", ErrSize,
			i.Path, have, size)
	case size > have:
		if err := unix.Ftruncate(d.fd, size); err != nil {
			return fmt.Errorf("grow %s from %d to %d bytes: %w", i.Path, have, size, err)
		}
		if err := unix.Fsync(d.fd); err != nil {
			return fmt.Errorf("sync %s: %w", i.Path, err)
		}
	}
	i.SizeBytes = size
	i.OptimalIOBytes = max(i.BlockSize, int(st.Blksize))
	i.AtomicWriteBytes = i.BlockSize
	i.VolatileCache = true
	// Nothing is at a whole page beyond the end: this changes nothing but tells. The last page of the file may have
	// data beyond SizeBytes, which is a multiple of the block size.
	beyond := (max(have, size) + pageBytes - 1) &^ (pageBytes - 1)
	err := unix.Fallocate(d.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, beyond, pageBytes)
	i.Deallocates = err == nil
	i.DeallocatedReadsZero = i.Deallocates
	d.noPunch.Store(!i.Deallocates)
	return nil
}

// probeNowait returns ErrWaits unless the file is read and written directly, and knows RWF_NOWAIT. io_uring begins
// requests at once also for a file that does not know it, but can be polled, as one on a file system in user space. If
// nobody answers there, whoever submits hangs. Other files without RWF_NOWAIT gain nothing from io_uring, which has
// threads do all; and it has the same thread write to several files through the page cache, one after the other.
func (d *Device) probeNowait() error {
	flags, err := unix.FcntlInt(uintptr(d.fd), unix.F_GETFL, 0)
	if err != nil {
		return err
	}
	if flags&unix.O_DIRECT == 0 {
		return fmt.Errorf("%w: %s has no direct I/O", ErrWaits, d.info.Path)
	}
	buf, free, err := scratch(d.info.BlockSize)
	if err != nil {
		return err
	}
	_, err = unix.Preadv2(d.fd, [][]byte{buf}, 0, unix.RWF_NOWAIT)
	if e := free(); e != nil {
		return e
	}
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("%w: RWF_NOWAIT on %s: %w", ErrWaits, d.info.Path, err)
	}
	return nil // also if the read has failed otherwise, as with EAGAIN
}

// NextData implements ssd.Mapper. Where the file system does not know all is data, as on a block device.
func (d *Device) NextData(offset int64) ssd.Extent {
	rest := ssd.Extent{Start: offset, End: d.info.SizeBytes}
	d.mu.Lock()
	if d.block || d.closed || offset >= rest.End {
		d.mu.Unlock()
		return rest
	}
	d.mapping.Add(1)
	d.mu.Unlock()
	defer d.mapping.Done()
	start, err := unix.Seek(d.fd, offset, unix.SEEK_DATA)
	if err == unix.ENXIO {
		return ssd.Extent{Start: rest.End, End: rest.End}
	}
	if err != nil {
		return rest
	}
	end, err := unix.Seek(d.fd, start, unix.SEEK_HOLE)
	if err != nil {
		end = rest.End
	}
	return ssd.Extent{Start: min(start, rest.End), End: min(end, rest.End)}
}

// measureBlockDevice fills Info for a block device.
func (d *Device) measureBlockDevice() error {
	i := &d.info
	bs, err := unix.IoctlGetInt(d.fd, unix.BLKSSZGET)
	if err != nil {
		return fmt.Errorf("BLKSSZGET of %s: %w", i.Path, err)
	}
	size, err := blockDeviceBytes(d.fd)
	if err != nil {
		return fmt.Errorf("BLKGETSIZE64 of %s: %w", i.Path, err)
	}
	i.BlockSize, d.memAlign = bs, bs
	i.SizeBytes = size &^ int64(bs-1)
	i.VolatileCache = true
	i.OptimalIOBytes, i.AtomicWriteBytes = max(bs, pageBytes), bs
	if i.SizeBytes == 0 {
		return fmt.Errorf("%w: %s has no medium", ErrSize, i.Path)
	}
	var st unix.Stat_t
	if err := unix.Fstat(d.fd, &st); err != nil {
		return fmt.Errorf("stat %s: %w", i.Path, err)
	}
	disk := sysfsDisk(st.Rdev)
	if disk == "" {
		return nil
	}
	i.Model = firstLine(disk+"/device/model", disk+"/device/name", disk+"/loop/backing_file")
	i.Serial = firstLine(disk+"/device/serial", disk+"/serial", disk+"/device/wwid", disk+"/wwid")
	i.VolatileCache = firstLine(disk+"/queue/write_cache") != "write through"
	number := func(name string) int {
		n, _ := strconv.Atoi(firstLine(disk + "/queue/" + name)) // absent is 0
		return n
	}
	i.OptimalIOBytes = max(i.OptimalIOBytes, number("physical_block_size"), number("optimal_io_size"))
	i.AtomicWriteBytes = max(bs, number("atomic_write_unit_max_bytes"))
	i.Deallocates = number("discard_max_bytes") > 0
	return nil
}

// sysfsDisk returns the sysfs folder of the whole disk that a device number is
// or is a partition of, or "".
func sysfsDisk(rdev uint64) string {
	dir, err := filepath.EvalSymlinks(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(rdev), unix.Minor(rdev)))
	if err != nil {
		return ""
	}
	if _, err := os.Stat(dir + "/partition"); err == nil {
		dir = filepath.Dir(dir)
	}
	return dir
}

// firstLine returns the first readable, non-empty file's first line.
func firstLine(paths ...string) string {
	for _, p := range paths {
		b, err := os.ReadFile(p)
		if err != nil {
			continue
		}
		line, _, _ := bytes.Cut(b, []byte("\n"))
		if s := strings.TrimSpace(string(line)); s != "" {
			return s
		}
	}
	return ""
}

// lockHolder says who has the flock on the file behind fd.
func lockHolder(fd int) (holder string, alive bool) {
	const unknown = "another process"
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return unknown, false
	}
	f, err := os.Open("/proc/locks")
	if err != nil {
		return unknown, false
	}
	defer f.Close()
	// "1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF"
	want := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	for s := bufio.NewScanner(f); s.Scan(); {
		w := strings.Fields(s.Text())
		if len(w) < 6 || w[1] != "FLOCK" || w[5] != want {
			continue
		}
		name := firstLine("/proc/" + w[4] + "/comm")
		if name == "" {
			return "process " + w[4], false // ended, or in another container
		}
		return fmt.Sprintf("process %s (%s)", w[4], name), true
	}
	return unknown, false
}

// blockHolder says why a block device cannot be opened exclusively; alive: that will not pass.
func blockHolder(path string) (holder string, alive bool) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "in use", false
	}
	if f, err := os.Open("/proc/self/mountinfo"); err == nil {
		defer f.Close()
		want := fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
		for s := bufio.NewScanner(f); s.Scan(); {
			// "36 35 98:0 /mnt1 /mnt2 rw,noatime …"
			if w := strings.Fields(s.Text()); len(w) > 4 && w[2] == want {
				return "mounted on " + w[4], true
			}
		}
	}
	if disk := sysfsDisk(st.Rdev); disk != "" {
		if holders, err := os.ReadDir(disk + "/holders"); err == nil && len(holders) > 0 {
			return "used by the block device " + holders[0].Name(), true
		}
	}
	if f, err := os.Open(path); err == nil {
		defer f.Close()
		if holder, alive := lockHolder(int(f.Fd())); alive {
			return "locked by " + holder, true
		}
	}
	return "opened exclusively by another process (another jbofd, a mounted partition, swap, LVM or RAID)", false
}

// scratch returns n bytes of page-aligned memory and what gives them back.
func scratch(n int) ([]byte, func() error, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	return b, func() error { return unix.Munmap(b) }, nil
}
