package list

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestListsAgreeWithSlices: two lists of one slab, whatever is done.
func TestListsAgreeWithSlices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		links := make(Links, 8)
		lists := [2]List{None, None}
		want := [2][]int32{}
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			n := rapid.IntRange(0, 1).Draw(t, "list")
			l := &lists[n]
			i := rapid.Int32Range(0, 7).Draw(t, "record")
			used := slices.Contains(want[0], i) || slices.Contains(want[1], i)
			switch rapid.IntRange(0, 2).Draw(t, "what") {
			case 0:
				if !used {
					links.Push(l, i)
					want[n] = append(want[n], i)
				}
			case 1:
				if !used {
					links.PushFront(l, i)
					want[n] = append([]int32{i}, want[n]...)
				}
			default:
				if l.N > 0 {
					if got := links.Pop(l); got != want[n][0] {
						t.Fatalf("Pop returns %d, want %d", got, want[n][0])
					}
					want[n] = want[n][1:]
				}
			}
			for n := range lists {
				var got []int32
				for i := lists[n].First; i != NoRecord; i = links.Next(i) {
					got = append(got, i)
				}
				if !slices.Equal(got, want[n]) || lists[n].N != len(want[n]) || len(got) == 0 && lists[n] != None ||
					len(got) > 0 && lists[n].Last != got[len(got)-1] {
					t.Fatalf("list %d is %v (%+v), want %v", n, got, lists[n], want[n])
				}
			}
		}
	})
}
