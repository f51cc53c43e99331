package e2e

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"jbofd/client"
)

// TestWhatIsWrittenIsRead is the smoke test: a daemon, a host, a block.
func TestWhatIsWrittenIsRead(t *testing.T) {
	t.Parallel()
	d := start(t, oneMem)
	n := d.namespace(d.options(hostA, nqnA), 1)
	w, r := make([]byte, 8192), make([]byte, 8192)
	fill(w, 0, 1)
	if _, err := n.WriteAt(ctx(t), w, 4096, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := n.ReadAt(ctx(t), r, 4096); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(r, w) {
		t.Fatal("read something else than was written")
	}
	_ = promlint.New
	_ = os.Remove
	_ = filepath.Join
	_ = strings.Join
	_ = sync.OnceFunc
	_ = atomic.AddInt64
	_ = time.Now
	_ = client.FUA
}
