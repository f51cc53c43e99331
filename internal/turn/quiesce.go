package turn

// Quiescer tells when all operations that began before a moment are over. It counts the operations in flight by epoch.
// Quiesce begins a new epoch: from then on nothing begins in an older one (first phase), and the channel it returns is
// closed when nothing is in flight of the older ones (second phase). Operations of the new epoch are not waited for, so
// quiescing ends however busy the machine is. The zero Quiescer is ready. All methods need ownership.
type Quiescer struct {
	// first is the oldest epoch with operations in flight or with a waiter; older counts operations of first and the
	// epochs after it, one each, without the present one, whose number is first+len(older) and whose count is current.
	// Invariant: len(older) == len(quiet).
	first   uint32
	older   []int
	quiet   []chan struct{}
	current int
}

// Begin counts an operation that begins now and returns its epoch, for End.
//
// hot: 0 allocs
func (q *Quiescer) Begin() (epoch uint32) {
	q.current++
	return q.first + uint32(len(q.older))
}

// End says that an operation is over.
//
// hot: 0 allocs
func (q *Quiescer) End(epoch uint32) {
	i := int(epoch - q.first)
	if i == len(q.older) {
		q.current--
		return
	}
	q.older[i]--
	for len(q.older) > 0 && q.older[0] == 0 {
		close(q.quiet[0])
		q.older, q.quiet = q.older[1:], q.quiet[1:]
		q.first++
	}
}

// Quiesce returns a channel that is closed when every operation that has begun is over.
func (q *Quiescer) Quiesce() <-chan struct{} {
	if q.current == 0 && len(q.quiet) > 0 { // nothing has begun since the last call
		return q.quiet[len(q.quiet)-1]
	}
	quiet := make(chan struct{})
	if q.current == 0 {
		close(quiet)
		return quiet
	}
	q.older, q.quiet = append(q.older, q.current), append(q.quiet, quiet)
	q.current = 0
	return quiet
}

// InFlight is how many operations have begun and are not over.
func (q *Quiescer) InFlight() int {
	n := q.current
	for _, c := range q.older {
		n += c
	}
	return n
}
