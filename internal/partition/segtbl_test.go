package partition

import (
	"bytes"
	"testing"
)

// TestTheMemoryOfASegTblThatShrinksReturns to the kernel, which makes it zero, and what the table still has stays.
func TestTheMemoryOfASegTblThatShrinksReturns(t *testing.T) {
	m := &memory{}
	mem, err := m.reserveSegTbl(8 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer m.unmap()
	copy(mem, bytes.Repeat([]byte{1}, len(mem)))
	for _, c := range []struct{ used, touched int }{
		{6 << 20, 8 << 20}, {5<<20 + 1, 8 << 20}, {5 << 20, 7 << 20}, {1<<20 + 100, 3<<20 + pageBytes},
		{3 << 20, 3<<20 + pageBytes}, {0, 2 << 20},
	} {
		m.returnSegTbl(int64(c.used))
		if n := bytes.Count(mem, []byte{1}); n != c.touched {
			t.Errorf("%d bytes of %d in use: %d are kept, want %d", c.used, len(mem), n, c.touched)
		}
		if n := bytes.Count(mem[:min(c.used, 1<<20)], []byte{1}); n != min(c.used, 1<<20) {
			t.Errorf("%d bytes in use: they have changed", c.used)
		}
	}
}
