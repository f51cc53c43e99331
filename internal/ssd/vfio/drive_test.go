package vfio_test

import (
	"os"
	"strings"
	"testing"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/ssdtest"
	"jbofd/internal/ssd/vfio"
	"jbofd/internal/ssd/vfio/pci"
)

// drives are addresses of NVMe controllers whose content the tests may overwrite, separated by spaces.
func drives(t *testing.T) []string {
	t.Helper()
	all := strings.Fields(os.Getenv("JBOFD_TEST_NVME"))
	if len(all) == 0 {
		t.Skip("no drive: JBOFD_TEST_NVME has no addresses of NVMe controllers that may be overwritten")
	}
	return all
}

// openDrive binds and opens a controller. Its first 4 MiB are zeroes.
func openDrive(t *testing.T, address string) ssd.Device {
	t.Helper()
	if err := (pci.Bus{}).Bind(address, pci.Driver); err != nil {
		t.Fatal(err)
	}
	f, err := pci.Bus{}.Open(address)
	if err != nil {
		t.Fatal(err)
	}
	d, err := vfio.Open(vfio.Config{Name: "test", Address: address}, f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	q, err := d.OpenQueue(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := ssdtest.Do(t, q, ssd.Request{Op: ssd.WriteZeroes, Len: 4 << 20}); err != nil {
		t.Fatal(err)
	}
	if err := q.Close(); err != nil {
		t.Fatal(err)
	}
	return d
}

// A drive keeps the promises of package ssd.
func TestDriveConforms(t *testing.T) {
	for _, a := range drives(t) {
		t.Run(a, func(t *testing.T) {
			ssdtest.Conformance(t, func(t *testing.T) ssd.Device {
				d := openDrive(t, a)
				t.Logf("%+v", d.Info())
				return d
			})
		})
	}
}
