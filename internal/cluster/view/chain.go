package view

// State is the public state of a member of a chain: what the manager says of it.
type State uint8

// The states, in the order in which the members of a chain are listed.
const (
	// Serving: the member has all data of the range. It takes part in writes and answers reads.
	Serving State = iota
	// Leaving: like Serving, until others have taken its place.
	Leaving
	// LastCopy: the member was Serving when the last members went, so that it has all data that were acknowledged. The
	// chain is halted until one of its last copies is back.
	LastCopy
	// Filling: the member follows the ChainTail, takes live writes from it, and is given the rest of the range.
	Filling
	// Waiting: the member is to be filled later. What it has of the range counts for nothing.
	Waiting
	numStates
)

var stateNames = [numStates]string{"serving", "leaving", "last copy", "filling", "waiting"}

func (s State) String() string {
	if s < numStates {
		return stateNames[s]
	}
	return "unknown"
}

// holds reports whether a member in this state has all data of its range.
func (s State) holds() bool { return s <= LastCopy }

// Local is the state of a range in a partition, as its node reports it.
type Local uint8

// The local states.
const (
	// Absent: the node is not alive, so that nothing is known of the partition.
	Absent Local = iota
	// Silent: the node is alive and has not reported the range yet, because it has not seen the view that gives it the
	// range.
	Silent
	// Damaged: the partition cannot hold the range now, nor be filled, for instance because its store has failed or the
	// ChainTail is out of its reach. A serving member is taken out of the chain, a filling one becomes waiting.
	Damaged
	// Incomplete: data of the range are missing.
	Incomplete
	// Complete: the partition has all data of the range, as far as its node knows.
	Complete
	numLocals
)

// Report is what a node says of a range in one of its partitions.
type Report struct {
	Local Local
	// Epoch is that of the newest view in which the node has seen the partition as a member of the chain when it made
	// the report. A report that is older than the member's Since is about an earlier membership.
	Epoch Epoch
	// Yield is what the member does as the ChainHead.
	Yield Yield
	// Objects is how many objects and tombstones the partition has of a range that is halted, also if it is no member;
	// 0: none, or they were not counted yet.
	Objects uint32
}

// Yield says that a ChainHead begins no more writes, and that none is under way, so that another member can be
// ChainHead. The zero value says that it does not.
type Yield struct {
	// ChainEpoch is View.ChainEpochs of the range in the view by which it is the ChainHead.
	ChainEpoch uint32
	// To is the member that is to be ChainHead.
	To PartitionID
}

// Member is a partition in a chain.
type Member struct {
	Partition PartitionID
	State     State
	// Since is the epoch of the view at which this membership began: the chain was made, or the member began to wait,
	// or became Filling. Only reports of this epoch or later count.
	Since Epoch
}

// Chain is the replicas of a range: first those that hold its data, from the ChainHead to the ChainTail, then the one
// that is Filling, then those that are Waiting.
//
// Invariant: no partition occurs twice; at most one member is Filling, and none if there is a LastCopy; Serving and
// Leaving members do not occur together with LastCopy.
type Chain []Member

// Halted reports whether the range is not served, because all members with its data are gone.
func (c Chain) Halted() bool { return len(c) == 0 || c[0].State == LastCopy || !c[0].State.holds() }

// find returns the index of a partition, or -1.
func (c Chain) find(p PartitionID) int {
	for i := range c {
		if c[i].Partition == p {
			return i
		}
	}
	return -1
}

// uses reports whether a partition is a member that does more than to wait.
func (c Chain) uses(p PartitionID) bool {
	i := c.find(p)
	return i >= 0 && c[i].State != Waiting
}

// Next returns the chain that follows c in the view of an epoch, given what the nodes report and which partitions are
// wanted as its members. It is the only place where chains change.
//
// The rules, in their order:
//
//   - A chain without members is new: the wanted partitions whose nodes are alive are Serving, and empty.
//   - A member that serves stays as long as its node is alive and does not report that data are missing. If no such
//     member is left, all that served become LastCopy: an acknowledged write is on each of them. Otherwise those that
//     have gone are members no more.
//   - A LastCopy that is back and Complete becomes Serving, alone: the others may have writes that were never
//     acknowledged, or lack them, so that they are filled again.
//   - The Filling member that is Complete becomes the ChainTail. One that cannot go on waits; if that is because no
//     member serves any more, it is the first that waits, for AcceptLoss: others have less of the data.
//   - A member that serves and is not wanted is Leaving. It goes when as many members serve as are wanted.
//   - Wanted partitions that are no members wait. The first one whose node is alive becomes filling, one at a time.
//
// Every state has an exit without an operator, except that of a halted chain none of whose last copies returns, which
// needs AcceptLoss. TestEveryChainHasAnExit enumerates all states.
//
// Source: LEED (SIGCOMM'23), section 3.8.1, which knows neither last copies nor two changes at a time; 3FS, the chain
// table of the design notes.
func Next(c Chain, wanted []PartitionID, report func(PartitionID) Report, epoch Epoch) Chain {
	if len(c) == 0 {
		return fresh(wanted, report, epoch)
	}
	out := make(Chain, 0, len(c)+len(wanted))
	out = append(out, holders(c, report)...)
	halted := out[0].State == LastCopy
	if !halted {
		for _, m := range c {
			if r := report(m.Partition); m.State == Filling && current(m, r) && r.Local == Complete &&
				contains(wanted, m.Partition) {
				m.State = Serving
				out = append(out, m)
			}
		}
		out = releaseUnwanted(out, wanted)
		for _, m := range c {
			if m.State == Filling && out.find(m.Partition) < 0 && contains(wanted, m.Partition) &&
				canFill(report(m.Partition)) {
				out = append(out, m)
			}
		}
	}
	filling := !halted && out[len(out)-1].State == Filling
	var waiting Chain
	add := func(p PartitionID) {
		if !contains(wanted, p) || out.find(p) >= 0 || waiting.find(p) >= 0 {
			return
		}
		m := Member{Partition: p, State: Waiting, Since: epoch}
		if i := c.find(p); i >= 0 && c[i].State == Waiting {
			m.Since = c[i].Since
		}
		if !halted && !filling && canFill(report(p)) {
			m.State, m.Since, filling = Filling, epoch, true
			out = append(out, m)
			return
		}
		waiting = append(waiting, m)
	}
	for _, m := range c {
		if m.State == Filling && halted {
			add(m.Partition)
		}
	}
	for _, m := range c {
		if m.State == Waiting {
			add(m.Partition)
		}
	}
	for _, p := range wanted {
		add(p)
	}
	return append(out, waiting...)
}

