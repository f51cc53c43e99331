package pci_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"jbofd/internal/ssd/vfio/pci"
)

// bus is a machine with functions, as /sys shows them.
func bus(t *testing.T) pci.Bus {
	t.Helper()
	root := t.TempDir()
	put := func(path, text string) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	link := func(path, to string) {
		t.Helper()
		if err := os.Symlink(to, filepath.Join(root, path)); err != nil {
			t.Fatal(err)
		}
	}
	for address, class := range map[string]string{"0000:03:00.0": "0x010802", "0000:04:00.0": "0x010802",
		"0000:05:00.0": "0x020000", "0000:06:00.0": "0x010802"} {
		dir := "sys/bus/pci/devices/" + address
		put(dir+"/vendor", "0x144d\n")
		put(dir+"/device", "0xa808\n")
		put(dir+"/class", class+"\n")
		put(dir+"/driver_override", "(null)\n")
	}
	put("sys/bus/pci/drivers/nvme/unbind", "")
	put("sys/bus/pci/drivers/vfio-pci/unbind", "")
	put("sys/bus/pci/drivers_probe", "")
	put("sys/bus/pci/devices/0000:03:00.0/nvme/nvme0/nvme0n1/size", "1")
	put("sys/bus/pci/devices/0000:03:00.0/nvme/nvme0/nvme3c0n2/size", "1")
	link("sys/bus/pci/devices/0000:03:00.0/driver", "../../drivers/nvme")
	link("sys/bus/pci/devices/0000:03:00.0/iommu_group", "../../../../kernel/iommu_groups/17")
	link("sys/bus/pci/devices/0000:04:00.0/driver", "../../drivers/vfio-pci")
	return pci.Bus{Sys: filepath.Join(root, "sys"), Dev: filepath.Join(root, "dev")}
}

func TestAFunctionIsDescribed(t *testing.T) {
	b := bus(t)
	i, err := b.Find("03:00.0")
	if err != nil {
		t.Fatal(err)
	}
	if i.Address != "0000:03:00.0" || i.Vendor != 0x144d || i.Device != 0xa808 || !i.NVMe() || i.Driver != "nvme" ||
		i.Group != "17" || len(i.Blocks) != 2 || i.Blocks[0] != "nvme0n1" || i.Blocks[1] != "nvme3n2" {
		t.Errorf("%+v", i)
	}
	all, err := b.NVMe()
	if err != nil || len(all) != 3 {
		t.Errorf("%d controllers, %v, want 3", len(all), err)
	}
}

// What keeps a function from being opened is an error that says what to do.
func TestAFunctionThatCannotBeOpened(t *testing.T) {
	b := bus(t)
	for _, tc := range []struct {
		address string
		want    error
	}{
		{"nvme0", pci.ErrAddress},
		{"0000:03:00.8", pci.ErrAddress},
		{"0000:07:00.0", pci.ErrAbsent},
		{"0000:05:00.0", pci.ErrAbsent}, // no NVMe controller
		{"0000:03:00.0", pci.ErrDriver}, // the kernel's
		{"0000:06:00.0", pci.ErrDriver}, // none
		{"0000:04:00.0", pci.ErrIOMMU},
	} {
		if _, err := b.Open(tc.address); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.address, err, tc.want)
		}
	}
}

// A function is given to a driver by its override, after the one that has it has given it up.
func TestBind(t *testing.T) {
	b := bus(t)
	if err := b.Bind("0000:04:00.0", pci.Driver); err != nil { // it has it
		t.Error(err)
	}
	if err := os.RemoveAll(filepath.Join(b.Sys, "bus/pci/drivers/vfio-pci")); err != nil {
		t.Fatal(err)
	}
	if err := b.Bind("0000:03:00.0", pci.Driver); !errors.Is(err, pci.ErrDriver) {
		t.Errorf("without the driver: %v", err)
	}
}
