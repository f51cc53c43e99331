package credit

// HalfLifeNS is how long a window must be empty for its credit to be halved. An idle host does not return its credit,
// and if all idle hosts resumed with the credit that they once had, their bursts would coincide.
const HalfLifeNS = 100_000_000

// Window tracks the credit of a host at one SSD. The zero Window has no credit yet and limits nothing. One goroutine at
// a time may call it.
type Window struct {
	// credit is the latest credit in units, after ageing; 0 if none was received.
	credit int
	// units and commands count what is outstanding. Invariant: units >= commands.
	units, commands int
	// emptyNS is when the last command ended or the credit was last halved, if
	// commands is 0.
	emptyNS int64
}

// Grant sets a credit that did not come with a completion: when the feature was enabled, or in answer to a query. 0
// changes nothing.
func (w *Window) Grant(now int64, units int) {
	if units <= 0 {
		return
	}
	w.credit = units
	if w.commands == 0 {
		w.emptyNS = now
	}
}

// MaySend reports whether a command of this many units, or several that belong together, may be sent now. It is always
// true if nothing is outstanding, so that a credit smaller than a command cannot block the host.
//
// hot: 0 allocs
func (w *Window) MaySend(now int64, units int) bool {
	if w.commands == 0 {
		w.age(now)
		return true
	}
	return w.credit == 0 || w.units+units <= w.credit
}

// age halves the credit for every HalfLifeNS during which nothing was outstanding.
func (w *Window) age(now int64) {
	if n := (now - w.emptyNS) / HalfLifeNS; n > 0 && w.credit > 0 {
		w.credit = max(w.credit>>min(n, 31), 1)
		w.emptyNS += n * HalfLifeNS
	}
}

// Sent counts a command that is sent, whether MaySend allowed it or not.
//
// hot: 0 allocs
func (w *Window) Sent(units int) {
	w.units += units
	w.commands++
}

// Completed counts a completed command, whatever its status. credit is the value in its completion: the latest value
// applies, and 0 changes nothing.
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

// Credit returns how many units may be outstanding now; 0 means no limit.
func (w *Window) Credit(now int64) int {
	if w.commands == 0 {
		w.age(now)
	}
	return w.credit
}

// Outstanding returns how many units were sent and have not completed.
func (w *Window) Outstanding() (commands, units int) { return w.commands, w.units }
