package replicas_test

import (
	"jbofd/internal/crrs"
	"jbofd/internal/kvstore"
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
