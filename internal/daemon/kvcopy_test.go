package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"jbofd/client"
	"jbofd/client/kv"
	"jbofd/internal/admin"
	"jbofd/internal/nvme"
)

// copied reads an export to its end.
func copied(t *testing.T, r io.Reader) (*admin.KVCopy, []nvme.KVRange, error) {
	t.Helper()
	c := admin.NewKVCopy(r)
	for all := []nvme.KVRange(nil); ; {
		b, err := c.Next()
		if errors.Is(err, io.EOF) {
			return c, all, nil
		}
		if err != nil {
			return c, all, err
		}
		all = append(all, b)
	}
}

// TestAnExportIsImported: into another namespace, twice; with what was cut off of it in between.
func TestAnExportIsImported(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{resizeSSD}, []string{"{nsid: 1, ssd: ssd0, size: 100MiB, type: kv}",
		"{nsid: 2, ssd: ssd0, size: 100MiB, type: kv}"})
	n := w.mustStart()
	ns := n.keys()
	putLarge(t, ns)
	subs, err := n.admin.Subsystems(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	id := []string{subs.Items[0].Namespaces[0].UUID, subs.Items[0].Namespaces[1].UUID}
	r, err := n.admin.ExportKV(t.Context(), id[0], nvme.KVCursor{})
	if err != nil {
		t.Fatal(err)
	}
	file, err := io.ReadAll(r)
	if err = errors.Join(err, r.Close()); err != nil {
		t.Fatal(err)
	}
	// Who imports into what is no namespace of keys hears it, although a batch is longer than what a socket holds.
	for range 3 {
		_, err := n.admin.ImportKV(t.Context(), "5d22324c-b064-46f6-8c30-2b28421d21aa", file[:1<<20])
		if !errors.Is(err, admin.ErrRefused) || !strings.Contains(err.Error(), "5d22324c") {
			t.Fatalf("an import into no namespace: %v", err)
		}
	}
	c, all, err := copied(t, bytes.NewReader(file))
	if err != nil || c.Objects != resizeKeys || !c.Complete || len(all) < 10 || c.Bytes != int64(len(file)) {
		t.Fatalf("%+v, %d batches, %v", c.KVTotals, len(all), err)
	}
	// Of the first half, cut within a batch, the rest can be had.
	half, _, err := copied(t, bytes.NewReader(file[:len(file)/2]))
	if !errors.Is(err, admin.ErrKVCopy) || !errors.Is(err, io.ErrUnexpectedEOF) || half.Complete {
		t.Fatalf("half of it: %+v, %v", half.KVTotals, err)
	}
	if r, err = n.admin.ExportKV(t.Context(), id[0], half.To()); err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	rest := half.Follow(r)
	for err = error(nil); err == nil; {
		_, err = rest.Next()
	}
	if !errors.Is(err, io.EOF) || rest.Objects != resizeKeys || rest.ValueBytes != c.ValueBytes {
		t.Errorf("the rest: %+v, %v", rest.KVTotals, err)
	}
	// Not with the other namespace.
	if r, err = n.admin.ExportKV(t.Context(), id[1], half.To()); err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := half.Follow(r).Next(); !errors.Is(err, admin.ErrOtherNamespace) {
		t.Errorf("half of it and half of another namespace: %v", err)
	}
	for round := range 2 {
		applied := 0
		for _, b := range all {
			a, err := n.admin.ImportKV(t.Context(), id[1], b)
			if err != nil {
				t.Fatal(err)
			}
			applied += a.Applied
		}
		if want := resizeKeys * (1 - round); applied != want {
			t.Errorf("import %d has stored %d objects, want %d", round, applied, want)
		}
	}
	gotLarge(t, n.keysOf(2))
	// Any flipped bit, and any batch that is left out, is found.
	for at := 0; at < len(file); at += 1 + len(file)/300 {
		file[at] ^= 4
		if _, _, err := copied(t, bytes.NewReader(file)); !errors.Is(err, admin.ErrKVCopy) {
			t.Fatalf("byte %d is damaged: %v", at, err)
		}
		file[at] ^= 4
	}
	less := append(bytes.Clone(file[:len(all[0])]), file[len(all[0])+len(all[1]):]...)
	if _, _, err := copied(t, bytes.NewReader(less)); !errors.Is(err, admin.ErrKVCopy) {
		t.Errorf("a batch is missing: %v", err)
	}
	if _, err := n.admin.ExportKV(t.Context(), "0425d6c3-77cf-4e62-873e-0484d7ac5274", nvme.KVCursor{}); err == nil {
		t.Error("a namespace that there is not is exported")
	}
	damaged := bytes.Clone(all[0])
	damaged[len(damaged)-1]++
	if _, err := n.admin.ImportKV(t.Context(), id[1], damaged); err == nil {
		t.Error("a damaged batch is imported")
	}
}

