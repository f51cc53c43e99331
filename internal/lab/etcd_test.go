package lab

import (
	"testing"
	"time"
)

func someEtcd() (*Sim, *Etcd) {
	s := NewSim(1)
	return s, NewEtcd(s, EtcdConfig{MinDelayNS: int64(time.Millisecond), MaxDelayNS: int64(5 * time.Millisecond),
		TimeoutNS: int64(time.Second)})
}

func put(key string, revision int64, value string, lease int64) EtcdRequest {
	return EtcdRequest{Txn: true, If: []EtcdKey{{Key: key, Revision: revision}},
		Then: []EtcdKey{{Key: key, Value: []byte(value), Lease: lease}}}
}

// TestEtcdComparesRevisions lets two clients write a key from the same revision: one of them wins.
func TestEtcdComparesRevisions(t *testing.T) {
	s, e := someEtcd()
	done := 0
	for range 2 {
		e.NewClient().Do(put("k", 0, "v", 0), func(r EtcdResponse) {
			if r.Err != nil {
				t.Error(r.Err)
			}
			if r.Done {
				done++
			}
		})
	}
	s.Run(int64(time.Second), func() bool { return false })
	if done != 1 || e.Key("k").Revision != 2 {
		t.Errorf("%d writes are done, the revision is %d", done, e.Key("k").Revision)
	}
}

// TestEtcdRevokesLeasesThatEnd keeps a lease, and then does not.
func TestEtcdRevokesLeasesThatEnd(t *testing.T) {
	s, e := someEtcd()
	second := int64(time.Second)
	lease := e.Apply(EtcdRequest{TTLNS: second}).Lease
	e.Apply(put("k", 0, "v", lease))
	for range 5 {
		s.Run(second/2, func() bool { return false })
		if !e.Apply(EtcdRequest{Renew: lease}).Done || e.Key("k").Revision == 0 {
			t.Fatal("a lease that is renewed has ended")
		}
	}
	s.Run(2*second, func() bool { return false })
	if e.Key("k").Revision != 0 || e.Apply(EtcdRequest{Renew: lease}).Done || e.Apply(put("l", 0, "v", lease)).Done {
		t.Error("a lease has not ended")
	}
}

// TestEtcdWatchesTellEverythingOrEnd watches while keys change, with a compaction: no change is left out before the
// end.
func TestEtcdWatchesTellEverythingOrEnd(t *testing.T) {
	s, e := someEtcd()
	c := e.NewClient()
	var last int64 = 1
	ended := false
	watch := func(from int64) {
		c.Watch(from, func(changes []EtcdKey, end bool) {
			ended = ended || end
			for _, k := range changes {
				if k.Revision > last+1 {
					t.Errorf("revision %d is told after %d", k.Revision, last)
				}
				last = max(last, k.Revision)
			}
		})
	}
	watch(2)
	for range 50 {
		e.Apply(EtcdRequest{Txn: true, Then: []EtcdKey{{Key: "k"}}})
		s.Run(int64(time.Millisecond), func() bool { return false })
	}
	s.Run(int64(time.Second), func() bool { return false })
	if last != e.Revision() || ended {
		t.Fatalf("revision %d of %d was told last", last, e.Revision())
	}
	e.Compact()
	watch(5)
	s.Run(int64(time.Second), func() bool { return false })
	if !ended {
		t.Error("a watch of what is compacted has not ended")
	}
}

// TestEtcdStallsAndCuts looks at requests while etcd stalls and while the client is cut off.
func TestEtcdStallsAndCuts(t *testing.T) {
	s, e := someEtcd()
	c := e.NewClient()
	second := int64(time.Second)
	var errs, done int
	count := func(r EtcdResponse) {
		if r.Err != nil {
			errs++
		} else {
			done++
		}
	}
	e.Stall(2 * second)
	c.Do(put("k", 0, "v", 0), count)
	s.Run(3*second, func() bool { return false })
	if errs != 1 || e.Key("k").Revision == 0 {
		t.Errorf("%d errors; the request has not taken effect after the stall", errs)
	}
	c.Cut(true)
	c.Do(put("l", 0, "v", 0), count)
	s.Run(3*second, func() bool { return false })
	if errs != 2 || done != 0 || e.Key("l").Revision != 0 {
		t.Errorf("%d errors, %d done", errs, done)
	}
}
