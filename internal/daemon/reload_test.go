package daemon

import (
	"slices"
	"strings"
	"testing"

	"jbofd/internal/admin"
)

func TestAReloadSaysWhatItHasChanged(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{memSSD}, []string{"{nsid: 2, ssd: ssd0, size: 1MiB}", "{nsid: 1, ssd: ssd0, size: 16MiB}"})
	n := w.mustStart()
	w.configure([]string{memSSD}, []string{"{nsid: 1, ssd: ssd0, size: 17MiB}", "{nsid: 3, ssd: ssd0, size: 2MiB}"},
		"log: {level: debug}")
	want := []admin.Change{{What: "log level", Name: "debug"},
		{What: "namespace added", Name: nqn, NSID: 3, SizeBytes: 2 << 20},
		{What: "namespace removed", Name: nqn, NSID: 2, SizeBytes: 1 << 20},
		{What: "namespace grown", Name: nqn, NSID: 1, SizeBytes: 17 << 20}}
	before := n.extents()
	for _, dry := range []bool{true, true, false} {
		ask := n.admin.Reload
		if dry {
			ask = n.admin.DryReload
		}
		got, err := ask(t.Context())
		if err != nil || got.DryRun != dry || got.APIVersion != admin.Version || !slices.Equal(got.Changes, want) {
			t.Fatalf("dry %v: %+v, %v", dry, got, err)
		}
		if dry && !slices.Equal(n.extents(), before) {
			t.Fatalf("a dry run has changed the drives: %v, before %v", n.extents(), before)
		}
	}
	if got, err := n.admin.Reload(t.Context()); err != nil || got.Changes == nil || len(got.Changes) != 0 {
		t.Errorf("a second reload: %+v, %v", got, err)
	}
}

// TestADryRunKnowsEverythingThatAReloadRefuses compares the two for every kind of configuration that is refused.
func TestADryRunKnowsEverythingThatAReloadRefuses(t *testing.T) {
	w, log := newWorld(t), &lines{}
	w.log = log
	ssds := []string{memSSD, strings.Replace(fileSSD, "64MiB", "256MiB", 1)}
	good := []string{"{nsid: 1, ssd: ssd0, size: 16MiB}"}
	w.configure(ssds, good)
	n := w.mustStart()
	// The extent of a removed namespace still exists, with its size and format.
	w.configure(ssds, append(good, "{nsid: 9, ssd: ssd1, size: 16MiB}"))
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.configure(ssds, good)
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		ssds, namespaces, more []string
		want                   string
	}{
		"not valid":       {ssds, []string{"{nsid: 1, ssd: none, size: 16MiB}"}, nil, `"none" is no ssd`},
		"no YAML":         {ssds, []string{"{"}, nil, "not valid YAML"},
		"needs a restart": {ssds, good, []string{"limits: {io_queues: 3}"}, "needs a restart"},
		"another drive":   {ssds[:1], good, nil, "needs a restart"},
		"shrinks": {ssds, []string{"{nsid: 1, ssd: ssd0, size: 8MiB}"}, nil,
			"less than the present 16MiB"},
		"no room on the drive": {ssds, append(slices.Clone(good), "{nsid: 2, ssd: ssd1, size: 250MiB}"), nil,
			"subsystems[0].namespaces[1]: subsystem " + nqn + ", namespace 2: ssd ssd1: no room on the drive: " +
				"250MiB wanted"},
		"other type on label": {ssds, append(slices.Clone(good), "{nsid: 9, ssd: ssd1, size: 64MiB, type: kv}"), nil,
			"label says type block"},
		"other block on label": {ssds,
			append(slices.Clone(good), "{nsid: 9, ssd: ssd1, size: 16MiB, block_size: 512}"), nil, "block_size 512"},
		"shrinks on label": {ssds, append(slices.Clone(good), "{nsid: 9, ssd: ssd1, size: 8MiB}"), nil,
			"cannot shrink"},
		"another uuid on label": {ssds, append(slices.Clone(good),
			"{nsid: 9, ssd: ssd1, size: 16MiB, uuid: 0425d6c3-77cf-4e62-873e-0484d7ac5274}"), nil, "uuid"},
		"another uuid than it has": {ssds,
			[]string{"{nsid: 1, ssd: ssd0, size: 16MiB, uuid: 0425d6c3-77cf-4e62-873e-0484d7ac5274}"}, nil,
			"the namespace was made with"},
		"nobody may use it": {ssds, good, []string{"subsystems: [{nqn: " + nqn + "}]"}, "no host may connect"},
		"tenants with one host": {ssds, good, []string{"tenants: [{name: a, hosts: [h]}, {name: b, hosts: [h]}]"},
			"given twice"},
		"a referral to nowhere": {ssds, good,
			[]string{`discovery: {address: "127.0.0.1:0", referrals: [{address: "0.0.0.0:0"}]}`},
			"cannot be connected to"},
		"an unknown environment": {ssds, good, []string{"log: {levle: info}"}, "unknown key"},
	} {
		t.Run(name, func(t *testing.T) {
			w.configure(c.ssds, c.namespaces, c.more...)
			before, refused := n.extents(), len(log.with("reload refused"))
			_, dry := n.admin.DryReload(t.Context())
			if got := len(log.with("reload refused")); got != refused {
				t.Error("a dry run is logged as a refused reload")
			}
			_, wet := n.admin.Reload(t.Context())
			if dry == nil || wet == nil || dry.Error() != wet.Error() || !strings.Contains(wet.Error(), c.want) {
				t.Errorf("a dry run says\n%v\na reload\n%v\nwant one about %q", dry, wet, c.want)
			}
			if got := log.with("reload refused"); len(got) != refused+1 ||
				!strings.Contains(got[len(got)-1], `source="admin socket"`) {
				t.Errorf("%d lines about refused reloads, before %d: %q", len(got), refused, got)
			}
			if !slices.Equal(n.extents(), before) {
				t.Error("a refused reload has changed the drives")
			}
		})
	}
}

