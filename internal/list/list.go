// Package list holds FIFO lists of records that lie in a slab and are named by their index. A list allocates nothing;
// the links of all lists of a slab are one slice, so that a record is in at most one list at a time.
package list

// NoRecord is the index of no record.
const NoRecord = -1

// List is a FIFO of N records. An empty list is None; the zero List is not valid.
type List struct {
	First, Last int32
	N           int
}

// None is the empty list.
var None = List{First: NoRecord, Last: NoRecord}

// Links holds, for each record of a slab, the index of the record that follows it in its list.
type Links []int32

// Next returns the index of the record that follows i in its list, or NoRecord.
func (k Links) Next(i int32) int32 { return k[i] } // hot: 0 allocs

// Push appends record i, which must be in no list, to l.
func (k Links) Push(l *List, i int32) { // hot: 0 allocs
	k[i] = NoRecord
	if l.N == 0 {
		l.First = i
	} else {
		k[l.Last] = i
	}
	l.Last = i
	l.N++
}

// PushFront puts record i, which must be in no list, at the front of l.
func (k Links) PushFront(l *List, i int32) { // hot: 0 allocs
	k[i] = l.First
	if l.N == 0 {
		l.Last = i
	}
	l.First = i
	l.N++
}

// Pop removes the first record of l, which must not be empty, and returns its index.
func (k Links) Pop(l *List) int32 { // hot: 0 allocs
	i := l.First
	l.First = k[i]
	if l.N--; l.N == 0 {
		l.Last = NoRecord
	}
	k[i] = NoRecord
	return i
}
