package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"jbofd/client/kv"
	"jbofd/internal/admin"
	"jbofd/internal/nvme"
)

// buildCtl builds jbofctl, once.
var buildCtl = sync.OnceValues(func() (string, error) {
	path := filepath.Join(programs, "jbofctl")
	out, err := exec.Command("go", "build", "-o", path, "jbofd/cmd/jbofctl").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("building jbofctl: %w\n%s", err, out)
	}
	return path, nil
})

// jbofctl runs jbofctl for the daemon, with standard input, and returns its output and its exit code.
func (d *daemon) jbofctl(in []byte, args ...string) (out, errs []byte, code int) {
	d.t.Helper()
	path, err := buildCtl()
	if err != nil {
		d.t.Fatal(err)
	}
	var o, e bytes.Buffer
	cmd := exec.CommandContext(ctx(d.t), path, append([]string{"--socket", d.socket()}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(in), &o, &e
	if err := cmd.Run(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		d.t.Fatal(err)
	}
	return o.Bytes(), e.Bytes(), cmd.ProcessState.ExitCode()
}

// TestAnImportRestoresWhatIsDamagedAndWhatWasDropped: an export was made before a value was damaged on the drive while
// the daemon was stopped. An import brings that value back, and nothing else changes. After a drop of everything the
// import that follows at once brings all values back.
func TestAnImportRestoresWhatIsDamagedAndWhatWasDropped(t *testing.T) {
	t.Parallel()
	d := start(t, kvSetup(fileSSD))
	n := openKV(t, d.connect(d.options(hostA, nqnA)), 2)
	const keys, bad = 300, 17
	name := func(i int) []byte { return fmt.Appendf(nil, "name of key %04d", i) }
	val := func(i int) []byte {
		return fmt.Appendf(nil, "the value of %04d is %s", i, strings.Repeat("long, ", 50))
	}
	versions := map[int]uint64{}
	for i := range keys {
		var err error
		if versions[i], err = n.PutWith(ctx(t), name(i), val(i), kv.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	l, err := admin.NewClient(d.socket()).KVAudits(ctx(t))
	if err != nil || len(l.Items) != 1 {
		t.Fatalf("%+v, %v", l, err)
	}
	uuid := l.Items[0].UUID
	export, errs, code := d.jbofctl(nil, "kv", "export", uuid)
	if code != 0 {
		t.Fatalf("the export ends with %d: %s", code, errs)
	}
	imports := func(what string, in []byte, want int) {
		t.Helper()
		out, errs, code := d.jbofctl(in, "kv", "import", uuid)
		if code != 0 || !regexp.MustCompile(fmt.Sprintf(`(?mi)^stored:? +%d$`, want)).Match(out) {
			t.Errorf("the import of %s ends with %d, want %d stored:\n%s%s", what, code, want, out, errs)
		}
	}

	d.term()
	path := filepath.Join(d.dir, "ssd0.img")
	image, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(image, val(bad))
	if at < 0 || bytes.Count(image, val(bad)) != 1 {
		t.Fatalf("the value is %d times on the drive, want once", bytes.Count(image, val(bad)))
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{image[at+30] ^ 1}, int64(at)+30); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	d.awaitRelease()
	d.launch()
	n = openKV(t, d.connect(d.options(hostA, nqnA)), 2)
	if got, err := n.Value(ctx(t), name(bad)); err == nil || statusOf(t, err).Code() != nvme.UnrecoveredReadError {
		t.Errorf("the damaged value is read: %q, %v", got, err)
	}
	later, err := n.PutWith(ctx(t), name(bad+1), []byte("later"), kv.PutOptions{})
	if err != nil {
		t.Fatal(err)
	}
	imports("what is damaged", export, 1)
	for i := range keys {
		want, version := val(i), versions[i]
		if i == bad+1 {
			want, version = []byte("later"), later
		}
		got := make([]byte, 1000)
		o, err := n.GetVersion(ctx(t), name(i), got)
		if err != nil || !bytes.Equal(got[:o.Size], want) || o.Version != version {
			t.Errorf("key %d: %q, %+v, %v; want version %d", i, got[:o.Size], o, err, version)
		}
	}
	imports("what is there", export, 0)

	for range 2 {
		if _, err := n.DropRange(ctx(t), kv.All(), 0); err != nil {
			t.Fatal(err)
		}
		if c, err := n.Count(ctx(t), kv.All()); err != nil || c.Objects != 0 {
			t.Fatalf("after a drop: %+v, %v", c, err)
		}
		imports("what was dropped", export, keys)
		for i := range keys {
			if got, err := n.Value(ctx(t), name(i)); err != nil || !bytes.Equal(got, val(i)) {
				t.Fatalf("key %d after a drop and an import: %q, %v", i, got, err)
			}
		}
	}
}
