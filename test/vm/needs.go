package vm

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
)

// need is one program of this machine that the test runs or copies into the guest.
type need struct {
	program string
	// apt is the Debian package that brings the program.
	apt string
	// guest is set when the program is copied into the guest with its shared libraries.
	guest bool
}

// needs is everything outside of this repository and Go that the test uses.
var needs = []need{
	{program: "qemu-system-x86_64", apt: "qemu-system-x86"},
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

// CheckNeeds returns an error that names every program that is missing and the packages that bring them.
func CheckNeeds() error {
	var programs []string
	packages := map[string]bool{}
	for _, n := range needs {
		if _, err := lookup(n.program); err != nil {
			programs = append(programs, fmt.Sprintf("%s (package %s)", n.program, n.apt))
			packages[n.apt] = true
		}
	}
	if len(programs) == 0 {
		return nil
	}
	var names []string
	for p := range packages {
		names = append(names, p)
	}
	sort.Strings(names)
	return fmt.Errorf("the VM test lacks %s; on Debian: apt-get install %s", strings.Join(programs, ", "), strings.Join(names, " "))
}
