// Package pci owns PCI functions through VFIO: it finds out which driver has one, binds it to vfio-pci and back, and
// opens it for package pcie: with its registers, its interrupts, and memory that is mapped for it in the IOMMU.
package pci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Driver is the kernel's driver through which a process owns a function.
const Driver = "vfio-pci"

// nvmeClass is the PCI class of NVMe controllers, without the programming interface of administrative ones.
const nvmeClass = 0x010802

// The errors besides those of the system.
var (
	// ErrAddress: it is no address of a PCI function.
	ErrAddress = errors.New("no address of a PCI function")
	// ErrAbsent: there is no such function, or it is no NVMe controller.
	ErrAbsent = errors.New("there is no such PCI function")
	// ErrDriver: another driver has the function, or none.
	ErrDriver = errors.New("the function does not have the driver " + Driver)
	// ErrIOMMU: the function has no IOMMU group, so nothing bounds the memory that the device can access.
	ErrIOMMU = errors.New("the function has no IOMMU group")
	// ErrInUse: a process has opened its IOMMU group.
	ErrInUse = errors.New("the function is in use")
)

var addressForm = regexp.MustCompile(`^([0-9a-f]{4}:)?[0-9a-f]{2}:[0-1][0-9a-f]\.[0-7]$`)

// Parse returns an address as the kernel writes it, 0000:03:00.0. The domain may be missing.
//
// Errors: ErrAddress.
func Parse(address string) (string, error) {
	a := strings.ToLower(address)
	if !addressForm.MatchString(a) {
		return "", fmt.Errorf("%q is %w, want domain:bus:device.function, as 0000:03:00.0", address, ErrAddress)
	}
	if strings.Count(a, ":") == 1 {
		a = "0000:" + a
	}
	return a, nil
}

// Bus is the PCI bus of a machine, as sysfs and /dev show it. The zero Bus is this machine's.
type Bus struct {
	// Sys and Dev are the directories used for /sys and /dev; empty: those.
	Sys, Dev string
}

func (b Bus) sys(parts ...string) string {
	root := b.Sys
	if root == "" {
		root = "/sys"
	}
	return filepath.Join(append([]string{root, "bus/pci"}, parts...)...)
}

func (b Bus) dev(name string) string {
	if b.Dev == "" {
		return filepath.Join("/dev", name)
	}
	return filepath.Join(b.Dev, name)
}

// Info describes a function, as sysfs does.
type Info struct {
	Address        string
	Vendor, Device uint16
	Class          uint32
	// Driver is the driver that has it, or empty. Group is the number of its IOMMU group; empty: it has none.
	Driver, Group string
	// Blocks are the names of its block devices, such as nvme0n1.
	Blocks []string
}

// NVMe reports whether it is an NVMe controller.
func (i *Info) NVMe() bool { return i.Class == nvmeClass }

// Find returns the Info of a function.
//
// Errors: ErrAddress, ErrAbsent; the system's.
func (b Bus) Find(address string) (*Info, error) {
	a, err := Parse(address)
	if err != nil {
		return nil, err
	}
	dir := b.sys("devices", a)
	if _, err := os.Stat(dir); err != nil {
		return nil, fmt.Errorf("%s: %w", a, ErrAbsent)
	}
	i := &Info{Address: a}
	for _, f := range []struct {
		name string
		set  func(v uint64)
	}{
		{"vendor", func(v uint64) { i.Vendor = uint16(v) }},
		{"device", func(v uint64) { i.Device = uint16(v) }},
		{"class", func(v uint64) { i.Class = uint32(v) }},
	} {
		text, err := os.ReadFile(filepath.Join(dir, f.name))
		if err != nil {
			return nil, err
		}
		v, err := strconv.ParseUint(strings.TrimSpace(string(text)), 0, 32)
		if err != nil {
			return nil, fmt.Errorf("%s of %s: %w", f.name, a, err)
		}
		f.set(v)
	}
	i.Driver, i.Group = target(filepath.Join(dir, "driver")), target(filepath.Join(dir, "iommu_group"))
	blocks, err := filepath.Glob(filepath.Join(dir, "nvme/nvme*/nvme*n*"))
	if err != nil {
		return nil, err
	}
	for _, n := range blocks {
		i.Blocks = append(i.Blocks, pathOf.ReplaceAllString(filepath.Base(n), "$1$2"))
	}
	return i, nil
}

// pathOf matches nvme0c1n1, which is a path to nvme0n1 by one of the controllers of its subsystem.
var pathOf = regexp.MustCompile(`^(nvme[0-9]+)c[0-9]+(n[0-9]+)$`)

// target is the last part of what a link points to, empty: there is none.
func target(link string) string {
	to, err := os.Readlink(link)
	if err != nil {
		return ""
	}
	return filepath.Base(to)
}

// NVMe returns all NVMe controllers of the bus, by address.
//
// Errors: the system's.
func (b Bus) NVMe() ([]*Info, error) {
	entries, err := os.ReadDir(b.sys("devices"))
	if err != nil {
		return nil, err
	}
	var all []*Info
	for _, e := range entries {
		i, err := b.Find(e.Name())
		if err != nil {
			return nil, err
		}
		if i.NVMe() {
			all = append(all, i)
		}
	}
	return all, nil
}

// CheckFree checks that no process has opened the IOMMU group of a function. It is nil for a function that does not
// have the driver vfio-pci.
//
// Errors: ErrInUse; the system's.
func (b Bus) CheckFree(i *Info) error {
	if i.Driver != Driver || i.Group == "" {
		return nil
	}
	path := filepath.Join(b.dev(groupDevices), i.Group)
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%s: %w: a process has %s", i.Address, ErrInUse, path)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return unix.Close(fd)
}

// bindPatience is how long binding a function to a driver may take.
const bindPatience = 5 * time.Second

// Bind binds a function to a driver, or, if driver is empty, to the one that the kernel chooses. It unbinds the driver
// that has the function, so that its block devices vanish: the caller must have made sure that nobody uses them.
//
// Errors: ErrAddress, ErrAbsent, ErrDriver; the system's.
func (b Bus) Bind(address, driver string) error {
	i, err := b.Find(address)
	if err != nil {
		return err
	}
	if driver != "" && i.Driver == driver {
		return nil
	}
	if driver != "" {
		if _, err := os.Stat(b.sys("drivers", driver)); err != nil {
			return fmt.Errorf("%w, which is not loaded: modprobe %s", ErrDriver, driver)
		}
	}
	dir := b.sys("devices", i.Address)
	override := driver
	if override == "" {
		override = "\n" // none
	}
	if err := os.WriteFile(filepath.Join(dir, "driver_override"), []byte(override), 0); err != nil {
		return err
	}
	if i.Driver != "" {
		if err := os.WriteFile(filepath.Join(dir, "driver/unbind"), []byte(i.Address), 0); err != nil {
			return err
		}
	}
	if err := os.WriteFile(b.sys("drivers_probe"), []byte(i.Address), 0); err != nil {
		return err
	}
	for end := time.Now().Add(bindPatience); ; time.Sleep(10 * time.Millisecond) {
		now := target(filepath.Join(dir, "driver"))
		if now != "" && (driver == "" || now == driver) {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s: %w after %v, but %q", i.Address, ErrDriver, bindPatience, now)
		}
	}
}
