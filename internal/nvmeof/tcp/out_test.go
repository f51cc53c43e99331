package tcp

import (
	"bytes"
	"testing"
)

// TestShortDataIsCopiedUpToABound: what is sent is the same. Longer data stays the caller's, as does short data behind
// the bound.
func TestShortDataIsCopiedUpToABound(t *testing.T) {
	var o Out
	for round := range 3 {
		var want []byte
		var own [][]byte // data that is not copied
		header := func(n int) {
			h := bytes.Repeat([]byte{byte(n)}, 24)
			o.hdr(h)
			want = append(want, h...)
		}
		data := func(n, b int, copied bool) {
			d := bytes.Repeat([]byte{byte(b)}, n)
			o.data(d)
			want = append(want, d...)
			if copied {
				clear(d) // it is the caller's again
			} else {
				own = append(own, d)
			}
		}
		for i := range maxCopied / smallData {
			header(i)
			data(smallData, i, true)
			if i%4 == round {
				data(smallData+1, i, false)
			}
		}
		data(1, 7, false)
		header(8)
		var got []byte
		for _, s := range o.Segs {
			if len(own) > 0 && &s[0] == &own[0][0] {
				own = own[1:]
			}
			got = append(got, s...)
		}
		if !bytes.Equal(got, want) || o.Bytes != len(want) || len(own) > 0 {
			t.Fatalf("round %d: %d bytes are sent, want %d; %d pieces of data are not the caller's", round, o.Bytes,
				len(want), len(own))
		}
		// In the first round the memory grows, which begins another piece.
		if n := len(o.Segs); round > 0 && n > 2*(maxCopied/smallData/4+1)+1 {
			t.Errorf("round %d: %d pieces", round, n)
		}
		o.Reset()
	}
}
