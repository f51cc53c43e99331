package demo

import (
	"fmt"
	"io"
	"sync"
	"time"

	"jbofd/internal/bench"
)

// progress writes a line for each step and each second of a load.
type progress struct {
	began time.Time

	mu sync.Mutex
	w  io.Writer
}

// printf writes one line with the time since the beginning. What the terminal says of it is of no
// consequence here: the table at the end is checked.
func (p *progress) printf(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = fmt.Fprintf(p.w, "[%4.1f s] %s\n", time.Since(p.began).Seconds(), fmt.Sprintf(format, args...))
}

// show tells how a host's load is doing.
func (p *progress) show(host string, b bench.Progress) {
	p.printf("  %s %s: read %.0f IOPS %.0f MB/s, write %.0f IOPS %.0f MB/s", host, b.Phase, b.Read.IOPS,
		b.Read.BytesPerSec/1e6, b.Write.IOPS, b.Write.BytesPerSec/1e6)
}
