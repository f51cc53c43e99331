package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"jbofd/internal/admin"
	"jbofd/internal/testutil/etcdproc"
	"jbofd/internal/testutil/loopback"
)

// TestANamespaceThatHasLostWritesIsOpenedByTheOperatorsWord: the daemon dies, and the drive damages a record of the key
// log. The namespace is left out and says what is lost. It is opened when that is accepted, and at every later start.
func TestANamespaceThatHasLostWritesIsOpenedByTheOperatorsWord(t *testing.T) {
	const keys, lost = 300, 150
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
	n.dieDamaged(name(lost))
	n = w.mustStart()
	info := n.kvInfo()
	if info.Loss == nil || info.Loss.MissingSegments == 0 || info.Loss.FoundSegments < keys/2 ||
		!strings.Contains(info.Error, "jbofctl kv open "+info.UUID) || strings.Contains(info.Error, "delete") {
		t.Fatalf("the namespace says %q, %+v", info.Error, info.Loss)
	}
	if s, err := n.admin.Status(t.Context()); err != nil || s.Ready {
		t.Errorf("the node is ready: %+v, %v", s, err)
	}
	for _, x := range []struct{ uuid, accept string }{{info.UUID, "another loss"}, {info.UUID, ""},
		{"0425d6c3-77cf-4e62-873e-0484d7ac5274", info.Loss.Token}} {
		if _, err := n.admin.OpenKV(t.Context(), x.uuid, x.accept); !errors.Is(err, admin.ErrRefused) {
			t.Errorf("accepting %q of %s: %v", x.accept, x.uuid, err)
		}
	}
	if _, err := n.admin.OpenKV(t.Context(), info.UUID, info.Loss.Token); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if info := n.kvInfo(); info.Error != "" || info.Loss != nil {
			t.Errorf("the namespace says %q, %+v", info.Error, info.Loss)
		}
		if s, err := n.admin.Status(t.Context()); err != nil || !s.Ready {
			t.Errorf("the node is not ready: %+v, %v", s, err)
		}
		ns, there := n.keys(), 0
		for i := range keys {
			if got, err := ns.Value(t.Context(), name(i)); err == nil && string(got) == "value" {
				there++
			}
		}
		if there < keys/2 || there == keys {
			t.Errorf("%d of %d keys are there", there, keys)
		}
		n.mustStop()
		n = w.mustStart()
	}
}

// dieDamaged ends the node as if its daemon had died, with a key damaged wherever it is on the drive.
func (n *node) dieDamaged(key []byte) {
	n.w.t.Helper()
	image, err := os.ReadFile(n.w.path("ssd0.img")) // as the drive is when the daemon dies now
	if err != nil {
		n.w.t.Fatal(err)
	}
	n.mustStop()
	if bytes.Count(image, key) == 0 {
		n.w.t.Fatal("the key is not on the drive")
	}
	image = bytes.ReplaceAll(image, key, bytes.Repeat([]byte("?"), len(key)))
	if err := os.WriteFile(n.w.path("ssd0.img"), image, 0o600); err != nil {
		n.w.t.Fatal(err)
	}
}

// TestAPartitionThatHasLostWritesSaysWhatToDo: no command opens it, so that it must not say that kv open does.
func TestAPartitionThatHasLostWritesSaysWhatToDo(t *testing.T) {
	etcd := etcdproc.Start(t, etcdproc.Options{Host: loopback.Address()})
	w, hosts := newWorld(t), clusterHosts(1)
	w.configureNode(hosts, 0, "demo", etcd.URL, strings.Replace(onePartition, ", replicated: true", "", 1))
	n := w.mustStart()
	key := func(i int) []byte { return fmt.Appendf(nil, "a long key %05d", i) }
	ns := n.keysOf(2)
	for i := range 300 {
		if err := ns.Put(t.Context(), key(i), []byte("value")); err != nil {
			t.Fatal(err)
		}
	}
	n.dieDamaged(key(150))
	w.configureNode(hosts, 0, "demo", etcd.URL, onePartition)
	n = w.mustStart()
	got := ""
	eventually(t, "the partition was opened, in vain", func() error {
		if got = n.reason("namespace " + nqn + " 2"); !strings.Contains(got, "checkpoint") {
			return fmt.Errorf("the reason is %q", got)
		}
		return nil
	})
	for _, want := range []string{"since the last checkpoint are missing", "jbofctl namespace delete", "fills it"} {
		if !strings.Contains(got, want) || strings.Contains(got, "kv open") {
			t.Errorf("the node is not ready because %q, want %q", got, want)
		}
	}
}
