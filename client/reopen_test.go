package client_test

import (
	"testing"

	"jbofd/client"
)

// TestAQIDIsFreeOnceCloseHasReturned: the target knows that a queue pair is closed before its identifier is used again.
func TestAQIDIsFreeOnceCloseHasReturned(t *testing.T) {
	c := newJBOFD(t).connect(t, client.Options{QPairs: 1})
	for round := range 500 {
		q, err := c.OpenQPair(t.Context())
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		if err := q.Close(); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
	}
}
