package vfio

import (
	"errors"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd/vfio/pcie"
)

// Whatever a controller says of itself and of its namespace is an error, or a drive that package ssd can describe.
func FuzzIdentify(f *testing.F) {
	var c nvme.IdentifyController
	var n nvme.IdentifyNamespace
	c.SetSQES(0x66)
	c.SetCQES(0x44)
	n.SetNSZE(100)
	n.SetNCAP(100)
	n.SetLBAF(0, nvme.MakeLBAFormat(9))
	f.Add(c[:1024], n[:256], uint64(nvme.CAP(0).WithMQES(1023)))
	f.Fuzz(func(t *testing.T, ctrl, ns []byte, caps uint64) {
		var c nvme.IdentifyController
		var n nvme.IdentifyNamespace
		copy(c[:], ctrl)
		copy(n[:], ns)
		p, err := pcie.MakeProperties(&c, nvme.CAP(caps))
		if err != nil || n.Check() != nil {
			return
		}
		if p.MaxTransfer < 4096 || p.MaxTransfer > 1<<20 || p.Entries < 1 || p.Entries > pcie.MaxEntries ||
			p.Entries&(p.Entries-1) != 0 || p.AtomicBlocks < 1 {
			t.Fatalf("%+v", p)
		}
		i, err := makeInfo(&Config{Name: "fuzz"}, &p, &n)
		if err != nil {
			if !errors.Is(err, pcie.ErrUnsuited) {
				t.Fatal(err)
			}
			return
		}
		if i.BlockSize < 512 || i.BlockSize&(i.BlockSize-1) != 0 || i.SizeBytes <= 0 ||
			i.SizeBytes%int64(i.BlockSize) != 0 || i.OptimalIOBytes < i.BlockSize || i.AtomicWriteBytes < i.BlockSize ||
			i.AtomicWriteBytes%i.BlockSize != 0 {
			t.Fatalf("%+v", i)
		}
	})
}
