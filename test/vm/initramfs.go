package vm

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

// hostModules are the modules of the guest, apart from what they depend on: its devices, the NVMe/TCP host, the file
// system, and the checksums that they ask the crypto layer for by name (a softdep, which depmod does not list).
var hostModules = []string{
	"virtio_pci", "virtio_console", "virtio_net",
	"crc32c_generic", "crc32c_intel", "crct10dif_generic", "libcrc32c", "crc_t10dif",
	"nvme_core", "nvme_fabrics", "nvme_tcp", "ext4", "loop",
}

// targetModules are the kernel's own NVMe/TCP target, with which the harness is checked without jbofd.
var targetModules = []string{"nvmet", "nvmet_tcp"}

// rdmaModules are soft RoCE over a virtual cable, its interface to programs, the NVMe/RDMA host, the kernel's own
// NVMe/RDMA target, and the memory disk on which a daemon in the guest keeps its files. rdma_rxe asks the crypto layer
// for crc32 by name.
var rdmaModules = []string{
	"crc32_generic", "veth", "rdma_rxe", "ib_uverbs", "rdma_ucm", "nvme_rdma", "nvmet", "nvmet_rdma", "null_blk",
}

// The identity of the guest's host, as /etc/nvme would have it.
const (
	HostNQN = "nqn.2014-08.org.nvmexpress:uuid:6a2f41e4-0b6e-4b1c-9d0c-0123456789ab"
	HostID  = "6a2f41e4-0b6e-4b1c-9d0c-0123456789ab"
)

// archive writes a cpio archive in the "newc" format that the kernel unpacks as its first root file system.
//
//	070701 ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
//	name NUL pad4 content pad4
//
// Each number after the magic has 8 hexadecimal digits.
//
// Source: Documentation/driver-api/early-userspace/buffer-format.rst.
type archive struct {
	w   *bufio.Writer
	ino uint32
	pos int64 // Invariant: bytes written so far.
	dir map[string]bool
	err error
}

const (
	modeDir  = 0o040000
	modeFile = 0o100000
	modeLink = 0o120000
	modeChar = 0o020000
)

func newArchive(w io.Writer) *archive {
	return &archive{w: bufio.NewWriterSize(w, 1<<20), dir: map[string]bool{"/": true}}
}

func (a *archive) write(b []byte) {
	if a.err == nil {
		_, a.err = a.w.Write(b)
		a.pos += int64(len(b))
	}
}

func (a *archive) pad() {
	for a.pos%4 != 0 && a.err == nil {
		a.write([]byte{0})
	}
}

// entry is one file of the archive.
type entry struct {
	name         string // absolute
	mode         uint32
	content      []byte
	major, minor uint32 // of a character device
}

func (a *archive) add(e entry) {
	if dir := path.Dir(e.name); !a.dir[dir] {
		a.dir[dir] = true
		a.add(entry{name: dir, mode: modeDir | 0o755})
	}
	a.put(e)
}

func (a *archive) put(e entry) {
	a.ino++
	name := strings.TrimPrefix(e.name, "/")
	a.write([]byte(fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		a.ino, e.mode, 0, 0, 1, 0, len(e.content), 0, 0, e.major, e.minor, len(name)+1, 0)))
	a.write([]byte(name))
	a.write([]byte{0})
	a.pad()
	a.write(e.content)
	a.pad()
}

func (a *archive) file(name string, mode uint32, content []byte) {
	a.add(entry{name: name, mode: modeFile | mode, content: content})
}

func (a *archive) copy(name, from string, mode uint32) {
	b, err := os.ReadFile(from)
	if err != nil {
		if a.err == nil {
			a.err = err
		}
		return
	}
	a.file(name, mode, b)
}

// close ends the archive.
func (a *archive) close() error {
	a.put(entry{name: "TRAILER!!!"})
	if a.err != nil {
		return a.err
	}
	return a.w.Flush()
}

var lddLine = regexp.MustCompile(`(?m)^\s+(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$`)

