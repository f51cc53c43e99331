package e2e

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"jbofd/internal/admin"
	"jbofd/internal/nvme"
)

// TestADamagedSegmentIsRepaired: a segment is damaged on the drive while the daemon runs, or two, if a split has left
// the damaged key in both. Their keys are reported as lost and take new values; a check says that something is lost;
// after a repair they do not exist.
func TestADamagedSegmentIsRepaired(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	d := start(t, kvSetup(fileSSD))
	n := openKV(t, d.connect(d.options(hostA, nqnA)), 2)
	const keys, bad = 300, 17
	name := func(i int) []byte { return fmt.Appendf(nil, "name of key %04d", i) }
	for i := range keys {
		if err := n.Put(ctx(t), name(i), value(fmt.Sprint(i), 1, 100)); err != nil {
			t.Fatal(err)
		}
	}
	damageKey(t, filepath.Join(d.dir, "ssd0.img"), name(bad))
	lost := map[int]bool{}
	for i := range keys {
		got, err := n.Value(ctx(t), name(i))
		switch {
		case err != nil && statusOf(t, err).Code() == nvme.UnrecoveredReadError:
			lost[i] = true
		case err != nil || !bytes.Equal(got, value(fmt.Sprint(i), 1, 100)):
			t.Errorf("value %d: %d bytes, %v", i, len(got), err)
		}
	}
	if !lost[bad] || len(lost) > 40 {
		t.Fatalf("%d keys are lost: %v", len(lost), lost)
	}
	if err := n.Put(ctx(t), name(bad), []byte("new")); err != nil {
		t.Errorf("a lost key takes no value: %v", err)
	}
	segments := map[string]bool{}
	for _, line := range d.log.find("damaged segment") {
		segments[regexp.MustCompile(` segment=(\d+)`).FindString(line)] = true
	}
	if len(segments) < 1 || len(segments) > 2 {
		t.Fatalf("damaged segments in the log: %v", segments)
	}
	lossy := uint32(len(segments))
	ctl := admin.NewClient(d.socket())
	l, err := ctl.KVAudits(ctx(t))
	if err != nil || len(l.Items) != 1 || l.Items[0].NSID != 2 {
		t.Fatalf("%+v, %v", l, err)
	}
	uuid := l.Items[0].UUID
	if a, err := ctl.AuditKV(ctx(t), uuid, false); err != nil || a.LossySegments != lossy || a.KnownKeys != 1 ||
		a.LostKeys > 0 {
		t.Errorf("a check: %+v, %v", a, err)
	}
	if a, err := ctl.AuditKV(ctx(t), uuid, true); err != nil || a.LossySegments != 0 || a.RepairedSegments != lossy ||
		a.LostKeys != int64(len(lost)) { // the one that was stored again was counted twice
		t.Errorf("a repair after a loss of %d keys: %+v, %v", len(lost), a, err)
	}
	for i := range keys {
		got, err := n.Value(ctx(t), name(i))
		switch {
		case i == bad:
			if err != nil || string(got) != "new" {
				t.Errorf("the key that was stored again: %q, %v", got, err)
			}
		case lost[i]:
			if err == nil || statusOf(t, err).Code() != nvme.KeyDoesNotExist {
				t.Errorf("a lost key after the repair: %v", err)
			}
		case err != nil:
			t.Errorf("value %d: %v", i, err)
		}
	}
	if _, err := ctl.AuditKV(ctx(t), "0425d6c3-77cf-4e62-873e-0484d7ac5274", true); err == nil {
		t.Error("a namespace that does not exist is repaired")
	}
	if got := len(d.log.find("audit of a key-value namespace ended", "nsid=2")); got != 2 {
		t.Errorf("%d audits are logged, want 2", got)
	}
}

// damageKey damages every record in a drive's file that contains a key.
func damageKey(t *testing.T, path string, key []byte) {
	t.Helper()
	image, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	found := 0
	for at := 0; ; at++ {
		i := bytes.Index(image[at:], key)
		if i < 0 {
			break
		}
		at += i
		if _, err := f.WriteAt([]byte{^key[0]}, int64(at)); err != nil {
			t.Fatal(err)
		}
		found++
	}
	if found == 0 {
		t.Fatal("the key is not on the drive")
	}
}
