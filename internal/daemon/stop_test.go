package daemon

import (
	"net"
	"testing"
	"time"
)

// TestACallerThatSaysNothingDoesNotKeepADriveFromBeingClosed: somebody has opened the admin socket and sends nothing,
// or only a part of a request. The node stops in order nevertheless, within the time that it has.
func TestACallerThatSaysNothingDoesNotKeepADriveFromBeingClosed(t *testing.T) {
	for _, said := range []string{"", "GET /v1/status HTTP/1.1\r\n"} {
		w := newWorld(t)
		w.closeTimeout = closeTimeout
		out := &lines{}
		w.log = out
		w.configure([]string{"{name: f0, backend: file, path: DIR/f0, create: true, size: 64MiB}"},
			[]string{"{nsid: 1, ssd: f0, size: 16MiB}"})
		n := w.mustStart()
		c, err := net.Dial("unix", w.path("admin.sock"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte(said)); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := n.stop(); err != nil {
			t.Error(err)
		}
		if got := out.with("stopped without closing"); len(got) > 0 {
			t.Errorf("with %q sent to the admin socket, after %v: %s", said, time.Since(began), got)
		}
		_ = c.Close()
	}
}
