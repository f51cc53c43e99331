package connection

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"jbofd/internal/telemetry"
)

var seedFlag = flag.Uint64("seed", 0, "seed of random tests; 0: a new one")

func random(t *testing.T) *rand.Rand {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("-seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

func TestPeersOfOneIPv6NetworkShareABudget(t *testing.T) {
	for from, want := range map[string]string{
		"192.0.2.7": "192.0.2.7", "::ffff:192.0.2.7": "192.0.2.7", "2001:db8::1:2:3:4": "2001:db8::",
		"fe80::1%eth0": "fe80::",
	} {
		if got := PeerOf(netip.MustParseAddr(from)); got != netip.MustParseAddr(want) {
			t.Errorf("%s counts as %s, want %s", from, got, want)
		}
	}
	if got := PeerOf(netip.Addr{}); got.IsValid() {
		t.Errorf("no address counts as %s", got)
	}
}

// For any order of calls the bounds hold, an address loses no connection because of other addresses unless it has the
// largest number, and in the end all counts are zero.
func TestAdmissionKeepsItsBounds(t *testing.T) {
	rng := random(t)
	limits := AdmissionLimits{Connections: 12, PerHost: 5, Pending: 9, PendingPerAddress: 4}
	a := NewAdmission(limits, telemetry.New(telemetry.Options{}))
	type conn struct {
		*Ticket
		from              netip.Addr
		shut, established bool
	}
	var conns []*conn
	pendingOf := func() map[netip.Addr]int {
		n := map[netip.Addr]int{}
		for _, c := range conns {
			if !c.shut && !c.established {
				n[c.from]++
			}
		}
		return n
	}
	for range 20000 {
		switch k := rng.IntN(10); {
		case k < 4:
			c := &conn{from: netip.AddrFrom4([4]byte{10, 0, 0, byte(rng.IntN(6))})}
			before := pendingOf()
			var victim netip.Addr
			c.Ticket = a.Enter(c.from, func(string) { c.shut = true })
			conns = append(conns, c)
			for from, n := range before {
				if now := pendingOf()[from]; from != c.from && now < n {
					victim = from
				}
			}
			for from, n := range before {
				if victim.IsValid() && n > before[victim] {
					t.Fatalf("%s with %d connections made room although %s has %d", victim, before[victim], from, n)
				}
			}
		case len(conns) == 0:
		case k < 8:
			c := conns[rng.IntN(len(conns))]
			if c.established || c.shut {
				continue
			}
			named := rng.IntN(2) == 0
			label, _ := c.admit(fmt.Sprintf("host %t %d", named, rng.IntN(4)), named, false)
			if label == "" && rng.IntN(4) > 0 {
				c.accepted()
				c.established = true
			} else {
				c.refused()
			}
		default:
			i := rng.IntN(len(conns))
			conns[i].Close()
			conns = append(conns[:i], conns[i+1:]...)
		}
		total, established, unnamed := 0, 0, 0
		for from, n := range pendingOf() {
			total += n
			if n > limits.PendingPerAddress {
				t.Fatalf("%d pending connections of %s", n, from)
			}
		}
		hosts := map[string]int{}
		for _, c := range conns {
			if c.established {
				established++
				hosts[c.host]++
				if !c.named {
					unnamed++
				}
			}
		}
		if total != a.pending || total > limits.Pending || established != a.established ||
			established > limits.Connections || unnamed != a.unnamed || unnamed > 9 {
			t.Fatalf("%d pending (%d counted), %d established (%d), %d of them unnamed (%d)", total, a.pending,
				established, a.established, unnamed, a.unnamed)
		}
		for h, n := range hosts {
			if n > limits.PerHost || n != a.hosts[h] {
				t.Fatalf("%d connections of %s, %d counted", n, h, a.hosts[h])
			}
		}
	}
	for _, c := range conns {
		c.Close()
		c.Close() // has no effect
	}
	if a.pending+a.established+a.unnamed+len(a.hosts)+len(a.peers) != 0 {
		t.Errorf("left: %+v", a)
	}
}
