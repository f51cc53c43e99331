package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"

	"golang.org/x/sys/unix"

	"jbofd/internal/admin"
	"jbofd/internal/nvme"
)

// exported is an export of 40 keys in 4 batches.
func exported() (batches [][]byte) {
	from := nvme.KVCursor{}
	for i := range 4 {
		b := nvme.NewKVRange(make([]byte, 1<<16), nvme.KVCopy, 0, math.MaxUint64, from)
		for k := range 10 {
			position := uint64(i*10+k+1) << 56
			key := fmt.Appendf(nil, "key %d %d", i, k)
			e, longer, _ := b.Append(key, 5, 0)
			e.SetPosition(position)
			e.SetVersion(1)
			copy(e.Value(), "value")
			b, from = longer, nvme.KVCursorAt(position, key)
		}
		b.SetTo(from)
		if i == 3 {
			b.SetTo(nvme.KVLastOf(math.MaxUint64))
			b.SetFlags(nvme.KVComplete)
		}
		b.SetOrigin(7)
		b.Seal()
		batches = append(batches, b)
	}
	return batches
}

// exporter is a daemon that exports these batches from the one on that follows the cursor. It cuts the connection
// after most of them, and notes what is imported.
func exporter(t *testing.T, batches [][]byte, most int, imported *[]byte) string {
	return serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			b, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			*imported = append(*imported, b...)
			fmt.Fprintf(w, `{"apiVersion": %q, "applied": 10}`, admin.Version)
			return
		}
		at, err := strconv.ParseUint(r.URL.Query().Get(admin.ParamPosition), 10, 64)
		if err != nil {
			t.Error(err)
		}
		for n, b := range batches {
			if nvme.KVRange(b).From().Position < at {
				continue
			}
			if n == most {
				_, _ = w.Write(b[:50])
				_ = http.NewResponseController(w).Flush()
				panic(http.ErrAbortHandler)
			}
			_, _ = w.Write(b)
		}
	}))
}

