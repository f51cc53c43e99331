package replicas_test

import (
	"fmt"

	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
	"jbofd/internal/nvme"
	"jbofd/internal/replicas"
)

// host is a client, one request at a time.
type host struct {
	replicas.Request
	done chan struct{}
}

func (h *host) ReplicaDone(*replicas.Request) bool {
	h.done <- struct{}{}
	return false
}

func (h *host) Kick() {}

// ask has a node carry out the host's Request.
func (h *host) ask(n *node) {
	h.Sink, h.Tenant = h, 3
	var b replicas.Batch
	b.Add(&h.Request)
	n.r.Submit(&b)
	<-h.done
}

// put makes the host's Request a Put.
func (h *host) put(key, value string) {
	h.Request = replicas.Request{Key: crrsKey(key), Op: kvstore.Put, Value: []byte(value)}
}

// get makes it a read.
func (h *host) get(key string) {
	h.Request = replicas.Request{Kind: replicas.Read, Key: crrsKey(key), Value: make([]byte, 64)}
}

func crrsKey(k string) (key crrs.Key) {
	key.Len = uint8(copy(key.Bytes[:], k))
	return key
}

// same tests that all members of a key's chain answer with the same value.
func (g *rig) same(key []byte) {
	g.t.Helper()
	h := newHost()
	var want string
	for i, n := range g.chain(key) {
		h.Request = replicas.Request{Kind: replicas.Read, Key: crrsKey(string(key)), Value: make([]byte, 4096)}
		h.ask(n)
		got := fmt.Sprintf("%v version %d: %x", h.Status, h.ObjectVersion, h.Value[:h.Bytes])
		if want == "" {
			want = got
		}
		if got != want || h.Status.Code() != nvme.Success && h.Status.Code() != nvme.KeyDoesNotExist {
			g.t.Errorf("key %s at member %d: %s, at member 0: %s", key, i, got, want)
		}
	}
}

func (h *host) want(n *node, st nvme.Status, value string) {
	n.rig.t.Helper()
	h.ask(n)
	if h.Status.Code() != st || string(h.Value[:h.Bytes]) != value {
		n.rig.t.Errorf("node %d answers %v, %q; want %v, %q", n.id, h.Status, h.Value[:h.Bytes], st, value)
	}
}

func newHost() *host { return &host{done: make(chan struct{}, 1)} }
