package peers

import "testing"

// TestAQuarterIsForTargetsThatHaveLess than a quarter of a queue for drives, to the place; and the queues count apart.
func TestAQuarterIsForTargetsThatHaveLess(t *testing.T) {
	const places = 16
	n := &node{}
	a, b, c := &target{node: n}, &target{node: n}, &target{node: n}
	for _, of := range []int{ships, fills} {
		q := &n.queues[of]
		q.node, q.sent = n, make([]*Command, places)
		for i := range places {
			q.free = append(q.free, uint16(i))
		}
		push := func(to *target, commands int) {
			for range commands {
				q.others.push(&Command{target: to})
			}
		}
		// send sends what has a place, and returns how many commands each target has then.
		send := func() [3]int {
			for len(q.free) > 0 {
				next := q.nextForDrives()
				if next == nil {
					break
				}
				q.free = q.free[:len(q.free)-1]
				q.count(next, 1)
			}
			return [3]int{q.heldOf(a).sent, q.heldOf(b).sent, q.heldOf(c).sent}
		}
		end := func(of *target) {
			q.free = append(q.free, 0)
			q.count(&Command{target: of}, -1)
		}
		for i, step := range []struct {
			do   func()
			want [3]int
		}{
			{func() { push(b, 4) }, [3]int{0, 4, 0}},
			{func() { push(a, 40) }, [3]int{8, 4, 0}},            // a quarter stays free
			{func() { push(b, 1) }, [3]int{8, 4, 0}},             // b has a quarter
			{func() { push(c, 2) }, [3]int{8, 4, 2}},             // c has less
			{func() { end(b) }, [3]int{8, 4, 2}},                 // what b had to wait with
			{func() { end(a); end(a) }, [3]int{6, 4, 2}},         // a has more than a quarter, and four places are free
			{func() { end(a) }, [3]int{6, 4, 2}},                 // it is the next place that it may have
			{func() { push(c, 9) }, [3]int{6, 4, 4}},             // c has a quarter now
			{func() { end(c); end(c); end(c) }, [3]int{7, 4, 4}}, // c has it again, and a place was free for anybody
			{func() { end(b); end(b); end(b) }, [3]int{7, 1, 4}}, // b wants nothing, and four places are free
			{func() { push(b, 9) }, [3]int{7, 4, 4}},             // which b gets
		} {
			step.do()
			if got := send(); got != step.want {
				t.Fatalf("queue %d, step %d: the targets have %v places, want %v", of, i, got, step.want)
			}
		}
	}
}