// TestAnExportIsWrittenTakenUpAndImported, as commands do it.
func TestAnExportIsWrittenTakenUpAndImported(t *testing.T) {
	batches := exported()
	all := bytes.Join(batches, nil)
	var imported []byte
	s := exporter(t, batches, 4, &imported)
	code, out, errs := run(t, "kv", "export", uuid, "--socket", s)
	if code != 0 || out != string(all) || !strings.Contains(errs, "40") {
		t.Fatalf("%d, %d bytes, want %d; %s", code, len(out), len(all), errs)
	}
	path := filepath.Join(t.TempDir(), "export")
	cut := exporter(t, batches, 2, nil)
	code, out, errs = run(t, "kv", "export", uuid, "--socket", cut)
	if code != exitFailed || out != string(all[:len(batches[0])+len(batches[1])]) ||
		!strings.Contains(errs, "--continue") {
		t.Fatalf("one that is cut off: %d, %d bytes; %s", code, len(out), errs)
	}
	if err := os.WriteFile(path, append([]byte(out), batches[2][:300]...), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := runIn(t, out, "kv", "import", "--verify"); code != exitFailed ||
		!strings.Contains(errs, "the end is missing") {
		t.Errorf("half of it is verified: %d, %s", code, errs)
	}
	if code, _, errs := run(t, "kv", "export", uuid, "--socket", s, "--continue", path); code != 0 ||
		!strings.Contains(errs, "20 keys in 2 batches") || !strings.Contains(errs, "300 bytes") {
		t.Fatalf("%d, %s", code, errs)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, all) {
		t.Errorf("taken up: %d bytes, %v, want %d", len(got), err, len(all))
	}
	if code, _, errs := run(t, "kv", "export", uuid, "--socket", s, "--continue", path); code != exitFailed ||
		!strings.Contains(errs, "complete already") {
		t.Errorf("a complete one: %d, %s", code, errs)
	}
	if code, out, errs := runIn(t, string(all), "kv", "import", "--verify"); code != 0 ||
		!strings.Contains(out, "complete and sound") {
		t.Errorf("verify: %d, %s%s", code, out, errs)
	}
	if code, out, errs := runIn(t, string(all), "kv", "import", uuid, "--socket", s, "-o", "json"); code != 0 ||
		!strings.Contains(out, `"applied": 40`) || !bytes.Equal(imported, all) {
		t.Errorf("import: %d, %s%s, %d bytes", code, out, errs, len(imported))
	}
}

// TestOnlyAnIncompleteLastBatchIsCutOff: --continue leaves every other file as it is.
func TestOnlyAnIncompleteLastBatchIsCutOff(t *testing.T) {
	batches := exported()
	all := bytes.Join(batches, nil)
	two := len(batches[0]) + len(batches[1])
	flipped := bytes.Clone(all)
	flipped[len(batches[0])+200] ^= 4
	length := bytes.Clone(all[:two])
	length[len(batches[0])+14]++ // the batch would reach beyond the end of the file
	length[len(batches[0])+20]++ // and does not follow the first one
	foreign := exported()
	for _, b := range foreign {
		nvme.KVRange(b).SetOrigin(8)
		nvme.KVRange(b).Seal()
	}
	s := exporter(t, batches, 4, nil)
	for _, c := range []struct {
		name, socket string
		file         []byte
		says         string
	}{
		{"a text", s, []byte("# jbofd\n\nServes flash."), `begins with "# jbofd`},
		{"a short text", s, []byte("# jbofd"), `begins with "# jbofd"`},
		{"zeroes", s, make([]byte, 5000), "begins with"},
		{"less than a batch", s, all[:300], "the end is missing"},
		{"a flipped bit", s, flipped, fmt.Sprintf("byte %d", len(batches[0]))},
		{"a wrong length", s, length, fmt.Sprintf("byte %d", len(batches[0]))},
		{"a text behind two batches", s, append(all[:two:two], "something else"...), fmt.Sprintf("-s %d ", two)},
		{"a text behind all batches", s, append(bytes.Clone(all), "something else"...), "behind the last batch"},
		{"another namespace", s, bytes.Join(foreign[:2], nil), "another namespace"},
		{"a batch of another namespace", s, append(all[:len(batches[0]):len(batches[0])], foreign[1]...),
			"another namespace"},
		{"no daemon", "/nonexistent/socket", all[:two+300], "no jbofd answers"},
		{"nothing comes", exporter(t, batches, 2, nil), all[:two+300], "the end is missing"},
	} {
		path := filepath.Join(t.TempDir(), "export")
		if err := os.WriteFile(path, c.file, 0o600); err != nil {
			t.Fatal(err)
		}
		code, _, errs := run(t, "kv", "export", uuid, "--socket", c.socket, "--continue", path)
		if code != exitFailed || !strings.Contains(errs, c.says) {
			t.Errorf("%s: %d, %s, want an error that says %q", c.name, code, errs, c.says)
		}
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, c.file) {
			t.Errorf("%s: the file has changed, %v", c.name, err)
		}
	}
	if code, _, errs := run(t, "kv", "export", uuid, "--socket", s, "--continue", t.TempDir()); code != exitFailed {
		t.Errorf("a directory: %d, %s", code, errs)
	}
	path := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := run(t, "kv", "export", uuid, "--socket", s, "--continue", path); code != 0 {
		t.Errorf("an empty file: %d, %s", code, errs)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, all) {
		t.Errorf("an empty file has %d bytes afterwards, %v", len(got), err)
	}
}

// TestInterruptedCommandsSayHowFarTheyWere, and exit with 130.
func TestInterruptedCommandsSayHowFarTheyWere(t *testing.T) {
	batches := exported()
	all := bytes.Join(batches, nil)
	for _, c := range []struct{ line, says string }{
		{"kv export", "interrupted after 20 keys; --continue FILE"},
		{"kv import", "interrupted after 20 keys, 20 of them stored; repeat"},
		{"kv check", "the daemon goes on"},
		{"status", "interrupted"},
	} {
		ctx, interrupt := context.WithCancel(t.Context())
		imported := 0
		s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			switch {
			case r.URL.Path == admin.PathKVExport:
				_, _ = w.Write(bytes.Join(batches[:2], nil))
				_ = http.NewResponseController(w).Flush()
			case r.URL.Path == admin.PathKVImport && imported < 20:
				imported += 10
				fmt.Fprintf(w, `{"apiVersion": %q, "applied": 10}`, admin.Version)
				return
			}
			if r.URL.Path != admin.PathKVExport {
				interrupt()
			}
			<-r.Context().Done()
		}))
		args := append(strings.Fields(c.line), "--socket", s)
		if c.line != "status" {
			args = append(args, uuid)
		}
		out := &interrupting{after: len(batches[0]) + len(batches[1]), interrupt: interrupt}
		var errs bytes.Buffer
		code := execute(ctx, args, terminal{in: bytes.NewReader(all), out: out, err: &errs})
		if code != exitInterrupted || !strings.Contains(errs.String(), c.says) || strings.Contains(errs.String(),
			"http://") {
			t.Errorf("%s: %d, %s, want 130 and %q", c.line, code, &errs, c.says)
		}
	}
	path := kvDrive(t)
	ctx, interrupt := context.WithCancel(t.Context())
	interrupt()
	for _, args := range [][]string{{"kv", "check", path}, {"kv", "import", "--verify"}} {
		var errs bytes.Buffer
		code := execute(ctx, args, terminal{in: bytes.NewReader(all), out: io.Discard, err: &errs})
		if code != exitInterrupted || !strings.Contains(errs.String(), "interrupted") {
			t.Errorf("%v: %d, %s", args, code, &errs)
		}
	}
}

