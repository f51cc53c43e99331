package cm

import (
	"bytes"
	"testing"
)

// The request is one of Linux 6.1's nvme-rdma for I/O queue 3 of controller 7 with 128 entries, as a
// capture shows it.
var golden = []byte{
	0x00, 0x00, // RECFMT 0
	0x03, 0x00, // QID 3
	0x80, 0x00, // HRQSIZE 128
	0x7f, 0x00, // HSQSIZE 127
	0x07, 0x00, // CNTLID 7
	31: 0x00,
}

var limits = Limits{MaxEntries: 1024, MaxQID: 64}

func TestGoldenRequestIsReadAndWritten(t *testing.T) {
	r, f := Parse(golden, 16, limits)
	if f != nil {
		t.Fatal(f)
	}
	if r.QID() != 3 || r.HRQSIZE() != 128 || r.HSQSIZE() != 127 || r.CNTLID() != 7 {
		t.Errorf("read %d %d %d %d", r.QID(), r.HRQSIZE(), r.HSQSIZE(), r.CNTLID())
	}
	var w Request
	w.SetRECFMT(0)
	w.SetQID(3)
	w.SetHRQSIZE(128)
	w.SetHSQSIZE(127)
	w.SetCNTLID(7)
	if !bytes.Equal(w[:], golden) {
		t.Errorf("wrote % x", w)
	}
	var a Accept
	a.SetCRQSIZE(0x0180)
	if !bytes.Equal(a[:4], []byte{0, 0, 0x80, 0x01}) || a.CRQSIZE() != 0x180 || a.RECFMT() != 0 {
		t.Errorf("accept % x", a)
	}
}

// The fabric pads private data, so bytes behind the request are ignored.
func TestPaddedRequestIsTaken(t *testing.T) {
	if _, f := Parse(append(bytes.Clone(golden), make([]byte, 24)...), 1, limits); f != nil {
		t.Error(f)
	}
}

func TestBadRequestIsRefusedWithItsStatus(t *testing.T) {
	cases := []struct {
		name   string
		change func(r *Request)
		ird    uint8
		want   Status
	}{
		{"format", func(r *Request) { r.SetRECFMT(1) }, 1, InvalidRECFMT},
		{"qid", func(r *Request) { r.SetQID(65) }, 1, InvalidQID},
		{"no entries", func(r *Request) { r.SetHSQSIZE(0) }, 1, InvalidHSQSIZE},
		{"many entries", func(r *Request) { r.SetHSQSIZE(1024) }, 1, InvalidHSQSIZE},
		{"all entries", func(r *Request) { r.SetHSQSIZE(0xFFFF) }, 1, InvalidHSQSIZE},
		{"admin entries", func(r *Request) { r.SetQID(0); r.SetHSQSIZE(32) }, 1, InvalidHSQSIZE},
		{"receives", func(r *Request) { r.SetHRQSIZE(0) }, 1, InvalidHRQSIZE},
		{"controller", func(r *Request) { r.SetCNTLID(0xFFF0) }, 1, InvalidCNTLID},
		{"no reads", func(*Request) {}, 0, InvalidIRD},
	}
	for _, c := range cases {
		r := Request(golden)
		c.change(&r)
		_, f := Parse(r[:], c.ird, limits)
		if f == nil || f.Status != c.want {
			t.Errorf("%s: %v, want %v", c.name, f, c.want)
			continue
		}
		if got := (*Reject)(f.Reject()).STS(); got != c.want {
			t.Errorf("%s: the reject says %v", c.name, got)
		}
	}
	if _, f := Parse(golden[:31], 1, limits); f == nil || f.Status != InvalidLength {
		t.Errorf("short: %v", f)
	}
	if _, f := Parse(nil, 1, limits); f == nil || f.Status != InvalidLength {
		t.Errorf("none: %v", f)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(golden, uint8(1))
	f.Add([]byte{}, uint8(0))
	f.Fuzz(func(t *testing.T, b []byte, ird uint8) {
		r, fault := Parse(b, ird, limits)
		if (r == nil) == (fault == nil) {
			t.Fatalf("%v and %v", r, fault)
		}
		if fault != nil {
			if fault.What == "" || fault.Status < InvalidLength || fault.Status > InvalidCNTLID {
				t.Errorf("fault %+v", fault)
			}
			return
		}
		if n := int(r.HSQSIZE()) + 1; n < 2 || n > limits.MaxEntries || r.QID() > limits.MaxQID {
			t.Errorf("granted %d entries of queue %d", n, r.QID())
		}
	})
}
