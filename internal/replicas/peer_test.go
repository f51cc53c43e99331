package replicas

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"jbofd/internal/cluster/view"
	"jbofd/internal/nvme"
	"jbofd/internal/peers"
)

// TestWhichCommandsAreTimed: those that were done. A Forward that makes room for others, and has the mark of an earlier
// write, says nothing of the chain's latency.
func TestWhichCommandsAreTimed(t *testing.T) {
	const seq, full = 7, nvme.KVChainFull
	const forward, ship, wrongView, absent = nvme.CmdKVForward, nvme.CmdKVShip, nvme.KVWrongView,
		nvme.KeyDoesNotExist | nvme.DNR
	for what, c := range map[string]struct {
		opcode uint8
		peers.Command
		want bool
	}{
		"a Forward of a committed write":      {forward, peers.Command{Result: seq}, true},
		"of one before the mark":              {forward, peers.Command{Result: seq + 9}, true},
		"of one in a chain that is full":      {forward, peers.Command{Result: seq | full}, true},
		"a Forward that makes room":           {forward, peers.Command{Result: seq - 1}, false},
		"one that makes room in a full chain": {forward, peers.Command{Result: 1 | full}, false},
		"a Forward that is refused":           {forward, peers.Command{Status: wrongView, Result: seq}, false},
		"a Forward that is lost":              {forward, peers.Command{Lost: true, Result: seq}, false},
		"a Durable":                           {nvme.CmdKVDurable, peers.Command{}, true},
		"a Ship":                              {ship, peers.Command{Result: 3}, true},
		"a Ship of a key that does not exist": {ship, peers.Command{Status: absent}, true},
		"a Fetch when there is no room":       {nvme.CmdKVFetch, peers.Command{Status: nvme.NamespaceNotReady}, false},
	} {
		p := &peerRequest{Command: c.Command}
		p.SQE.SetOpcode(c.opcode)
		if c.opcode == nvme.CmdKVForward {
			p.SQE.KVReplica().SetSequence(seq)
		}
		if got := p.tells(); got != c.want {
			t.Errorf("%s: timed: %t, want %t", what, got, c.want)
		}
	}
}

// TestARefusalForGoodIsLogged once a minute, and not those that the protocol has a rule for.
func TestARefusalForGoodIsLogged(t *testing.T) {
	var log bytes.Buffer
	w := newWatcher()
	w.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
	w.sees([]view.PartitionID{0, 1})
	answer := func(clock int64, st nvme.Status, want int) {
		t.Helper()
		w.clockNS = clock
		p := &peerRequest{Command: peers.Command{Status: st}, g: w.Replicas, m: w.ranges[0], to: 1}
		p.SQE.SetOpcode(nvme.CmdKVFetch)
		w.noteRefusal(p)
		if n := strings.Count(log.String(), "peer=n1"); n != want {
			t.Errorf("%v at %d: %d lines, want %d: %s", st, clock, n, want, log.String())
		}
	}
	for _, st := range []nvme.Status{nvme.Success, nvme.NamespaceNotReady, nvme.KVWrongView,
		nvme.KVWrongView | nvme.DNR, nvme.KeyDoesNotExist | nvme.DNR, nvme.UnrecoveredReadError | nvme.DNR} {
		answer(1, st, 0)
	}
	answer(1, nvme.InvalidField|nvme.DNR, 1)
	answer(refusalPause, nvme.InvalidField|nvme.DNR, 1)
	answer(refusalPause, nvme.InvalidValueSize|nvme.DNR, 2)
	answer(refusalPause+1, nvme.InvalidField|nvme.DNR, 3)
}
