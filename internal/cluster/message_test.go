package cluster

import (
	"bytes"
	"encoding/hex"
	"errors"
	"reflect"
	"strings"
	"testing"

	"jbofd/internal/cluster/view"
	"jbofd/internal/uuid"
)

// someMessages are one of each kind.
func someMessages() []*Message {
	r := Report{Term: 8, Seq: 21, Echo: 98, Cluster: uuid.UUID{1}, Protocol: Protocol, Name: "b", Address: "h:2",
		Incarnation: NewIncarnation(3, 7), Seen: 5, Version: 2}
	full := r
	full.Full, full.Connected = true, true
	full.Ranges = []RangeReport{
		{Partition: 3, Range: 9, Report: view.Report{Local: view.Complete, Epoch: 4}},
		{Partition: 3, Range: 10, Report: view.Report{Local: view.Complete, Epoch: 4,
			Yield: view.Yield{ChainEpoch: 7, To: 2}}},
		{Partition: 4, Range: 11, Report: view.Report{Local: view.Incomplete, Objects: 300}},
		{Partition: 1 << 15, Range: view.MaxRanges - 1, Report: view.Report{Local: view.Absent, Epoch: 1 << 60}}}
	full.Unusable, full.Failing = []view.PartitionID{1, 65535}, []view.PartitionID{3}
	a := Answer{Term: 8, Manager: Identity{Name: "a", Address: "h:1", Incarnation: 9}, To: 7, Seq: 21, Stamp: 99,
		Epoch: 5, Acts: true, Granted: true, Version: 2}
	refused := a
	refused.Acts, refused.Granted, refused.Ready, refused.Refused = false, false, true, NameTaken
	refused.View = someMap().Encode()
	return []*Message{{Report: &r}, {Report: &full}, {Answer: &a}, {Answer: &refused}}
}

// TestMessagesReturn encodes and decodes each kind of message, and compares an answer with its dump.
func TestMessagesReturn(t *testing.T) {
	for i, m := range someMessages() {
		got, err := DecodeMessage(m.Encode())
		if err != nil || !reflect.DeepEqual(got, m) {
			t.Errorf("message %d: %+v, %v, want %+v", i, got, err, m)
		}
	}
	want := strings.ReplaceAll("4a424341 7bfaab09 0100 0800000000000000 0900000000000000 0161 03683a31"+
		" 0700000000000000 1500000000000000 6300000000000000 0500000000000000 03 0200000000000000 00 00", " ", "")
	if got := hex.EncodeToString(someMessages()[2].Encode()); got != want {
		t.Errorf("the answer is\n%s, want\n%s", got, want)
	}
}

// TestAChangedMessageIsRefused flips each bit of each message, cuts it anywhere, and appends to it: also with a valid
// checksum, a message that does not fit is refused.
func TestAChangedMessageIsRefused(t *testing.T) {
	for i, m := range someMessages() {
		b := m.Encode()
		for bit := range len(b) * 8 {
			c := bytes.Clone(b)
			c[bit/8] ^= 1 << (bit % 8)
			if _, err := DecodeMessage(c); !errors.Is(err, ErrForeign) && !errors.Is(err, ErrProtocol) {
				t.Fatalf("message %d with bit %d flipped: %v", i, bit, err)
			}
		}
		for n := headerBytes; n < len(b); n++ {
			if _, err := DecodeMessage(seal(bytes.Clone(b[:n]))); err == nil {
				t.Fatalf("message %d of %d bytes instead of %d is taken", i, n, len(b))
			}
		}
		if _, err := DecodeMessage(seal(append(bytes.Clone(b), 0))); err == nil {
			t.Fatalf("message %d with a byte more is taken", i)
		}
	}
	bad := someMessages()
	bad[1].Report.Ranges[0].Local = view.Complete + 1
	bad[2].Answer.Refused = NodeForgotten + 1
	for _, m := range bad[1:3] {
		if _, err := DecodeMessage(m.Encode()); !errors.Is(err, ErrForeign) {
			t.Errorf("a value that there is not: %v", err)
		}
	}
	bad[1].Report.Ranges[0].Local, bad[1].Report.Ranges[0].Range = view.Complete, view.MaxRanges
	if _, err := DecodeMessage(bad[1].Encode()); !errors.Is(err, ErrForeign) {
		t.Errorf("a range that there is not: %v", err)
	}
	if _, err := DecodeMessage(make([]byte, MaxMessageBytes+1)); !errors.Is(err, ErrForeign) {
		t.Errorf("a message that is too long: %v", err)
	}
}

// FuzzMessage gives the decoder bytes with a valid checksum: whatever it takes encodes to a message that decodes to the
// same.
func FuzzMessage(f *testing.F) {
	for _, m := range someMessages() {
		f.Add(m.Encode())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= headerBytes {
			b = seal(bytes.Clone(b))
		}
		m, err := DecodeMessage(b)
		if err != nil {
			return
		}
		again, err := DecodeMessage(m.Encode())
		if err != nil || !reflect.DeepEqual(m, again) {
			t.Fatalf("%+v becomes %+v, %v", m, again, err)
		}
	})
}
