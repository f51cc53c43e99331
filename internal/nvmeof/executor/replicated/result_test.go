package replicated

import (
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/nvmeof/executor"
	"jbofd/internal/replicas"
)

// noted is a port that does nothing.
type noted struct{}

func (noted) Done(*executor.Command) bool     { return false }
func (noted) NeedData(*executor.Command) bool { return false }
func (noted) Kick()                           {}
func (noted) Deliver()                        {}

// TestARefusalTellsAnotherNodeMore: where a loss ends that a Fetch has met. Hosts are told nothing but the epoch.
func TestARefusalTellsAnotherNodeMore(t *testing.T) {
	const told = 0x1234
	for _, q := range []struct {
		kind replicas.Kind
		st   nvme.Status
		want uint64
	}{
		{replicas.Node, nvme.UnrecoveredReadError | nvme.DNR, told},
		{replicas.Node, nvme.KVWrongView, told},
		{replicas.Read, nvme.UnrecoveredReadError | nvme.DNR, 0},
		{replicas.Read, nvme.KVWrongView, told},
	} {
		c := &executor.Command{SQE: new(nvme.SQE), Plan: new(nvmeof.Plan), Port: noted{}}
		k := &command{c: c}
		k.Kind, k.Status, k.Result, k.SQE = q.kind, q.st, told, c.SQE
		if k.ReplicaDone(&k.Request); c.Result != q.want || c.Status != q.st {
			t.Errorf("kind %d, %v: result %#x, %v; want %#x", q.kind, q.st, c.Result, c.Status, q.want)
		}
	}
}
