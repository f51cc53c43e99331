package main

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"jbofd/internal/admin"
)

// busy is a daemon that erases a namespace. It answers a change when its status was asked for a few times.
func busy(t *testing.T, asks int) string {
	var asked atomic.Int64
	enough := make(chan struct{})
	return serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == admin.PathStatus {
			n := asked.Add(1)
			_ = json.NewEncoder(w).Encode(admin.Status{APIVersion: admin.Version, Ready: true,
				Change: &admin.RunningChange{What: "the deletion of namespace " + uuid, RunningMS: 1000 * n,
					DoneBytes: n << 30, TotalBytes: 4 << 30}})
			if n == int64(asks) {
				close(enough)
			}
			return
		}
		select {
		case <-enough:
			_ = json.NewEncoder(w).Encode(admin.Reload{APIVersion: admin.Version})
		case <-r.Context().Done():
		}
	}))
}

// TestAChangeThatWaitsSaysForWhat, and how far that is: on a terminal all the time, elsewhere when the time is over.
func TestAChangeThatWaitsSaysForWhat(t *testing.T) {
	defer func(d time.Duration) { showEvery = d }(showEvery)
	showEvery = time.Millisecond
	for _, line := range []string{"reload", "namespace delete --yes " + uuid, "swap discard --yes " + uuid} {
		screen := typing(t, "")
		var out bytes.Buffer
		args := append([]string{"--socket", busy(t, 3)}, strings.Fields(line)...)
		if code := execute(t.Context(), args, terminal{in: strings.NewReader(""), out: &out, err: screen}); code != 0 {
			t.Errorf("%s: exit status %d", line, code)
		}
		if got := shown(t, screen, "3072"); !strings.Contains(got, "the deletion of namespace "+uuid+
			", for 2s, 2048 of 4096 MiB (50 %) erased") || !strings.Contains(got, "for 3s, 3072 of 4096 MiB") {
			t.Errorf("%s shows %q", line, got)
		}
	}
	code, _, stderr := run(t, "--socket", busy(t, 100), "reload", "--timeout", "100ms")
	if code != exitFailed || !strings.Contains(stderr, "what is under way: the deletion of namespace "+uuid+
		", for 1s, 1024 of 4096 MiB (25 %) erased") || strings.Count(stderr, "\n") != 1 {
		t.Errorf("exit status %d: %s", code, stderr)
	}
	if _, stdout, _ := run(t, "--socket", busy(t, 100), "status"); !strings.Contains(stdout, "the deletion of") {
		t.Errorf("the status says nothing of the change: %s", stdout)
	}
}

// shown returns what was written to a terminal of typing, as far as a text that is there at last.
func shown(t *testing.T, screen *os.File, until string) string {
	t.Helper()
	master := masters[screen]
	if err := master.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	var all []byte
	b := make([]byte, 4096)
	for !bytes.Contains(all, []byte(until)) {
		n, err := master.Read(b)
		if all = append(all, b[:n]...); err != nil {
			break
		}
	}
	return string(all)
}

func TestAnAbsentDaemonAndARefusalAreReported(t *testing.T) {
	if _, _, errs := run(t, "status", "--socket", "/nonexistent/socket"); !strings.Contains(errs,
		"no jbofd answers at /nonexistent/socket") {
		t.Errorf("got %q", errs)
	}
	if _, _, errs := run(t, "namespace", "delete", "--yes", uuid, "--socket", fake(t)); !strings.Contains(errs,
		"it is configured") {
		t.Errorf("got %q", errs)
	}
}
