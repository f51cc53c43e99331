//go:build vm

package vm

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// pmrBytes is the size of the persistent memory of a drive.
const pmrBytes = 2 << 20

// withMemory are the options of an NVMe drive with persistent memory, for which there must be pmrArgs, and a controller
// memory buffer.
const withMemory = ",pmrdev=pmr,cmb_size_mb=1"

// pmrArgs are QEMU's arguments for persistent memory that is in a file. What a drive has confirmed is in the file, also
// if QEMU is killed.
func pmrArgs(file string) []string {
	return []string{"-object", fmt.Sprintf("memory-backend-file,id=pmr,share=on,mem-path=%s,size=%d", file, pmrBytes)}
}

// memoryIsWritten has a process write records to the persistent memory of the first drive, and kills it meanwhile: what
// it has flushed is there.
func (g *nvmeGuest) memoryIsWritten() {
	const enough = 100
	written := make(chan struct{}, 1)
	job, err := g.Stream(time.Minute, "JBOFD_TEST_NVME_MEMORY=0000:01:00.0 vfio.test -test.run DriveMemoryIsWritten",
		func(line string) {
			n, ok := strings.CutPrefix(line, "flushed ")
			if i, err := strconv.Atoi(n); ok && err == nil {
				if g.flushed.Store(int64(i)); i == enough {
					written <- struct{}{}
				}
			}
		})
	if err != nil {
		g.Fatal(err)
	}
	select {
	case <-written:
	case <-time.After(time.Minute):
	}
	if err := job.Kill(); err != nil {
		g.Fatal(err)
	}
	r, err := job.Wait()
	if err != nil || g.flushed.Load() < enough {
		g.Fatalf("%d records were flushed, %v\n%s", g.flushed.Load(), err, r)
	}
	g.memoryIsThere("0000:01:00.0")
}

// memoryIsThere checks that the memory of a drive, which nobody has open, has what was flushed.
func (g *nvmeGuest) memoryIsThere(address string) {
	g.Helper()
	g.run("JBOFD_TEST_NVME_MEMORY=%s JBOFD_TEST_NVME_FLUSHED=%d vfio.test -test.run DriveMemoryIsThere", address,
		g.flushed.Load())
}