// TestAnImportRestoresWhatWasDropped: an import that follows a drop at once brings the keys back. It says so if it
// cannot, because a segment that cannot be read keeps the drop.
func TestAnImportRestoresWhatWasDropped(t *testing.T) {
	defer func(d time.Duration) { dropPatience = d }(dropPatience)
	const keys = 300
	name := func(i int) []byte { return fmt.Appendf(nil, "name of key %04d", i) }
	w := newWorld(t)
	w.configure([]string{fastSource}, []string{"{nsid: 1, ssd: ssd0, size: 64MiB, type: kv}"})
	n := w.mustStart()
	ns := n.keys()
	for i := range keys {
		if err := ns.Put(t.Context(), name(i), []byte("value")); err != nil {
			t.Fatal(err)
		}
	}
	id := n.kvInfo().UUID
	r, err := n.admin.ExportKV(t.Context(), id, nvme.KVCursor{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	_, all, err := copied(t, r)
	if err != nil || len(all) != 1 {
		t.Fatalf("%d batches, %v", len(all), err)
	}
	drop := func() {
		t.Helper()
		if _, err := ns.DropRange(t.Context(), kv.All(), 0); err != nil {
			t.Fatal(err)
		}
	}
	imports := func() {
		t.Helper()
		if a, err := n.admin.ImportKV(t.Context(), id, all[0]); err != nil || a.Applied != keys {
			t.Fatalf("%d of %d keys are imported: %v", a.Applied, keys, err)
		}
		for i := range keys {
			if got, err := ns.Value(t.Context(), name(i)); err != nil || string(got) != "value" {
				t.Fatalf("key %d: %q, %v", i, got, err)
			}
		}
	}
	drop()
	imports()
	// The record of a segment is damaged, so that the drop cannot be cleared there. The store may still write it to
	// another place in the background, so an audit says whether that was the one that counts.
	image, err := os.OpenFile(w.path("ssd0.img"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	for damaged := false; !damaged; {
		whole, err := os.ReadFile(w.path("ssd0.img"))
		if err != nil {
			t.Fatal(err)
		}
		for at := 0; ; at++ {
			i := bytes.Index(whole[at:], name(7))
			if i < 0 {
				break
			}
			at += i
			if _, err := image.WriteAt([]byte("?"), int64(at)); err != nil {
				t.Fatal(err)
			}
		}
		a, err := n.admin.AuditKV(t.Context(), id, false)
		if err != nil {
			t.Fatal(err)
		}
		damaged = a.LossySegments > 0
	}
	drop()
	dropPatience = 0
	if _, err := n.admin.ImportKV(t.Context(), id, all[0]); err == nil || !strings.Contains(err.Error(), "repeat") ||
		!strings.Contains(err.Error(), "jbofctl kv repair") {
		t.Errorf("an import while a drop cannot end: %v", err)
	}
	if a, err := n.admin.AuditKV(t.Context(), id, true); err != nil || a.RepairedSegments == 0 {
		t.Fatalf("a repair: %+v, %v", a, err)
	}
	dropPatience = time.Minute
	imports()
}

// TestABlockNamespaceIsNotTakenForAnAbsentOne, by an export, an import or an audit.
func TestABlockNamespaceIsNotTakenForAnAbsentOne(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{memSSD}, []string{"{nsid: 1, ssd: ssd0, size: 16MiB}"})
	n := w.mustStart()
	subs, err := n.admin.Subsystems(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	id := subs.Items[0].Namespaces[0].UUID
	_, exported := n.admin.ExportKV(t.Context(), id, nvme.KVCursor{})
	_, imported := n.admin.ImportKV(t.Context(), id, nil)
	_, audited := n.admin.AuditKV(t.Context(), id, false)
	for _, err := range []error{exported, imported, audited} {
		if err == nil || !strings.Contains(err.Error(), "namespace "+id+" is of type block; must be kv") {
			t.Errorf("%v", err)
		}
	}
}

// keysOf opens another namespace.
func (n *node) keysOf(nsid uint32) *kv.Namespace {
	n.w.t.Helper()
	c, err := client.Connect(n.w.t.Context(), client.Options{Address: n.addrs.Listeners[0], SubNQN: nqn,
		HostNQN: "nqn.2026-11.example.jbofd:host"})
	if err != nil {
		n.w.t.Fatal(err)
	}
	n.w.t.Cleanup(func() {
		if err := c.Close(); err != nil {
			n.w.t.Error(err)
		}
	})
	ns, err := kv.Open(n.w.t.Context(), c, nsid, kv.Options{})
	if err != nil {
		n.w.t.Fatal(fmt.Errorf("namespace %d: %w", nsid, err))
	}
	return ns
}