// AcceptLoss returns the chain when an operator has given up the data of a halted one, whose last copies do not
// return: the first candidate that can serves the range alone, with what it happens to have of it, and others are
// filled from it afterwards. Not all of them at once: what they happen to have may differ. A chain that is served, and
// one for which no candidate is alive, stays as it is.
func AcceptLoss(c Chain, candidates []PartitionID, report func(PartitionID) Report, epoch Epoch) Chain {
	if len(c) == 0 || !c.Halted() {
		return c
	}
	for _, p := range candidates {
		if canFill(report(p)) {
			return Chain{{Partition: p, State: Serving, Since: epoch}}
		}
	}
	return c
}

// HandOver returns the chain in which the member to which the ChainHead yields is the first one. The others keep their
// order. A chain of another epoch than that of the Yield stays as it is, and so does one of which not all members
// serve.
func HandOver(c Chain, y Yield, epoch uint32) Chain {
	at := c.find(y.To)
	if y.ChainEpoch == 0 || y.ChainEpoch != epoch || at <= 0 {
		return c
	}
	for _, m := range c {
		if m.State != Serving {
			return c
		}
	}
	out := make(Chain, 0, len(c))
	out = append(append(out, c[at]), c[:at]...)
	return append(out, c[at+1:]...)
}

// fresh returns a chain without data. A partition whose node is not alive is not in it: when the node is back it could
// not tell whether the others have been given data meanwhile.
func fresh(wanted []PartitionID, report func(PartitionID) Report, epoch Epoch) Chain {
	c := make(Chain, 0, len(wanted))
	for _, p := range wanted {
		if canFill(report(p)) {
			c = append(c, Member{Partition: p, State: Serving, Since: epoch})
		}
	}
	return c
}

// holders returns the members that hold the data of the range from now on: those that go on serving; if there are none,
// the first last copy that is back, alone; and if there is none of these, all that served, as last copies. It is never
// empty, because the chain of a range always has a member with its data.
func holders(c Chain, report func(PartitionID) Report) Chain {
	var served, left, back Chain
	for _, m := range c {
		if !m.State.holds() {
			continue
		}
		r := report(m.Partition)
		switch {
		case m.State == LastCopy && r.Local == Complete && current(m, r):
			m.State = Serving
			back = append(back, m)
		case m.State != LastCopy && stays(m, r):
			left = append(left, m)
		default:
			m.State = LastCopy
			served = append(served, m)
		}
	}
	switch {
	case len(left) > 0:
		return left
	case len(back) > 0:
		return back[:1]
	}
	return served
}

// releaseUnwanted marks members that serve and are not wanted as Leaving, and removes those that are replaced.
func releaseUnwanted(c Chain, wanted []PartitionID) Chain {
	serving := 0
	for i := range c {
		if contains(wanted, c[i].Partition) {
			c[i].State = Serving
			serving++
		} else {
			c[i].State = Leaving
		}
	}
	out := c[:0]
	for _, m := range c {
		// Without a wanted member nothing is released: a range that nobody is to have would be lost.
		if m.State == Leaving && serving > 0 && serving >= len(wanted) {
			continue
		}
		out = append(out, m)
	}
	return out
}

// current reports whether a report is about this membership.
func current(m Member, r Report) bool { return r.Epoch >= m.Since }

// stays reports whether a member that serves may go on.
func stays(m Member, r Report) bool {
	switch r.Local {
	case Silent, Complete:
		return true
	case Incomplete:
		return !current(m, r)
	}
	return false
}

// canFill reports whether a partition can be filled.
func canFill(r Report) bool { return r.Local != Absent && r.Local != Damaged }

func contains(list []PartitionID, p PartitionID) bool {
	for _, q := range list {
		if p == q {
			return true
		}
	}
	return false
}