// sharedLibraries returns the files that the dynamic loader maps for a program, the loader among them, under the names
// by which it looks for them; none for a static program.
func sharedLibraries(program string) ([]string, error) {
	ldd, err := lookup("ldd")
	if err != nil {
		return nil, err
	}
	out, err := exec.Command(ldd, program).CombinedOutput()
	if err != nil {
		if strings.Contains(string(out), "not a dynamic executable") {
			return nil, nil
		}
		return nil, fmt.Errorf("ldd %s: %w: %s", program, err, out)
	}
	if strings.Contains(string(out), "not found") {
		return nil, fmt.Errorf("%s lacks libraries: %s", program, out)
	}
	var libs []string
	for _, m := range lddLine.FindAllStringSubmatch(string(out), -1) {
		libs = append(libs, m[1])
	}
	return libs, nil
}

// isELF says whether a file is a program or a library.
func isELF(file string) (bool, error) {
	f, err := os.Open(file)
	if err != nil {
		return false, err
	}
	defer f.Close()
	var magic [4]byte
	if _, err := io.ReadFull(f, magic[:]); err != nil && err != io.ErrUnexpectedEOF && err != io.EOF {
		return false, err
	}
	return string(magic[:]) == "\x7fELF", nil
}

// InitramfsOptions say what goes into the guest beyond its programs.
type InitramfsOptions struct {
	Kernel *Kernel
	// Modules are loaded at start, with what they depend on, in this order.
	Modules []string
	// Init is the binary of guestinit.
	Init string
	// Files are added; those that are programs or libraries of this machine come with the shared libraries they need.
	Files []File
}

// File is a file of this machine that the guest has too.
type File struct {
	// From is its path here, To its absolute path in the guest.
	From, To string
}

// WriteInitramfs writes the guest's root file system.
func WriteInitramfs(w io.Writer, o InitramfsOptions) error {
	modules, err := resolveModules(o.Kernel.deps, o.Modules)
	if err != nil {
		return err
	}
	a := newArchive(w)
	a.copy("/init", o.Init, 0o755)
	a.add(entry{name: "/dev/console", mode: modeChar | 0o600, major: 5, minor: 1})
	for i, m := range modules {
		a.copy(fmt.Sprintf("/modules/%03d-%s", i, filepath.Base(m)), filepath.Join(o.Kernel.modules, m), 0o644)
	}
	a.file("/etc/nvme/hostnqn", 0o644, []byte(HostNQN+"\n"))
	a.file("/etc/nvme/hostid", 0o644, []byte(HostID+"\n"))
	a.file("/etc/passwd", 0o644, []byte("root::0:0:root:/root:/bin/sh\n"))
	a.file("/etc/group", 0o644, []byte("root:x:0:\n"))
	a.add(entry{name: "/etc/mtab", mode: modeLink | 0o777, content: []byte("/proc/mounts")})
	a.add(entry{name: "/bin/sh", mode: modeLink | 0o777, content: []byte("busybox")})
	for _, dir := range []string{"/busybox", "/mnt", "/root", "/var/run"} {
		a.add(entry{name: dir, mode: modeDir | 0o755})
	}
	tools, err := guestTools(o.Kernel)
	if err != nil {
		return err
	}
	files := append(tools, o.Files...)
	have := map[string]bool{}
	for _, f := range files {
		have[f.To] = true
	}
	for _, f := range files {
		info, err := os.Stat(f.From)
		if err != nil {
			return err
		}
		a.copy(f.To, f.From, uint32(info.Mode().Perm()))
		if elf, err := isELF(f.From); err != nil {
			return err
		} else if !elf {
			continue
		}
		libs, err := sharedLibraries(f.From)
		if err != nil {
			return err
		}
		for _, lib := range libs {
			if !have[lib] {
				have[lib] = true
				a.copy(lib, lib, 0o755)
			}
		}
	}
	return a.close()
}

// guestTools returns the programs that every guest of a kernel has.
func guestTools(k *Kernel) (files []File, err error) {
	const busybox = "/bin/busybox"
	if !k.Platform.native {
		return []File{{From: k.busybox, To: busybox}}, nil
	}
	for _, n := range needs {
		if !n.guest {
			continue
		}
		from, err := lookup(n.program)
		if err != nil {
			return nil, err
		}
		to := "/usr/sbin/" + n.program
		if n.program == "busybox" {
			to = busybox
		}
		files = append(files, File{From: from, To: to})
	}
	return files, nil
}
