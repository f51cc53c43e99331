package vfio_test

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"testing"

	"jbofd/internal/ssd"
	"jbofd/internal/ssd/ssdtest"
	"jbofd/internal/ssd/vfio"
)

// The memory of a drive keeps the promises of package ssd. One of the drives has some.
func TestDriveMemoryConforms(t *testing.T) {
	kinds := map[string]int{}
	for _, address := range drives(t) {
		for _, a := range ssd.Areas(openDrive(t, address)) {
			i := a.Info()
			kinds[i.Kind]++
			t.Run(fmt.Sprintf("%s of %s", i.Kind, address), func(t *testing.T) {
				t.Logf("%+v", i)
				if i.NotRestored || i.Persistent != (i.Kind == "pmr") {
					t.Error("that is not as it should be")
				}
				ssdtest.AreaConformance(t, a)
			})
		}
	}
	if kinds["pmr"] == 0 || kinds["cmb"] == 0 {
		t.Errorf("the drives have %v, want a PMR and a CMB", kinds)
	}
}

// persistent opens the drive at JBOFD_TEST_NVME_MEMORY, and returns its persistent memory.
func persistent(t *testing.T) ssd.Area {
	t.Helper()
	address := os.Getenv("JBOFD_TEST_NVME_MEMORY")
	if address == "" {
		t.Skip("no drive: JBOFD_TEST_NVME_MEMORY has no address of an NVMe controller whose memory may be overwritten")
	}
	d, err := vfio.OpenAddress(vfio.Config{Name: "test", Address: address})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	all := ssd.Areas(d)
	if len(all) == 0 || !all[0].Info().Persistent {
		t.Fatal("the drive has no persistent memory")
	}
	if err := all[0].Healthy(); err != nil || all[0].Info().NotRestored {
		t.Fatalf("%v, %+v", err, all[0].Info())
	}
	return all[0]
}

// memoryRecords is how many records there are at a time, each of memoryRecord bytes: its number, and a checksum.
const memoryRecords, memoryRecord = 32, 40

func makeRecord(n uint64) []byte {
	b := binary.LittleEndian.AppendUint64(nil, n)
	sum := sha256.Sum256(b)
	return append(b, sum[:]...)
}

// TestDriveMemoryIsWritten writes records, and tells of each that it has flushed, until it is killed.
func TestDriveMemoryIsWritten(t *testing.T) {
	a := persistent(t)
	for n := uint64(1); ; n++ {
		if err := errors.Join(a.Write(makeRecord(n), int64(n%memoryRecords*memoryRecord)), a.Flush()); err != nil {
			t.Fatal(err)
		}
		fmt.Println("flushed", n)
	}
}

// TestDriveMemoryIsThere checks that the records of TestDriveMemoryIsWritten are there, up to JBOFD_TEST_NVME_FLUSHED
// at least. The one that was being written may be torn.
func TestDriveMemoryIsThere(t *testing.T) {
	a := persistent(t)
	flushed, err := strconv.ParseUint(os.Getenv("JBOFD_TEST_NVME_FLUSHED"), 10, 64)
	if err != nil || flushed < memoryRecords {
		t.Fatalf("JBOFD_TEST_NVME_FLUSHED is %d, %v", flushed, err)
	}
	b := make([]byte, memoryRecord)
	torn, newest := 0, uint64(0)
	var numbers []uint64
	for i := range int64(memoryRecords) {
		if err := a.Read(b, i*memoryRecord); err != nil {
			t.Fatal(err)
		}
		n := binary.LittleEndian.Uint64(b)
		if string(b) != string(makeRecord(n)) {
			torn++
			continue
		}
		numbers, newest = append(numbers, n), max(newest, n)
	}
	for _, n := range numbers {
		if n+memoryRecords <= newest {
			t.Errorf("record %d is there beside %d: a later one was lost", n, newest)
		}
	}
	if torn > 1 || newest < flushed {
		t.Errorf("the newest record is %d, want %d or more, and %d are torn", newest, flushed, torn)
	}
}
