package peers_test

import (
	"testing"

	"jbofd/internal/nvme"
	"jbofd/internal/peers"
)

// kicked counts calls of a Sink, of which the first one asks for a Kick.
type kicked struct{ done, kicks int }

func (k *kicked) PeerDone(*peers.Command) bool { k.done++; return k.done == 1 }
func (k *kicked) Kick()                        { k.kicks++ }

// TestCommandsWithoutARouteKickTheirSinks before Send returns: nothing else would make a Sink look at what it was
// given.
func TestCommandsWithoutARouteKickTheirSinks(t *testing.T) {
	r := newRig(t, nil)
	sinks := [2]kicked{}
	var cmds []*peers.Command
	for i := range 6 {
		c := r.message(nvme.CmdKVShip, 7, uint64(i), 0) // there is no view at all
		c.Sink = &sinks[i%2]
		cmds = append(cmds, c)
	}
	r.send(cmds...)
	for i, s := range sinks {
		if s.done != 3 || s.kicks != 1 {
			t.Errorf("Sink %d: %d commands, %d Kicks", i, s.done, s.kicks)
		}
	}
	for _, c := range cmds {
		if !c.Lost {
			t.Errorf("command %d is not lost", c.Tag)
		}
	}
}