// interrupting is an output that interrupts the command once it has so much.
type interrupting struct {
	after     int
	interrupt func()
}

func (w *interrupting) Write(b []byte) (int, error) {
	if w.after -= len(b); w.after == 0 {
		w.interrupt()
	}
	return len(b), nil
}

// TestWhyACopyEndsEarlyIsSaid, with what helps.
func TestWhyACopyEndsEarlyIsSaid(t *testing.T) {
	batches := exported()
	s := exporter(t, batches, 4, nil)
	var errs bytes.Buffer
	code := execute(t.Context(), []string{"kv", "export", uuid, "--socket", s}, terminal{in: strings.NewReader(""),
		out: &fullDisk{batches[0]}, err: &errs})
	if code != exitFailed || !strings.Contains(errs.String(), "after 10 keys: no space left on device; --continue") {
		t.Errorf("a full disk: %d, %s", code, &errs)
	}
	all := bytes.Join(batches, nil)
	in := io.MultiReader(bytes.NewReader(all[:len(batches[0])+100]), iotest.ErrReader(unix.EIO))
	errs.Reset()
	code = execute(t.Context(), []string{"kv", "import", "--verify"}, terminal{in: in, out: io.Discard, err: &errs})
	if code != exitFailed || !strings.Contains(errs.String(), unix.EIO.Error()) ||
		strings.Contains(errs.String(), "not a sound export") {
		t.Errorf("an unreadable file: %d, %s", code, &errs)
	}
	refusing := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if b, _ := io.ReadAll(r.Body); bytes.Equal(b, batches[2]) {
			w.WriteHeader(http.StatusConflict)
			fmt.Fprintf(w, `{"error": "the namespace is full"}`)
			return
		}
		fmt.Fprintf(w, `{"applied": 9}`)
	}))
	if code, _, errs := runIn(t, string(all), "kv", "import", uuid, "--socket", refusing); code != exitFailed ||
		!strings.Contains(errs, "after 20 keys, 18 of them stored") || !strings.Contains(errs, "full") {
		t.Errorf("a full namespace: %d, %s", code, errs)
	}
	if code, _, errs := runIn(t, "# some text", "kv", "import", "--verify"); code != exitFailed ||
		!strings.Contains(errs, `begins with "# some text", must have "KVR" at byte 4`) {
		t.Errorf("a text: %d, %s", code, errs)
	}
	nvme.KVRange(batches[1]).SetFlags(nvme.KVLost)
	nvme.KVRange(batches[1]).Seal()
	if code, out, errs := runIn(t, string(bytes.Join(batches, nil)), "kv", "import", "--verify"); code !=
		exitNotReady || !strings.Contains(out, "complete; 1 batches say that keys are missing") ||
		strings.Contains(out, "sound") || strings.Contains(errs, "repair") {
		t.Errorf("an export with a loss: %d, %s%s", code, out, errs)
	}
}

// fullDisk has no room but for one batch.
type fullDisk struct{ room []byte }

func (d *fullDisk) Write(b []byte) (int, error) {
	if len(b) > len(d.room) {
		return 0, unix.ENOSPC
	}
	d.room = d.room[len(b):]
	return len(b), nil
}

// TestAnExportIsVerifiedOnATerminal: the bar that it shows there ends.
func TestAnExportIsVerifiedOnATerminal(t *testing.T) {
	var out bytes.Buffer
	all := bytes.Join(exported(), nil)
	if code := execute(t.Context(), []string{"kv", "import", "--verify"}, terminal{in: bytes.NewReader(all), out: &out,
		err: typing(t, "")}); code != 0 || !strings.Contains(out.String(), "sound") {
		t.Errorf("%d, %s", code, &out)
	}
}

// runIn is run with a standard input.
func runIn(t *testing.T, in string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = execute(t.Context(), args, terminal{in: strings.NewReader(in), out: &out, err: &err})
	return code, out.String(), err.String()
}