// TestTheUUIDOfANamespaceCanBeWrittenDown: an operator who copies it into the configuration changes nothing.
func TestTheUUIDOfANamespaceCanBeWrittenDown(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{memSSD}, []string{"{nsid: 1, ssd: ssd0, size: 16MiB}"})
	n := w.mustStart()
	subs, err := n.admin.Subsystems(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.configure([]string{memSSD}, []string{"{nsid: 1, ssd: ssd0, size: 16MiB, uuid: " +
		subs.Items[0].Namespaces[0].UUID + "}"})
	if got, err := n.admin.Reload(t.Context()); err != nil || len(got.Changes) != 0 {
		t.Errorf("%+v, %v", got, err)
	}
	if again, err := n.admin.Subsystems(t.Context()); err != nil ||
		again.Items[0].Namespaces[0].UUID != subs.Items[0].Namespaces[0].UUID {
		t.Errorf("%+v, %v, before %+v", again, err, subs)
	}
}

// TestADryRunOfAKeyValueNamespaceLeavesNothing: the dry run must not open or format a store, and a reload after it
// still can.
func TestADryRunOfAKeyValueNamespaceLeavesNothing(t *testing.T) {
	w := newWorld(t)
	ssds := []string{"{name: ssd0, backend: mem, size: 256MiB}"}
	w.configure(ssds, nil)
	n := w.mustStart()
	w.configure(ssds, []string{"{nsid: 1, ssd: ssd0, size: 64MiB, type: kv}"})
	for range 2 {
		if got, err := n.admin.DryReload(t.Context()); err != nil || len(got.Changes) != 1 {
			t.Fatalf("%+v, %v", got, err)
		}
		if e := n.extents(); len(e) != 0 {
			t.Fatalf("extents %v", e)
		}
	}
	if _, err := n.admin.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	if e := n.extents(); len(e) != 1 {
		t.Errorf("extents %v", e)
	}
	if _, err := n.admin.DryReload(t.Context()); err != nil { // with the store open
		t.Error(err)
	}
}

// TestSizesInAnswersNameTheirUnit: programs should understand them without the documentation.
func TestSizesInAnswersNameTheirUnit(t *testing.T) {
	w := newWorld(t)
	w.configure([]string{memSSD}, []string{"{nsid: 1, ssd: ssd0, size: 16MiB, block_size: 512}"},
		"tenants: [{name: gold, hosts: [nqn.2026-11.example.jbofd:host], limits: {w_mbytes_per_sec: 3}}]")
	n := w.mustStart()
	n.connect()
	subs, err := n.admin.Subsystems(t.Context())
	if err != nil || subs.Items[0].Namespaces[0].BlockSizeBytes != 512 {
		t.Errorf("%+v, %v", subs, err)
	}
	tenants, err := n.admin.Tenants(t.Context())
	if err != nil || len(tenants.Items) != 1 {
		t.Fatalf("%+v, %v", tenants, err)
	}
	if x := tenants.Items[0]; x.WBytesPerSec != 3<<20 || x.CreditBytes != int64(x.Credit)*4096 || x.Credit == 0 {
		t.Errorf("%+v", x)
	}
}
