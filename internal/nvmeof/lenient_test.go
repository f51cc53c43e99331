package nvmeof_test

import (
	"strings"
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/uuid"
)

// SPDK's tools send an empty HOSTNQN by default. SPDK's target and nvmet let such a host use what any host may use.
func TestAHostWithoutNQNMayUseWhatEveryHostMayUse(t *testing.T) {
	r := newRig(t)
	c := r.connect("", open)
	reply := r.tryConnect("", open, queue(c, 1))
	if !reply.Status.OK() {
		t.Fatalf("I/O queue: %v: %s", reply.Status, reply.Reason)
	}
	if reply.Note == "" {
		t.Error("no note for the log")
	}
	r.connect("", nvme.DiscoveryNQN)
	wantStatus(t, "a subsystem for named hosts", r.tryConnect("", shut).Status, nvme.ConnectInvalidHost|nvme.DNR)
	state := testState()
	state.Subsystems[0].AllowAnyHost = false
	r.target.Apply(state)
	if got := len(r.target.Controllers()); got != 1 {
		t.Errorf("%d controllers after the subsystem was closed to unnamed hosts, want the discovery controller", got)
	}
}

func TestAHostNQNThatIsNotUTF8IsAcceptedWhereEveryHostIs(t *testing.T) {
	r := newRig(t)
	reply := r.tryConnect("nqn.2026-11.example:\xff\xfe", open)
	if !reply.Status.OK() || !strings.Contains(reply.Note, "UTF-8") {
		t.Errorf("%v, note %q", reply.Status, reply.Note)
	}
}

// The targets nvmet and SPDK do not compare the host identifier of an I/O queue with that of its admin queue.
func TestAnIOQueueWithAnotherHostIdentifierIsAcceptedAndTheAdminQueuesCounts(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	before := c.HostID
	reply := r.tryConnect(hostA, open, queue(c, 1), func(a *args) { a.data.SetHostID(uuid.UUID{9}) })
	if !reply.Status.OK() {
		t.Fatalf("%v: %s", reply.Status, reply.Reason)
	}
	if !strings.Contains(reply.Note, uuid.UUID{9}.String()) {
		t.Errorf("note %q does not name the identifier", reply.Note)
	}
	if c.HostID != before {
		t.Errorf("the controller's host identifier became %v", c.HostID)
	}
	if same := r.tryConnect(hostA, open, queue(c, 2)); !same.Status.OK() || same.Note != "" {
		t.Errorf("a queue with the same identifier: %v, note %q", same.Status, same.Note)
	}
}

// An association belongs to one transport, because Identify Controller announces the SGLs and capsule sizes of the
// admin queue's transport.
func TestAnIOQueueOverAnotherTransportThanItsAdminQueueIsRefused(t *testing.T) {
	r := newRig(t)
	c := r.connect(hostA, open)
	reply := r.tryConnect(hostA, open, queue(c, 1), func(a *args) { a.port.TRTYPE = nvme.TRTYPERDMA })
	wantStatus(t, "over RDMA", reply.Status, nvme.ConnectInvalidParameters|nvme.DNR)
	if other := r.tryConnect(hostA, open, queue(c, 1), func(a *args) { a.port = fixedPort }); !other.Status.OK() {
		t.Errorf("over another address of the same transport: %v: %s", other.Status, other.Reason)
	}
}

// MQES bounds I/O queues. Linux, SPDK and the discovery log (ASQSZ) expect an admin queue of 32 entries.
func TestTheAdminQueueIsNotBoundedByTheDepthOfIOQueues(t *testing.T) {
	r := newRig(t, func(c *nvmeof.Config) { c.MaxEntries = 3 })
	c := r.connect(hostA, open) // 32 entries
	reply := r.tryConnect(hostA, open, queue(c, 1))
	wantStatus(t, "an I/O queue of 32 entries", reply.Status, nvme.ConnectInvalidParameters|nvme.DNR)
	reply = r.tryConnect(hostA, open, func(a *args) { a.c.SetSQSIZE(200) })
	wantStatus(t, "an admin queue of 201 entries", reply.Status, nvme.ConnectInvalidParameters|nvme.DNR)
}

// MDTS is a power of two in units of 4 KiB, and 0 says that there is no limit.
func TestMDTSIsNeverAnnouncedAsNoLimit(t *testing.T) {
	for limit := uint32(8 << 10); limit <= 16<<20; limit *= 2 {
		r := newRig(t, func(c *nvmeof.Config) { c.Limits.MDTSBytes = limit })
		_, data := r.must(r.connect(hostA, open), identify(nvme.CNSController, 0), nil)
		if got := uint64(4096) << (*nvme.IdentifyController)(data).MDTS(); got != uint64(limit) {
			t.Errorf("a limit of %d bytes is announced as %d", limit, got)
		}
	}
	defer func() {
		if recover() == nil {
			t.Error("a target with a limit of 4 KiB, which MDTS cannot say, was made")
		}
	}()
	newRig(t, func(c *nvmeof.Config) { c.Limits.MDTSBytes = 4 << 10 })
}
