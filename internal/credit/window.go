package credit

// HalfLifeNS is how long a window must have been empty for its credit to be halved: the
// credit of a host that does nothing is not given back, and if all those that pause
// came back with what they once had, they would come all at once.
const HalfLifeNS = 100_000_000

// Window is a host's account of one SSD. The zero Window has no credit yet and limits
// nothing. One goroutine at a time.
type Window struct {
	// credit is the latest in units, as it has aged; 0: none came yet.
	credit int
	// units and commands are outstanding. Invariant: units >= commands.
	units, commands int
	// emptyNS is when the last command ended or the credit was last halved, if
	// commands is 0.
	emptyNS int64
}

// Grant takes a credit that came with no I/O: with the grant of the feature, or
// asked for. 0 changes nothing.
func (w *Window) Grant(now int64, units int) {
	if units <= 0 {
		return
	}
	w.credit = units
	if w.commands == 0 {
		w.emptyNS = now
	}
}

// MaySend reports whether a command (or several that go together) of so many units may
// go now: always if nothing is outstanding, so that a credit smaller than a command
// stops nobody.
//
// hot: 0 allocs
func (w *Window) MaySend(now int64, units int) bool {
	if w.commands == 0 {
		w.age(now)
		return true
	}
	return w.credit == 0 || w.units+units <= w.credit
}

// age halves the credit for every HalfLifeNS that nothing was outstanding.
func (w *Window) age(now int64) {
	if n := (now - w.emptyNS) / HalfLifeNS; n > 0 && w.credit > 0 {
		w.credit = max(w.credit>>min(n, 31), 1)
		w.emptyNS += n * HalfLifeNS
	}
}

// Sent counts a command that goes, whether it may or not.
//
// hot: 0 allocs
func (w *Window) Sent(units int) {
	w.units += units
	w.commands++
}

// Completed counts one that is over, however it ended. credit is what its completion
// carried: the latest counts, 0 changes nothing.
//
// hot: 0 allocs
func (w *Window) Completed(now int64, units, credit int) {
	w.units -= units
	if w.commands--; w.commands == 0 {
		w.emptyNS = now
	}
	if credit > 0 {
		w.credit = credit
	}
}

// Credit is how many units may be outstanding now; 0: no limit.
func (w *Window) Credit(now int64) int {
	if w.commands == 0 {
		w.age(now)
	}
	return w.credit
}

// Outstanding is how much was sent and has not completed.
func (w *Window) Outstanding() (commands, units int) { return w.commands, w.units }
