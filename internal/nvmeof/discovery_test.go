package nvmeof_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
)

// manySubsystems is a state with n subsystems, of which hostA may use every second.
func manySubsystems(n int) nvmeof.State {
	s := testState()
	s.Referrals = []nvmeof.Port{{ID: 9, TRTYPE: nvme.TRTYPETCP, ADRFAM: nvme.ADRFAMIPv4, Address: "192.0.2.99",
		Service: "8009", NQN: nvme.DiscoveryNQN}}
	s.Subsystems = nil
	for i := range n {
		sub := nvmeof.SubsystemState{NQN: fmt.Sprintf("nqn.2026-11.example.jbofd:s%d", i), Serial: "S", Model: "m",
			Hosts: []string{hostB}}
		if i%2 == 0 {
			sub.Hosts = append(sub.Hosts, hostA)
		}
		s.Subsystems = append(s.Subsystems, sub)
	}
	return s
}

// readLog reads n bytes of the discovery log from an offset on.
func (r *rig) readLog(d *nvmeof.Controller, from, n uint64) []byte {
	_, data := r.must(d, getLog(nvme.LIDDiscovery, n, func(g *nvme.GetLogSQE) { g.SetLPO(from) }), nil)
	return data
}

func TestPiecesOfTheDiscoveryLogMakeTheWhole(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	r := newRig(t)
	r.target.Apply(manySubsystems(20))
	d := r.connect(hostA, nvme.DiscoveryNQN)
	const size = 1024 * (1 + 2 + 10*2 + 1) // the header, two ports, two paths to each of ten subsystems, the referral
	whole := r.readLog(d, 0, size+4096)
	if n := nvme.DiscoveryLog(whole).Header().NUMREC(); 1024*(1+n) != size {
		t.Fatalf("%d records", n)
	}
	if !bytes.Equal(whole[size:], make([]byte, 4096)) {
		t.Error("behind its end the log is not zero")
	}
	for range 300 {
		from, n := uint64(rng.IntN(size/4+1)*4), uint64(4*(1+rng.IntN(2000)))
		if got, want := r.readLog(d, from, n),
			whole[from:min(from+n, uint64(len(whole)))]; !bytes.Equal(got[:len(want)], want) {
			t.Fatalf("%d bytes from %d differ", n, from)
		}
	}
	reply, _ := r.do(d, 0, getLog(nvme.LIDDiscovery, 4, func(g *nvme.GetLogSQE) { g.SetLPO(size + 4) }), nil)
	wantStatus(t, "beyond the end", reply.Status, nvme.InvalidField|nvme.DNR)
}

func TestTheDiscoveryLogIsThatOfTheStateInForce(t *testing.T) {
	r := newRig(t)
	r.target.Apply(manySubsystems(20))
	d := r.connect(hostA, nvme.DiscoveryNQN)
	records := func() uint64 { return nvme.DiscoveryLog(r.readLog(d, 0, 1024)).Header().NUMREC() }
	if n := records(); n != 2+10*2+1 {
		t.Errorf("%d records", n)
	}
	r.target.Apply(manySubsystems(4))
	if n := records(); n != 2+2*2+1 {
		t.Errorf("%d records with fewer subsystems", n)
	}
	last := r.readLog(d, 1024*(2+4), 1024)
	if nqn := (*nvme.DiscoveryEntry)(last).SubNQN(); nqn != "nqn.2026-11.example.jbofd:s2" {
		t.Errorf("the last way leads to %q", nqn)
	}
}

// Hosts read the log in pieces of 4 KiB, under the lock that every Connect takes.
func TestAPieceOfTheDiscoveryLogCostsNoMoreInALongLog(t *testing.T) {
	r := newRig(t)
	r.target.Apply(manySubsystems(2000))
	d := r.connect(hostA, nvme.DiscoveryNQN)
	sqe := getLog(nvme.LIDDiscovery, 4096, func(g *nvme.GetLogSQE) { g.SetLPO(1 << 20) })
	sqe.SetPSDT(nvme.PSDTSGL)
	args := nvmeof.AdminArgs{Controller: d, SQE: sqe, Data: make([]byte, 4096)}
	var before, after runtime.MemStats
	const n = 200
	r.target.Admin(r.now, args)
	runtime.ReadMemStats(&before)
	for range n {
		if reply := r.target.Admin(r.now, args); !reply.Status.OK() {
			t.Fatal(reply.Status)
		}
	}
	runtime.ReadMemStats(&after)
	if each := (after.TotalAlloc - before.TotalAlloc) / n; each > 16<<10 {
		t.Errorf("4 KiB of a log of 2 MiB allocate %d bytes", each)
	}
}
