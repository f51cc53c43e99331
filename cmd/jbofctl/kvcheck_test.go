package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"jbofd/internal/admin"
	"jbofd/internal/kvstore"
	"jbofd/internal/partition"
	"jbofd/internal/ssd/file"
)

// kvDrive makes a drive that is one partition, without a label, with some keys, and returns its path.
func kvDrive(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ssd0.img")
	dev, err := file.Open(file.Config{Name: "ssd0", Path: path, Create: true, SizeBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	p, err := partition.OpenStandalone(dev, kvstore.Config{Format: true, UUID: [16]byte{5}, HashSeed: 3})
	if err != nil {
		t.Fatal(err)
	}
	done := make(sink, 100)
	var b partition.Batch
	for i := range cap(done) {
		r := &partition.Request{Sink: done, Op: kvstore.Put, Value: bytes.Repeat(fmt.Appendf(nil, "value %d ", i), 50)}
		r.KeyLen = uint8(copy(r.Key[:], fmt.Sprintf("key %d", i)))
		b.Add(r)
	}
	p.Submit(&b)
	for range cap(done) {
		if r := <-done; r.Status != kvstore.OK {
			t.Fatalf("status %d", r.Status)
		}
	}
	if err := p.Close(20 * time.Second); err != nil {
		t.Fatal(err)
	}
	if err := dev.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

type sink chan *partition.Request

func (s sink) KVDone(r *partition.Request) bool {
	s <- r
	return false
}

func (s sink) Kick() {}

// TestKVCheckOfADrive: a sound one is sound, a damaged one names the key, and neither is changed. One that somebody has
// open is refused.
func TestKVCheckOfADrive(t *testing.T) {
	path := kvDrive(t)
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if code, out, errs := run(t, "kv", "check", path); code != 0 || !strings.Contains(out, "sound") {
		t.Errorf("a sound drive: %d, %s%s", code, out, errs)
	}
	at := bytes.Index(before, []byte("value 42 value 42 "))
	before[at+7]++
	if err := os.WriteFile(path, before, 0o600); err != nil {
		t.Fatal(err)
	}
	code, out, errs := run(t, "kv", "check", "-o", "json", path)
	var a kvCheckAnswer
	if err := json.Unmarshal([]byte(out), &a); err != nil || code != exitNotReady || len(a.Items) != 1 ||
		a.Items[0].State != "damaged" || a.Items[0].DamagedValues != 1 || a.Items[0].Objects != 100 ||
		len(a.Items[0].DamagedKeys) != 1 || a.Items[0].DamagedKeys[0] != "key 42" {
		t.Errorf("a damaged drive: %d, %v, %s%s", code, err, out, errs)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, before) {
		t.Errorf("the check has changed the drive: %v", err)
	}
	dev, err := openDrive(path, false)
	if err != nil {
		t.Fatal(err)
	}
	if code, _, errs := run(t, "kv", "check", path); code != exitFailed || !strings.Contains(errs, "in use") ||
		!strings.Contains(errs, "kv check UUID") {
		t.Errorf("a drive that is open: %d, %s", code, errs)
	}
	if err := dev.Close(); err != nil {
		t.Fatal(err)
	}
	if code, _, errs := run(t, "kv", "check", path+".none"); code != exitUsage ||
		!strings.Contains(errs, "nor a path") {
		t.Errorf("no drive: %d, %s", code, errs)
	}
}

// TestKVCheckOfALabelledDriveWithoutKeys says that there is none.
func TestKVCheckOfALabelledDriveWithoutKeys(t *testing.T) {
	path := drive(t, 0, "")
	if code, _, errs := run(t, "ssd", "format", "--yes", path); code != 0 {
		t.Fatal(errs)
	}
	if code, out, errs := run(t, "kv", "check", path); code != 0 || !strings.Contains(out, "no key-value namespace") {
		t.Errorf("%d, %s%s", code, out, errs)
	}
}

// TestKVCheckOfWhatIsNoDrive: it fails, as there is nothing that could be lost, and names the path.
func TestKVCheckOfWhatIsNoDrive(t *testing.T) {
	random := make([]byte, 8<<20)
	chacha := rand.NewChaCha8([32]byte{1})
	_, _ = chacha.Read(random)
	for _, c := range []struct {
		name, says string
		data       []byte
	}{
		{"a text", "no label of jbofd and no store", bytes.Repeat([]byte("some text\n"), 700)},
		{"a short text", "no label of jbofd and no store", []byte("some text")},
		{"random bytes", "no label of jbofd and no store", random},
		{"nothing", "is empty", nil},
		{"a blank drive", "blank", make([]byte, 8<<20)},
	} {
		path := filepath.Join(t.TempDir(), "README.md")
		if err := os.WriteFile(path, c.data, 0o600); err != nil {
			t.Fatal(err)
		}
		code, out, errs := run(t, "kv", "check", path)
		if code != exitFailed || !strings.Contains(errs, path) || !strings.Contains(errs, c.says) ||
			strings.Contains(errs, "repair") {
			t.Errorf("%s: %d, %s%s", c.name, code, out, errs)
		}
	}
	path := kvDrive(t)
	if err := os.WriteFile(path, append(make([]byte, 4096), must(os.ReadFile(path))[4096:]...), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, errs := run(t, "kv", "check", path); code == exitFailed {
		t.Errorf("a store whose first superblock is gone: %d, %s%s", code, out, errs)
	}
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

// TestAPartitionOfAClusterIsNotRepairedByHand: check does not lead to a command that is refused, and repair is refused
// before it asks.
func TestAPartitionOfAClusterIsNotRepairedByHand(t *testing.T) {
	for _, replicated := range []bool{false, true} {
		s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == admin.PathSubsystems {
				_ = json.NewEncoder(w).Encode(admin.List[admin.Subsystem]{Items: []admin.Subsystem{{
					Namespaces: []admin.Namespace{{UUID: uuid, Replicated: replicated}}}}})
				return
			}
			_ = json.NewEncoder(w).Encode(answers[r.URL.Path])
		}))
		code, _, errs := run(t, "kv", "check", uuid, "--socket", s)
		if code != 3 || strings.Contains(errs, "kv repair") == replicated || !strings.Contains(errs, "are lost") {
			t.Errorf("check, replicated %v: exit status %d, %s", replicated, code, errs)
		}
		code, _, errs = run(t, "kv", "repair", uuid, "--socket", s)
		if strings.Contains(errs, "partition of the cluster") != replicated || code == 0 {
			t.Errorf("repair, replicated %v: exit status %d, %s", replicated, code, errs)
		}
	}
}
