package kv

import (
	"testing"

	"jbofd/internal/nvme"
)

// TestAWriteThatWasInterruptedIsRepeatedAsARetry, because it may have been carried out: a replicated namespace answers
// so when it does not know.
func TestAWriteThatWasInterruptedIsRepeatedAsARetry(t *testing.T) {
	s := newTarget(t)
	s.extended = true
	n := open(t, s, Options{})
	q := openQueue(t, n)
	for i, put := range []func() error{
		func() error { return n.Put(testContext(t), []byte("k"), []byte("value")) },
		func() error {
			if _, err := q.Submit([]Op{{Kind: Put, Key: []byte("k"), Value: []byte("value")}}); err != nil {
				return err
			}
			var res [1]Result
			if _, err := q.Poll(res[:], -1); err != nil {
				return err
			}
			return res[0].Err
		},
	} {
		times := 0
		s.onIO(func(e *nvme.SQE) (nvme.Status, verdict) {
			if times++; times == 1 {
				return nvme.CommandInterrupted, interrupt
			}
			return 0, carryOut
		})
		if err := put(); err != nil {
			t.Fatal(err)
		}
		if _, version, retries := s.identities(); version != uint64(i+1) || retries != i+1 {
			t.Errorf("version %d after %d writes; %d retries have found their first copy", version, i+1, retries)
		}
	}
}
