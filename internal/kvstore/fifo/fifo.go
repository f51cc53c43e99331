// Package fifo is lists of records that lie in a slab, by their numbers: nothing is allocated, and a record is in one of
// them at a time.
package fifo

// Nobody is no record.
const Nobody = -1

// List is a FIFO of N records. Without any it is None, not the zero value.
type List struct {
	First, Last int32
	N           int
}

// None is a list without records.
var None = List{First: Nobody, Last: Nobody}

// Links are the links of all records of a slab, by number, to the next of their lists.
type Links []int32

// Next returns what follows a record of a list, or Nobody.
func (k Links) Next(i int32) int32 { return k[i] } // hot: 0 allocs

// Push puts a record, which is in no list, at the end of l.
func (k Links) Push(l *List, i int32) { // hot: 0 allocs
	k[i] = Nobody
	if l.N == 0 {
		l.First = i
	} else {
		k[l.Last] = i
	}
	l.Last = i
	l.N++
}

// PushFront puts a record, which is in no list, before all others of l.
func (k Links) PushFront(l *List, i int32) { // hot: 0 allocs
	k[i] = l.First
	if l.N == 0 {
		l.Last = i
	}
	l.First = i
	l.N++
}

// Pop takes the first record out of l, which has one.
func (k Links) Pop(l *List) int32 { // hot: 0 allocs
	i := l.First
	l.First = k[i]
	if l.N--; l.N == 0 {
		l.Last = Nobody
	}
	k[i] = Nobody
	return i
}
