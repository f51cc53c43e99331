package e2e

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

// swapSetup has key-value namespaces on two drives, of which one is slow. Both drives have swap areas.
var swapSetup = setup{
	ssds: `  - {name: ssd0, backend: file, path: "@DIR@/ssd0.img", size: 240MiB, create: true, kv_swap: 32MiB,
      fault: {delay: 5ms, delay_probability: 1}}
  - {name: ssd1, backend: file, path: "@DIR@/ssd1.img", size: 192MiB, create: true, kv_swap: 64MiB}
`,
	subsystems: `  - nqn: nqn.2026-11.example.jbofd:a
    allow_any_host: true
    namespaces:
      - {nsid: 2, ssd: ssd0, size: 160MiB, type: kv}
      - {nsid: 3, ssd: ssd1, size: 64MiB, type: kv}
`}

// swapArea is the part of the answer to GET /v1/swap that the test uses.
type swapArea struct {
	Items []struct {
		UUID, SSD, State string
		UsedBytes        int64
		Sources          []struct {
			NSID uint32
			Open bool
			Keys int
		}
	}
}

// TestSwappingUnderYCSB: an overloaded drive swaps writes to another drive. Repeated kill -9 in the middle loses no
// value and brings back no old value, and after a stop all keys are in their source partition.
func TestSwappingUnderYCSB(t *testing.T) {
	t.Parallel()
	d := start(t, swapSetup)
	rng := random(t)
	const workload = "readproportion=0.2\nupdateproportion=0.8\nrequestdistribution=zipfian\n" +
		"fieldcount=1\nfieldlength=700\nrecordcount=4000\nthreadcount=4\n"
	b, hold := openYCSB(t, d, workload, 7, 64, rng.Uint64())
	p, err := b.Load(ctx(t))
	hold("load", p, err)
	quick := openKV(t, d.connect(d.options(hostB, nqnA)), 3)
	kills, killedOut, found, swapped := 0, 0.0, false, 0.0
	done := make(chan struct{})
	go func() {
		defer close(done)
		p, err = b.Run(ctx(t))
	}()
	for running := true; running; {
		select {
		case <-done:
			running = false
		case <-time.After(time.Duration(900+rng.IntN(700)) * time.Millisecond):
			if err := quick.Put(ctx(t), []byte("kills"), value("kills", kills, 5000)); err != nil {
				t.Error(err)
			}
			m := d.scrape()
			out := sum(m["jbof_kv_swap_keys"])
			swapped += sum(m["jbof_kv_swap_writes_total"])
			d.kill()
			d.launch()
			if got, err := quick.Value(ctx(t), []byte("kills")); err != nil ||
				!bytes.Equal(got, value("kills", kills, 5000)) {
				t.Errorf("on the quick drive: %v, %d bytes", err, len(got))
			}
			kills++
			killedOut += out
			for _, l := range d.log.find("key-value store opened") {
				found = found || !strings.Contains(l, "swapped=0 ")
			}
		}
	}
	hold("run", p, err)
	swapped += d.metric("jbof_kv_swap_writes_total")
	q, err := b.Verify(ctx(t))
	hold("verify", q, err)
	t.Logf("%d kills with %.0f keys in the swap area, %d operations in %.1f s, %.0f writes swapped", kills, killedOut,
		p.Operations, p.ElapsedSeconds, swapped)
	if kills == 0 || killedOut == 0 || !found || swapped < 100 || p.Operations < 1000 {
		t.Error("too little to say anything")
	}
	var areas swapArea
	if err := d.admin("GET", "/v1/swap", &areas); err != nil {
		t.Fatal(err)
	}
	if len(areas.Items) != 2 || areas.Items[0].SSD != "ssd0" || areas.Items[1].SSD != "ssd1" ||
		areas.Items[1].State != "open" {
		t.Fatalf("areas %+v", areas)
	}
	area := areas.Items[1].UUID
	if took := d.term(); took > stopLimit {
		t.Errorf("SIGTERM: stopped after %v, the limit is %v", took, stopLimit)
	}
	d.launch()
	if keys := d.metric("jbof_kv_swap_keys"); keys != 0 {
		t.Errorf("after a stop %v keys are not at home", keys)
	}
	if err := d.admin("GET", "/v1/swap", &areas); err != nil {
		t.Fatal(err)
	}
	if len(areas.Items) != 2 || areas.Items[1].UUID != area ||
		len(areas.Items[0].Sources)+len(areas.Items[1].Sources) != 0 {
		t.Errorf("after a stop: areas %+v", areas)
	}
	q, err = b.Verify(ctx(t))
	hold("verify after a stop", q, err)
	if up := d.metric("jbof_kv_swap_area_up", "ssd", "ssd1"); up != 1 {
		t.Errorf("jbof_kv_swap_area_up is %v", up)
	}
}
