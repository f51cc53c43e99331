package vm

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
)

// need is one program or file of this machine that the test runs or copies into the guest.
type need struct {
	program string
	// file is what is needed instead of a program: a pattern that some file must match.
	file string
	// apt is the Debian package that brings it.
	apt string
	// guest is set when the program is copied into the guest with its shared libraries.
	guest bool
}

// The part of libibverbs that drives soft RoCE, which it loads when it is told of it by a file of that name.
const (
	rxeProvider = "/usr/lib/*/libibverbs/librxe-rdmav*.so"
	rxeDriver   = "/etc/libibverbs.d/rxe.driver"
)

// needs is everything outside of this repository and Go that the test uses.
var needs = []need{
	{program: "qemu-system-x86_64", apt: "qemu-system-x86"},
	{program: "qemu-system-aarch64", apt: "qemu-system-arm"},
	{program: "apt-get", apt: "apt"},
	{program: "dpkg-deb", apt: "dpkg"},
	{program: "depmod", apt: "kmod"},
	{program: "ldd", apt: "libc-bin"},
	{program: "xz", apt: "xz-utils"},
	{program: "busybox", apt: "busybox-static", guest: true},
	{program: "nvme", apt: "nvme-cli", guest: true},
	{program: "fio", apt: "fio", guest: true},
	{program: "mkfs.ext4", apt: "e2fsprogs", guest: true},
	{program: "e2fsck", apt: "e2fsprogs", guest: true},
	{program: "resize2fs", apt: "e2fsprogs", guest: true},
	{program: "blkdiscard", apt: "util-linux", guest: true},
	{program: "fstrim", apt: "util-linux", guest: true},
	{program: "blockdev", apt: "util-linux", guest: true},
	{program: "ip", apt: "iproute2", guest: true},
	{program: "rdma", apt: "iproute2", guest: true},
	{program: "gcc", apt: "gcc"},
	{file: "/usr/include/infiniband/verbs.h", apt: "libibverbs-dev"},
	{file: "/usr/include/rdma/rdma_cma.h", apt: "librdmacm-dev"},
	{file: rxeProvider, apt: "ibverbs-providers"},
	{file: rxeDriver, apt: "ibverbs-providers"},
}

// lookup finds a program in PATH and, since tools for root are often not in a user's, in the sbin folders.
func lookup(program string) (string, error) {
	if p, err := exec.LookPath(program); err == nil {
		return filepath.Abs(p)
	}
	for _, dir := range []string{"/usr/local/sbin", "/usr/sbin", "/sbin"} {
		p := filepath.Join(dir, program)
		if info, err := os.Stat(p); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s: %w", program, exec.ErrNotFound)
}

// findFile returns the one file that matches a pattern.
func findFile(pattern string) (string, error) {
	found, err := filepath.Glob(pattern)
	if err != nil {
		return "", err
	}
	if len(found) == 0 {
		return "", fmt.Errorf("%s: %w", pattern, os.ErrNotExist)
	}
	return found[0], nil
}

// name is what is needed, for messages.
func (n need) name() string {
	if n.file != "" {
		return n.file
	}
	return n.program
}

// check fails when it is missing.
func (n need) check() error {
	var err error
	if n.file != "" {
		_, err = findFile(n.file)
	} else {
		_, err = lookup(n.program)
	}
	return err
}

// CheckNeeds returns an error that names every program and file that is missing and the packages that bring them.
func CheckNeeds() error {
	var missing []string
	packages := map[string]bool{}
	for _, n := range needs {
		if n.check() != nil {
			missing = append(missing, fmt.Sprintf("%s (package %s)", n.name(), n.apt))
			packages[n.apt] = true
		}
	}
	if len(missing) == 0 {
		return nil
	}
	var names []string
	for p := range packages {
		names = append(names, p)
	}
	sort.Strings(names)
	return fmt.Errorf("the VM test lacks %s; on Debian: apt-get install %s", strings.Join(missing, ", "),
		strings.Join(names, " "))
}
