package vm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Kernel is a Debian kernel, unpacked.
type Kernel struct {
	// Platform is what it is for.
	Platform *Platform
	// Version is the name of the folder in /lib/modules.
	Version string
	// Vmlinux is the uncompressed image. For PC it is an ELF file, which QEMU enters through its PVH note. That spares
	// the guest the decompression: 2 s to PID 1 instead of 6.
	Vmlinux string
	// busybox is the guest's, if it is not this machine's.
	busybox string
	// modules is the folder lib/modules/<Version>.
	modules string
	deps    map[string][]string // path below modules -> what must be loaded before, last first
}

// sourceDir is the folder of this file.
func sourceDir() string {
	_, file, _, ok := runtime.Caller(0)
	if !ok {
		panic("vm: no caller information")
	}
	return filepath.Dir(file)
}

// CacheDir is where the kernel is kept between runs: $JBOFD_VM_CACHE, or .cache beside this file.
func CacheDir() string {
	if d := os.Getenv("JBOFD_VM_CACHE"); d != "" {
		return d
	}
	return filepath.Join(sourceDir(), ".cache")
}

// PrepareKernel returns a platform's kernel in the folder cache, downloading and unpacking it when the folder has none.
// Only what the guest needs is written; nothing is installed on this machine. Two test processes may call it at the
// same time.
func PrepareKernel(cache string, p *Platform) (*Kernel, error) {
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(cache, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("lock %s: %w", cache, err)
	}
	root := filepath.Join(cache, p.folder)
	// The rename below is the last step, so a folder of this name is whole.
	if _, err := os.Stat(root); errors.Is(err, os.ErrNotExist) {
		if err := unpackKernel(cache, root, p); err != nil {
			return nil, fmt.Errorf("kernel for the guest: %w", err)
		}
	} else if err != nil {
		return nil, err
	}
	return openKernel(root, p)
}

func openKernel(root string, p *Platform) (*Kernel, error) {
	found, err := filepath.Glob(filepath.Join(root, "lib/modules/*/modules.dep"))
	if err != nil {
		return nil, err
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("%s holds %d kernels, want 1; remove the folder to download it again", root, len(found))
	}
	k := &Kernel{Platform: p, modules: filepath.Dir(found[0]), Vmlinux: filepath.Join(root, "vmlinux")}
	if !p.native {
		k.busybox = filepath.Join(root, "bin/busybox")
	}
	k.Version = filepath.Base(k.modules)
	b, err := os.ReadFile(found[0])
	if err != nil {
		return nil, err
	}
	k.deps, err = parseModulesDep(string(b))
	return k, err
}

func unpackKernel(cache, root string, p *Platform) error {
	tmp, err := os.MkdirTemp(cache, "unpack-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	tree := filepath.Join(tmp, "tree")
	if err := unpackPackages(tmp, tree, p); err != nil {
		return err
	}
	images, err := filepath.Glob(filepath.Join(tree, "boot/vmlinuz-*"))
	if err != nil {
		return err
	}
	if len(images) != 1 {
		return fmt.Errorf("the package has %d kernel images, want 1", len(images))
	}
	version := strings.TrimPrefix(filepath.Base(images[0]), "vmlinuz-")
	if _, err := command(tmp, "depmod", "-b", tree, version); err != nil {
		return err
	}
	vmlinux, err := os.ReadFile(images[0])
	if err != nil {
		return err
	}
	if p.compressed {
		if vmlinux, err = extractVmlinux(vmlinux); err != nil {
			return fmt.Errorf("%s: %w", images[0], err)
		}
	}
	if err := os.WriteFile(filepath.Join(tree, "vmlinux"), vmlinux, 0o644); err != nil {
		return err
	}
	return os.Rename(tree, root)
}

// extractVmlinux returns the ELF image inside a bzImage compressed with xz.
//
// Source: Documentation/x86/boot.rst, setup header: setup_sects at 1F1h, "HdrS" at 202h, payload_offset at 248h,
// payload_length at 24Ch.
func extractVmlinux(bz []byte) ([]byte, error) {
	if len(bz) < 0x250 || string(bz[0x202:0x206]) != "HdrS" {
		return nil, errors.New("not a bzImage")
	}
	sects := int(bz[0x1f1])
	if sects == 0 {
		sects = 4
	}
	begin := (sects+1)*512 + int(binary.LittleEndian.Uint32(bz[0x248:]))
	end := begin + int(binary.LittleEndian.Uint32(bz[0x24c:]))
	if begin > end || end > len(bz) {
		return nil, fmt.Errorf("payload %d to %d of an image of %d bytes", begin, end, len(bz))
	}
	xz, err := lookup("xz")
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(xz, "-dc", "--single-stream") // the uncompressed size follows the stream
	cmd.Stdin = bytes.NewReader(bz[begin:end])
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	vmlinux, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("xz: %w: %s", err, stderr.String())
	}
	if !bytes.HasPrefix(vmlinux, []byte("\x7fELF")) {
		return nil, errors.New("the payload is no ELF image")
	}
	return vmlinux, nil
}

// command runs a program found by lookup in the folder dir and returns its standard output.
func command(dir, program string, args ...string) (string, error) {
	p, err := lookup(program)
	if err != nil {
		return "", err
	}
	cmd := exec.Command(p, args...)
	cmd.Dir = dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err,
			strings.TrimSpace(stderr.String()))
	}
	return string(out), nil
}

// parseModulesDep reads depmod's modules.dep: "path: dependency dependency …", where the last dependency is to be
// loaded first.
func parseModulesDep(text string) (map[string][]string, error) {
	deps := map[string][]string{}
	for n, line := range strings.Split(text, "\n") {
		if line == "" {
			continue
		}
		name, rest, ok := strings.Cut(line, ":")
		if !ok {
			return nil, fmt.Errorf("modules.dep line %d: no colon in %q", n+1, line)
		}
		deps[name] = strings.Fields(rest)
	}
	return deps, nil
}

// moduleName is the name of the module in the file path, with the kernel's underscores.
func moduleName(path string) string {
	return strings.ReplaceAll(strings.TrimSuffix(filepath.Base(path), ".ko"), "-", "_")
}

// resolveModules returns the files of the named modules and of all that they depend on, each once, in an order in which
// they can be loaded.
//
// Errors: a name that is no module; the kernel may have it built in, but then it should not be asked for.
func resolveModules(deps map[string][]string, names []string) ([]string, error) {
	byName := make(map[string]string, len(deps))
	for path := range deps {
		byName[moduleName(path)] = path
	}
	var order []string
	seen := map[string]bool{}
	add := func(path string) {
		if !seen[path] {
			seen[path] = true
			order = append(order, path)
		}
	}
	for _, name := range names {
		path, ok := byName[strings.ReplaceAll(name, "-", "_")]
		if !ok {
			return nil, fmt.Errorf("the kernel has no module %q", name)
		}
		before := deps[path]
		for i := len(before) - 1; i >= 0; i-- {
			add(before[i])
		}
		add(path)
	}
	return order, nil
}
